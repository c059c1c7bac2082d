//! `bindguard holders`: the holders of the mounts at or below a path, and the commands that free
//! the mounts. And `bindguard release`: a running container gives up its copies of mounts that the
//! host has unmounted. Only copies that the record of the create shows are unmounted.

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use bindguard_config::Config;
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::report::{Actor, ReleaseLine, ReleaseResult, ReleasedCopy};
use bindguard_core::text::{serialize_path, shell_word};
use bindguard_guard::record_release;
use bindguard_guard::refresh::{HelperProcess, HostRoots, Release, Released, release_copies};
use bindguard_operator::block_device;
use bindguard_operator::containers::{NotInit, bundle_of_container, hold_init};
use bindguard_operator::holders::{HeldMount, Holder, HoldersReport, MountsToFind, Trial};
use bindguard_operator::namespaces::{HeldBy, Proc};
use bindguard_operator::node::{Process, is_root, refuse_other_mounts, users_of_mount};
use bindguard_operator::pods::{ContainerState, PodContainer};
use bindguard_sys::enter::ProcessError;
use bindguard_sys::{Handle, read_mount_table};
use clap::Args;
use serde::Serialize;

use crate::named_file::check_answers;
use crate::pods::PodsFrom;
use crate::show::{self, DIMMED, FAULTY, HEALTHY, Lines, Output, joined_names, unrecorded};

/// Arguments of `holders`.
#[derive(Debug, Args)]
pub struct Holders {
    /// A mount point, any folder, or a block device. With --root, a path of the node.
    path: PathBuf,
    /// Name every mount that is held.
    #[arg(short, long)]
    verbose: bool,
    /// The node's `/proc`, as mounted in this pod. PATH is then a path of the node.
    #[arg(long, value_name = "DIR")]
    proc: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Holders {
    pub fn run(self, config: &Config) -> Result<ExitCode> {
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
        let mut report = HoldersReport::find(
            &path,
            &wanted,
            &seen.own,
            &seen.others,
            &pods,
            places,
            &trial,
        );
        report.checked = seen.checked;
        report.problems.splice(0..0, seen.problems);
        show::finish(
            &report,
            self.output,
            text(&report, if self.verbose { usize::MAX } else { NAMED }),
            !report.problems.is_empty(),
            !report.holders.is_empty(),
        )
    }
}

/// The path as the kernel prints it.
fn resolved(path: &Path) -> Result<PathBuf> {
    // A hung mount is opened without a request to its server. The folders above it are not.
    if let Some(folder) = std::path::absolute(path)?.parent() {
        check_answers(folder)?;
    }
    let handle = Handle::follow(path);
    if let (Err(_), Some(root)) = (&handle, show::NODE_ROOT.get())
        && let Ok(below) = path.strip_prefix(root)
    {
        bail!(
            "{} is no path of the node: name it as the node does, /{}",
            path.display(),
            below.display()
        );
    }
    handle?
        .resolved_path()
        .with_context(|| format!("resolve {}", path.display()))
}

fn wanted(path: &Path, own: &MountTable, is_afar: bool) -> Result<MountsToFind> {
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
// A paragraph names a few mounts. `--verbose` names all of them, and JSON lists the namespaces of a pod
// separately.

/// The number of mounts that a paragraph names.
const NAMED: usize = 5;

fn text(report: &HoldersReport, named: usize) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    for mount in report.mounts.iter().take(named) {
        lines.headed("mounted", HEALTHY, &of_mount(mount));
    }
    say_how_many_more(report.mounts.len(), named, &mut lines);
    // Without a command to advise, only the pods matter.
    let named = if report.note.is_some() && named == NAMED {
        0
    } else {
        named
    };
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
        let heading = match &group[..] {
            [holder] => who(holder),
            _ => processes_of_pod(&group),
        };
        lines.headed("held", FAULTY, &heading);
        let mut mounts = Vec::new();
        // The commands that free the mounts: mildest first, each once.
        let mut releases = Vec::new();
        for holder in group {
            mounts.extend(&holder.mounts);
            releases.extend(holder.release.iter().enumerate());
        }
        for mount in mounts.iter().take(named) {
            lines.below(&format!("has {}", of_mount(mount)));
        }
        say_how_many_more(mounts.len(), named, &mut lines);
        releases.sort_by_key(|(rank, _)| *rank);
        let mut printed = Vec::new();
        for (_, release) in releases {
            if !printed.contains(&release) {
                lines.below(&format!("{}:", release.effect));
                lines.run(&release.command);
                printed.push(release);
            }
        }
    }
    if let Some(note) = &report.note {
        lines.headed("note", DIMMED, note);
    }
    lines.line(&summary(report));
    lines
}

fn say_how_many_more(all: usize, named: usize, lines: &mut Lines) {
    if all > named {
        let word = if named == 0 { "" } else { " more" };
        let more = all - named;
        let mounts = if more == 1 { "mount" } else { "mounts" };
        lines.below(&format!(
            "has {more}{word} {mounts} there: --verbose names all"
        ));
    }
}

fn pod_of(holder: &Holder) -> Option<String> {
    holder.pod.as_ref()?.display_name()
}

fn processes_of_pod(group: &[&Holder]) -> String {
    let mut processes = Vec::new();
    for holder in group {
        if let HeldBy::Process { pid, command, .. } = &holder.held_by
            && processes.len() < NAMED
        {
            processes.push(format!("{command} ({pid})"));
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
    let mut who = match &holder.held_by {
        HeldBy::Process { pid, command, .. } => format!("by {command} ({pid})"),
        HeldBy::Descriptor { pid, command } => {
            format!("in a mount namespace without processes that {command} ({pid}) has open")
        }
        HeldBy::BindMount { .. } => {
            "in a mount namespace without processes that is bind-mounted here".to_owned()
        }
        HeldBy::OwnNamespace => return "elsewhere in this mount namespace".to_owned(),
    };
    if holder.processes > 1 {
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
    let HeldMount {
        root,
        fs_type,
        device,
        propagation,
        ..
    } = mount;
    let place = mount.mount_point.display();
    let mut text = format!("{place} ({fs_type} {device}, {root}): {propagation}");
    if mount.unmount_propagates {
        text += ", an unmount here reaches it";
    }
    text
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

// The copies of mounts that the host has unmounted.

/// Arguments of `release`.
#[derive(Debug, Args)]
pub struct ReleaseVerb {
    /// The former mount point on this node, a folder above, or a block device.
    path: PathBuf,
    /// Print the copies and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Detach copies that are in use, too. A file that is still open keeps the device busy, and no
    /// mount table and no `holders` shows that any more.
    #[arg(long)]
    lazy: bool,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The report of a release.
#[derive(Debug, Serialize)]
struct ReleaseReport {
    /// The path in question.
    #[serde(serialize_with = "serialize_path")]
    path: PathBuf,
    /// The copies that were found.
    copies: Vec<CopyOfContainer>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// A container's copy of a host mount.
#[derive(Debug, Serialize)]
struct CopyOfContainer {
    /// The names of the pod and the container, or the container's id.
    container: String,
    #[serde(flatten)]
    copy: ReleasedCopy,
    /// The processes that use the copy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    used_by: Vec<Process>,
}

impl ReleaseVerb {
    pub fn run(self, config: &Config) -> Result<ExitCode> {
        ensure!(
            is_root(),
            "release mounts: this needs root, also with --dry-run"
        );
        // Before the threads of the CRI's client.
        let helper = HelperProcess::start().context("start the helper process")?;
        let path = former_mount_point(&self.path)?;
        let own = read_mount_table().context("read this node's mounts")?;
        let wanted = wanted(&path, &own, false)?;
        let mut report = ReleaseReport {
            path,
            copies: Vec::new(),
            problems: Vec::new(),
        };
        for container in &self.pods.pods().containers {
            if !matches!(container.state, None | Some(ContainerState::Running)) {
                continue;
            }
            let mut name = joined_names(container, "/");
            if name.is_empty() {
                name.clone_from(&container.id);
            }
            let released = self.release(&helper, container, &name, &wanted, config, &mut report);
            if let Err(error) = released {
                let problem = format!("release mounts of {name}: {error:#}");
                report.problems.push(problem);
            }
        }
        let mut copies = report.copies.iter().map(|found| &found.copy);
        let is_left = copies.any(|copy| copy.result != ReleaseResult::Released);
        show::finish(
            &report,
            self.output,
            release_text(&report),
            !report.problems.is_empty(),
            is_left,
        )
    }

    fn release(
        &self,
        helper: &HelperProcess,
        container: &PodContainer,
        name: &str,
        wanted: &MountsToFind,
        config: &Config,
        report: &mut ReleaseReport,
    ) -> Result<()> {
        let id = &container.id;
        // Without a process there is no mount namespace.
        let Some(pid) = self.pods.init_of(id) else {
            return Ok(());
        };
        let process = match hold_init(Path::new("/"), id, pid) {
            Err(NotInit::Process(ProcessError::Ended(_))) => return Ok(()),
            process => process?,
        };
        let bundle = bundle_of_container(Path::new("/"), id).context("its bundle is not found")?;
        let roots = HostRoots::open(&bundle, config.policy(), config.places())?;
        if roots.is_empty() {
            return Ok(());
        }
        refuse_other_mounts(&process)?;
        let extent = match (self.dry_run, self.lazy) {
            (true, _) => Release::Look,
            (false, true) => Release::Detach,
            (false, false) => Release::Unmount,
        };
        let spec = self.pods.spec_of(id);
        let is_wanted = |mount: &MountEntry, table: &MountIndex<'_>| wanted.is(mount, table);
        let mut line = ReleaseLine::new(Actor::Operator, id, container.identity());
        let start = Instant::now();
        let released = release_copies(helper, &process, spec.as_ref(), &roots, is_wanted, extent)?;
        line.set_duration(start.elapsed());
        for Released {
            namespace,
            mount,
            result,
            error,
            ..
        } in released
        {
            // A detached mount lives on, with its id, while a file on the mount is open.
            let may_be_used = match result {
                ReleaseResult::Busy => true,
                ReleaseResult::Released => self.lazy,
                ReleaseResult::Kept | ReleaseResult::Refused => false,
            };
            let mut used_by = Vec::new();
            if may_be_used {
                used_by = users_of_mount(mount.id, &mount.mount_point, namespace);
            }
            let copy = ReleasedCopy {
                mount_point: mount.mount_point.to_string_lossy().into_owned(),
                fs_type: mount.fs_type.0,
                device: mount.device.to_string(),
                result,
                error,
            };
            line.copies.push(copy.clone());
            report.copies.push(CopyOfContainer {
                container: name.to_owned(),
                copy,
                used_by,
            });
        }
        if let Some(journal) = config.journal().filter(|_| !self.dry_run)
            && !line.copies.is_empty()
        {
            let recorded = record_release(journal, line);
            report.problems.extend(unrecorded("the release", recorded));
        }
        Ok(())
    }
}

/// The path as the kernel prints it. The folder of a former mount point may be gone as well.
fn former_mount_point(path: &Path) -> Result<PathBuf> {
    let is_plain = path.is_absolute() && !path.components().any(|it| it == Component::ParentDir);
    match resolved(path) {
        Ok(path) => Ok(path),
        Err(_) if is_plain => Ok(path.to_owned()),
        Err(error) => bail!(
            "release {}: {error:#}; name the mount point as this node did, by an absolute path without ..",
            path.display()
        ),
    }
}

fn release_text(report: &ReleaseReport) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    for CopyOfContainer {
        container,
        copy,
        used_by,
    } in &report.copies
    {
        lines.copy(copy, &format!("{copy} of {container}"));
        for user in used_by {
            lines.below(&format!("by {} ({})", user.command, user.pid));
        }
        if copy.result == ReleaseResult::Released && !used_by.is_empty() {
            lines.below("the device stays busy until they end, and no mount table shows that");
        }
    }
    if report.copies.is_empty() && report.problems.is_empty() {
        lines.line(&format!(
            "no private bind of the host's root in a container of containerd or of a pod has a copy of \
             a mount that this node has unmounted there; bindguard holders {} lists every mount namespace",
            shell_word(&report.path)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_testing::documented;

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

    #[test]
    fn json_of_release_matches_the_document() {
        let report = ReleaseReport {
            path: "/mnt/disk".into(),
            copies: vec![CopyOfContainer {
                container: "monitoring/exporter-x7k2p/exporter".to_owned(),
                copy: ReleasedCopy {
                    mount_point: "/host/mnt/disk".into(),
                    fs_type: "ext4".to_owned(),
                    device: "8:16".to_owned(),
                    result: ReleaseResult::Busy,
                    error: Some("it is in use".to_owned()),
                },
                used_by: vec![Process {
                    pid: 4242,
                    command: "node_exporter".to_owned(),
                    cgroup: String::new(),
                }],
            }],
            problems: Vec::new(),
        };
        let shown = documented("`release`");
        assert_eq!(
            serde_json::to_string_pretty(&report).unwrap(),
            shown.trim_end()
        );
    }
}
