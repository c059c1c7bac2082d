//! `bindguard holders`: the holders of the mounts at or below a path, and the commands that free
//! the mounts.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_config::Config;
use bindguard_core::mount_table::MountTable;
use bindguard_core::text::shell_word;
use bindguard_operator::block_device;
use bindguard_operator::holders::{
    HeldMount, Holder, HolderKind, HoldersReport, MountsToFind, ReleaseCommand, Trial,
};
use bindguard_operator::namespaces::Proc;
use bindguard_operator::pods::PodContainer;
use bindguard_sys::Handle;
use clap::Args;

use crate::named_file::check_answers;
use crate::pods::PodsFrom;
use crate::show::{self, DIMMED, FAULTY, HEALTHY, Lines};

/// Arguments of `holders`.
#[derive(Debug, Args)]
pub struct Holders {
    /// A mount point, any folder, or a block device.
    path: PathBuf,
    /// The node's `/proc`, as mounted in this pod. PATH is then a path of the node.
    #[arg(long, value_name = "DIR")]
    proc: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Holders {
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let is_afar = self.proc.is_some();
        let proc = self.proc.map_or_else(Proc::default, Proc::at);
        let path = if is_afar {
            self.path
        } else {
            resolved(&self.path)?
        };
        let seen = proc.namespaces()?;
        let wanted = wanted(&path, &seen.own, is_afar)?;
        let places = config.places();
        let trial = |container: &PodContainer| match is_afar {
            false => Trial::of(container, config.policy(), places),
            // the pids of another /proc name no process here
            true => Trial::default(),
        };
        let pods = self.pods.pods();
        let (own, others) = (&seen.own, &seen.others);
        let mut report = HoldersReport::find(&path, &wanted, own, others, &pods, places, &trial);
        report.checked = seen.checked;
        report.problems.splice(0..0, seen.problems);
        let is_incomplete = !report.problems.is_empty();
        let has_holders = !report.holders.is_empty();
        show::finish(&report, self.json, text, is_incomplete, has_holders)
    }
}

/// The path as the kernel prints it.
pub(crate) fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    // A hung mount is opened without a request to its server. The folders above it are not.
    if let Some(folder) = std::path::absolute(path)?.parent() {
        check_answers(folder)?;
    }
    let handle = Handle::follow(path)?;
    handle
        .resolved_path()
        .with_context(|| format!("resolve {}", path.display()))
}

pub(crate) fn wanted(path: &Path, own: &MountTable, is_afar: bool) -> anyhow::Result<MountsToFind> {
    if !is_afar
        && path.starts_with("/dev")
        && let Some(device) =
            block_device(path).with_context(|| format!("open {}", path.display()))?
    {
        return Ok(MountsToFind::of_device(device));
    }
    Ok(MountsToFind::at_or_below(path, own))
}

// The report for people: a paragraph for each pod and for each mount namespace outside pods.
//
// A paragraph names a few mounts. `--json` names all of them, and lists the namespaces of a pod
// separately.

/// The number of mounts that a paragraph names.
const NAMED: usize = 5;

fn text(report: &HoldersReport) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    for mount in report.mounts.iter().take(NAMED) {
        lines.headed("mounted", HEALTHY, &of_mount(mount));
    }
    say_how_many_more(report.mounts.len(), NAMED, &mut lines);
    // Without a command to advise, only the pods matter.
    let named = if report.note.is_some() { 0 } else { NAMED };
    // The namespaces grouped by pod, in the order of the report.
    let mut groups: Vec<Vec<&Holder>> = Vec::new();
    for holder in &report.holders {
        let same_pod = groups
            .iter_mut()
            .find(|group| holder.pod.is_some() && group[0].pod == holder.pod);
        match same_pod {
            Some(group) => group.push(holder),
            None => groups.push(vec![holder]),
        }
    }
    for group in groups {
        describe(&group, named, &mut lines);
    }
    if let Some(note) = &report.note {
        lines.headed("note", DIMMED, note);
    }
    lines.line(&summary(report));
    lines
}

fn describe(group: &[&Holder], named: usize, lines: &mut Lines) {
    let heading = match group {
        [holder] => who(holder),
        _ => processes_of_pod(group),
    };
    lines.headed("held", FAULTY, &heading);
    let mounts: Vec<&HeldMount> = group.iter().flat_map(|holder| &holder.mounts).collect();
    for mount in mounts.iter().take(named) {
        lines.below(&format!("has {}", of_mount(mount)));
    }
    say_how_many_more(mounts.len(), named, lines);
    // The commands that free the mounts: mildest first, each once.
    let mut releases: Vec<(usize, &ReleaseCommand)> = Vec::new();
    for holder in group {
        releases.extend(holder.release.iter().enumerate());
    }
    releases.sort_by_key(|(rank, _)| *rank);
    let mut printed: Vec<&ReleaseCommand> = Vec::new();
    for (_, release) in releases {
        if !printed.contains(&release) {
            lines.below(&format!("{}:", release.effect));
            lines.run(&release.command);
            printed.push(release);
        }
    }
}

fn say_how_many_more(all: usize, named: usize, lines: &mut Lines) {
    if all > named {
        let word = if named == 0 { "" } else { " more" };
        let more = all - named;
        let mounts = if more == 1 { "mount" } else { "mounts" };
        lines.below(&format!(
            "has {more}{word} {mounts} there: --json names all"
        ));
    }
}

fn name_of(holder: &Holder) -> &str {
    holder.process_name.as_deref().unwrap_or("?")
}

fn pod_of(holder: &Holder) -> Option<String> {
    holder.pod.as_ref()?.display_name()
}

fn processes_of_pod(group: &[&Holder]) -> String {
    let mut processes = Vec::new();
    for holder in group {
        if let Some(pid) = holder.pid.filter(|_| processes.len() < NAMED) {
            processes.push(format!("{} ({pid})", name_of(holder)));
        }
    }
    format!(
        "by pod {} in {} mount namespaces: {}",
        pod_of(group[0]).unwrap_or_default(),
        group.len(),
        processes.join(", ")
    )
}

fn who(holder: &Holder) -> String {
    let command = name_of(holder);
    let pid = holder.pid.unwrap_or_default();
    let mut who = match holder.held_by {
        HolderKind::Process => format!("by {command} ({pid})"),
        HolderKind::Descriptor => {
            format!("in a mount namespace without processes that {command} ({pid}) has open")
        }
        HolderKind::BindMount => {
            "in a mount namespace without processes that is bind-mounted here".to_owned()
        }
        HolderKind::OwnNamespace => return "elsewhere in this mount namespace".to_owned(),
    };
    if holder.held_by == HolderKind::Process && holder.processes > 1 {
        who += &format!(" and {} more", holder.processes - 1);
    }
    if let Some(id) = &holder.container {
        who += &format!(", container {}", &id[..id.len().min(12)]);
    }
    if let Some(pod) = pod_of(holder) {
        who += &format!(", pod {pod}");
    }
    who
}

fn of_mount(mount: &HeldMount) -> String {
    let propagates = if mount.unmount_propagates {
        ", an unmount here reaches it"
    } else {
        ""
    };
    let HeldMount {
        mount_point,
        root,
        fs_type,
        device,
        propagation,
        ..
    } = mount;
    format!(
        "{} ({fs_type} {device}, {root}): {propagation}{propagates}",
        mount_point.display()
    )
}

fn summary(report: &HoldersReport) -> String {
    let checked = format!(
        "checked {} processes in {} mount namespaces",
        report.checked.processes, report.checked.namespaces
    );
    match (report.holders.len(), report.mounts.len()) {
        (0, 0) => format!("no mount namespace has anything mounted there; {checked}"),
        (0, _) => format!(
            "only this mount namespace has it mounted; {checked}; if umount reports busy, a process has a file open: \
             fuser -vm {}",
            shell_word(&report.path)
        ),
        (1, _) => format!("1 mount namespace holds it; {checked}"),
        (holders, _) => format!("{holders} mount namespaces hold it; {checked}"),
    }
}

#[cfg(test)]
mod text_tests {
    use super::*;

    #[test]
    fn the_path_of_a_command_is_quoted() {
        let mount = HeldMount {
            mount_point: "/mnt/my disk".into(),
            root: "/".to_owned(),
            fs_type: "ext4".to_owned(),
            device: "8:16".to_owned(),
            propagation: "shared",
            unmount_propagates: true,
        };
        let report = HoldersReport {
            path: "/mnt/my disk".into(),
            mounts: vec![mount],
            ..HoldersReport::default()
        };
        assert!(summary(&report).contains("fuser -vm '/mnt/my disk'"));
    }
}
