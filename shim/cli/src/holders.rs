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
use bindguard_operator::namespaces::{Namespaces, Proc};
use bindguard_operator::pods::PodContainer;
use bindguard_sys::Handle;
use clap::Args;

use crate::pods::PodsFrom;
use crate::show;
use crate::show::{DIMMED, FAULTY, HEALTHY, Lines};
use crate::time_limits::check_answers;

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
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let proc = self.proc.clone().map_or_else(Proc::default, Proc::at);
        let path = if self.proc.is_some() {
            self.path.clone()
        } else {
            resolved(&self.path)?
        };
        let seen = proc.namespaces()?;
        let wanted = wanted(&path, &seen.own, self.proc.is_some())?;
        let report = self.report(&path, &wanted, seen, config);
        show::print_report(&report, self.json, of)?;
        Ok(show::code(
            !report.problems.is_empty(),
            !report.holders.is_empty(),
        ))
    }

    fn report(
        &self,
        path: &Path,
        wanted: &MountsToFind,
        seen: Namespaces,
        config: &Config,
    ) -> HoldersReport {
        let places = config.places();
        let trial = |container: &PodContainer| match self.proc {
            None => Trial::of(container, config.policy(), places),
            // the pids of another /proc name no process here
            Some(_) => Trial::default(),
        };
        let pods = self.pods.pods();
        let (own, others) = (&seen.own, &seen.others);
        let mut report = HoldersReport::find(path, wanted, own, others, &pods, places, &trial);
        report.checked = seen.checked;
        report.problems.splice(0..0, seen.problems);
        report
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
    if !is_afar && path.starts_with("/dev") {
        let device = block_device(path).with_context(|| format!("open {}", path.display()))?;
        return Ok(device.map_or_else(
            || MountsToFind::at_or_below(path, own),
            MountsToFind::of_device,
        ));
    }
    Ok(MountsToFind::at_or_below(path, own))
}

// The holders report for people: a paragraph for each pod and for each mount namespace outside
// pods.
//
// A paragraph names a few mounts. `--json` names all of them, and lists the namespaces of a pod
// separately.

/// The number of mounts that a paragraph names.
const NAMED: usize = 5;

/// The report as text.
pub fn of(report: &HoldersReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for mount in report.mounts.iter().take(NAMED) {
        lines.headed("mounted", HEALTHY, &of_mount(mount));
    }
    say_how_many_more(report.mounts.len(), NAMED, &mut lines);
    // Without a command to advise, only the pods matter.
    let named = if report.note.is_some() { 0 } else { NAMED };
    for group in by_pod(&report.holders) {
        describe(&group, named, &mut lines);
    }
    if let Some(note) = &report.note {
        lines.headed("note", DIMMED, note);
    }
    lines.line(&summary(report));
    lines
}

/// The namespaces grouped by pod, in the order of the report.
fn by_pod(holders: &[Holder]) -> Vec<Vec<&Holder>> {
    let mut groups: Vec<Vec<&Holder>> = Vec::new();
    for holder in holders {
        let is_of_it =
            |group: &&mut Vec<&Holder>| holder.pod.is_some() && group[0].pod == holder.pod;
        match groups.iter_mut().find(is_of_it) {
            Some(group) => group.push(holder),
            None => groups.push(vec![holder]),
        }
    }
    groups
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
    for release in releases(group) {
        lines.below(&format!("{}:", release.effect));
        lines.run(&release.command);
    }
}

fn say_how_many_more(all: usize, named: usize, lines: &mut Lines) {
    if let Some(more) = all.checked_sub(named).filter(|more| *more > 0) {
        let (word, mounts) = (
            if named == 0 { "" } else { " more" },
            if more == 1 { "mount" } else { "mounts" },
        );
        lines.below(&format!(
            "has {more}{word} {mounts} there: --json names all"
        ));
    }
}

/// The commands that free the mounts of a group: mildest first, each once.
fn releases<'r>(group: &[&'r Holder]) -> Vec<&'r ReleaseCommand> {
    let most = group
        .iter()
        .map(|holder| holder.release.len())
        .max()
        .unwrap_or_default();
    let all = (0..most).flat_map(|rank| {
        group
            .iter()
            .filter_map(move |holder| holder.release.get(rank))
    });
    let mut releases: Vec<&ReleaseCommand> = Vec::new();
    for release in all {
        if !releases.contains(&release) {
            releases.push(release);
        }
    }
    releases
}

fn processes_of_pod(group: &[&Holder]) -> String {
    let name = group[0]
        .pod
        .as_ref()
        .and_then(|pod| pod.display_name())
        .unwrap_or_default();
    let process = |holder: &&Holder| {
        Some(format!(
            "{} ({})",
            holder.process_name.as_deref().unwrap_or("?"),
            holder.pid?
        ))
    };
    let processes: Vec<String> = group.iter().filter_map(process).take(NAMED).collect();
    format!(
        "by pod {name} in {} mount namespaces: {}",
        group.len(),
        processes.join(", ")
    )
}

fn who(holder: &Holder) -> String {
    let container = holder
        .container
        .as_ref()
        .map(|id| format!(", container {}", &id[..id.len().min(12)]));
    let pod = holder
        .pod
        .as_ref()
        .and_then(|pod| pod.display_name())
        .map(|pod| format!(", pod {pod}"));
    let more = match holder.processes {
        0 | 1 => String::new(),
        many => format!(" and {} more", many - 1),
    };
    let (pid, command) = (
        holder.pid.unwrap_or_default(),
        holder.process_name.as_deref().unwrap_or("?"),
    );
    let by = match holder.held_by {
        HolderKind::Process => format!("by {command} ({pid}){more}"),
        HolderKind::Descriptor => {
            format!("in a mount namespace without processes that {command} ({pid}) has open")
        }
        HolderKind::BindMount => {
            "in a mount namespace without processes that is bind-mounted here".to_owned()
        }
        HolderKind::OwnNamespace => return "elsewhere in this mount namespace".to_owned(),
    };
    format!(
        "{by}{}{}",
        container.unwrap_or_default(),
        pod.unwrap_or_default()
    )
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
