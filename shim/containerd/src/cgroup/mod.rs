//! A container's cgroup: its resource usage (`Stats`) and the kernel's out-of-memory kills
//! (`TaskOOM`).
//!
//! ```text
//!   init's pid ──find──► Cgroup ──metrics()──► StatsResponse.stats
//!                            └────watch_oom()──► OomWatch ──next(), take_unreported()──► TaskOOM
//! ```
//! Create the [`Cgroup`] after `create` has succeeded, while the init waits for its start. Its
//! directories are found through the living process and kept, so that the figures and the last kill
//! are still available when the init is dead. A process that moves later, for example an init that
//! is systemd, moves below them.
//!
//! This module sets no limit and moves no process; the runtime does. A figure that a kernel, or a
//! cgroup without some controller, does not report is left out of the message. It never fails the
//! whole message.
//!
//! /proc/PID/cgroup has the path of a process's cgroup in each hierarchy, see cgroups(7). The mount
//! that shows the hierarchy must be found. A directory is valid only if its `cgroup.procs` lists the process. So the usual place below
//! /sys/fs/cgroup is tried first. The mount table, which has ten thousand lines on some nodes, is
//! read only if that fails: inside a container, as in kind, or with hierarchies mounted elsewhere.
//!
//! The cgroup of a container whose create was interrupted is removed.
//! A runtime makes the cgroup before it writes its state. A runtime that is killed in between has
//! no record of the container, and `delete` does not find the cgroup. The spec still names the
//! cgroup. rmdir(2) removes only an empty cgroup, so a cgroup with processes or child cgroups
//! stays. Of the processes, only the init of this create is ended.

mod figures;
#[cfg(test)]
mod live;
mod oom;

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::mount_table::MountEntry;
use protobuf::well_known_types::any::Any;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::kernel;
use crate::work::{Result, failed};
use crate::work::{read_each, run_blocking};
use figures::Metrics;

pub use oom::OomWatch;

/// The messages' names in Go's typeurl: the full name alone, without `type.googleapis.com/`.
const V1_NAME: &str = "io.containerd.cgroups.v1.Metrics";
const V2_NAME: &str = "io.containerd.cgroups.v2.Metrics";

/// Only a node that booted with systemd has this directory, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";

/// The cgroup's directory in each mounted controller.
pub type Controllers = BTreeMap<&'static str, PathBuf>;

/// The controllers of version 1 that count something.
const CONTROLLER_NAMES: [&str; 7] = [
    "cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb", "rdma",
];

/// A container's cgroup: its directories in the hierarchies.
#[derive(Debug, Clone)]
pub enum Cgroup {
    V1(Controllers),
    V2(PathBuf),
}

impl Cgroup {
    /// All current figures, from about twenty small files that the kernel generates: no read waits
    /// for a disk.
    ///
    /// `None` after the container's end, when the cgroup has been removed.
    pub fn metrics(&self) -> Option<Any> {
        let (name, metrics) = match self {
            Self::V1(controllers) => (V1_NAME, figures::of_version_1(controllers)),
            Self::V2(directory) => (V2_NAME, figures::of_version_2(directory)),
        };
        (metrics != Metrics::default()).then(|| Any {
            type_url: name.to_owned(),
            value: metrics.0,
            ..Default::default()
        })
    }

    /// Enables all controllers of the node for it, as Go's shim does. Only the unified hierarchy
    /// needs that.
    pub fn enable_controllers(&self) {
        if let Self::V2(directory) = self {
            enable_controllers(directory);
        }
    }
}

/// True if systemd makes the container's cgroups, and not the runtime itself.
///
/// The option names the driver. containerd 1.6 loses the options of a foreign runtime type. Without
/// the option, a cgroup path in systemd's form is a hint that the kubelet uses the systemd driver.
/// The form is only a hint: containerd's CRI before 2.0 writes this form for any parent whose name
/// ends in `.slice`. On a node without systemd the runtime could not use such a path.
pub fn is_systemd(said: Option<bool>, path_is_systemds: bool) -> bool {
    decide(said, path_is_systemds, || {
        fs::symlink_metadata(BOOTED).is_ok_and(|found| found.is_dir())
    })
}

fn decide(said: Option<bool>, path_is_systemds: bool, booted: impl FnOnce() -> bool) -> bool {
    said.unwrap_or_else(|| path_is_systemds && booted())
}

/// The folder with one folder for each v1 hierarchy, or the mount point of v2 itself.
pub const ROOT: &str = "/sys/fs/cgroup";

/// Finds the directories of the cgroup of a living process, the container's init.
pub fn find(pid: u32) -> Result<Cgroup> {
    let path = format!("/proc/{pid}/cgroup");
    let bytes = fs::read(&path).map_err(failed(format!("read {path}")))?;
    let text = String::from_utf8_lossy(&bytes);
    let memberships: Vec<_> = text.lines().filter_map(Membership::parse).collect();
    let search = Search {
        pid,
        mounts: OnceCell::new(),
    };
    if is_unified(is_unified_mount(Path::new(ROOT)), &memberships) {
        if let Some(unified) = memberships.iter().find(|line| line.controllers.is_empty())
            && let Some(directory) = search.directory(None, unified.path)?
        {
            return Ok(Cgroup::V2(directory));
        }
    } else {
        let mut controllers = Controllers::default();
        for name in CONTROLLER_NAMES {
            if let Some(membership) = memberships.iter().find(|line| line.has(name))
                && let Some(directory) = search.directory(Some(name), membership.path)?
            {
                controllers.insert(name, directory);
            }
        }
        if !controllers.is_empty() {
            return Ok(Cgroup::V1(controllers));
        }
    }
    Err(format!("find the cgroup of process {pid}: no mounted hierarchy shows it").into())
}

/// A line of /proc/PID/cgroup: `4:memory:/pods/a`, `2:cpu,cpuacct:/pods/a`, `0::/pods/a`.
#[derive(Debug, PartialEq, Eq)]
struct Membership<'a> {
    /// Empty for the unified hierarchy.
    controllers: &'a str,
    path: &'a str,
}

impl<'a> Membership<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(3, ':').skip(1);
        Some(Self {
            controllers: fields.next()?,
            path: fields.next()?,
        })
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|name| name == controller)
    }
}

/// Version 2 if the unified hierarchy is at the usual place, which is also the test of containerd
/// and runc, or if it has all the controllers. A node that mounts cgroup2 beside hierarchies of
/// version 1 (hybrid) counts as version 1.
fn is_unified(at_the_usual_place: bool, memberships: &[Membership<'_>]) -> bool {
    let is_read =
        |membership: &Membership<'_>| CONTROLLER_NAMES.iter().any(|name| membership.has(name));
    at_the_usual_place || !memberships.iter().any(is_read)
}

struct Search {
    pid: u32,
    /// Read at the first use.
    mounts: OnceCell<Vec<CgroupMount>>,
}

impl Search {
    /// The directory in the hierarchy of a controller, or in the unified hierarchy.
    fn directory(&self, controller: Option<&str>, path: &str) -> Result<Option<PathBuf>> {
        // Controllers that share a hierarchy have a link each: /sys/fs/cgroup/cpu is cpu,cpuacct.
        let usual = Path::new(ROOT)
            .join(controller.unwrap_or(""))
            .join(path.trim_start_matches('/'));
        if self.is_in(&usual) {
            return Ok(Some(usual));
        }
        for mount in self.mounts()? {
            if mount.shows(controller)
                && let Some(directory) = mount.directory_of(path)
                && self.is_in(&directory)
            {
                return Ok(Some(directory));
            }
        }
        Ok(None)
    }

    /// True if the directory lists the process.
    fn is_in(&self, directory: &Path) -> bool {
        fs::read_to_string(directory.join("cgroup.procs"))
            .is_ok_and(|procs| procs.lines().any(|line| line.parse() == Ok(self.pid)))
    }

    fn mounts(&self) -> Result<&[CgroupMount]> {
        if let Some(mounts) = self.mounts.get() {
            return Ok(mounts);
        }
        let path = "/proc/thread-self/mountinfo";
        let mounts = File::open(path)
            .and_then(|table| CgroupMount::read_all(BufReader::new(table)))
            .map_err(failed(format!("read {path}")))?;
        Ok(self.mounts.get_or_init(|| mounts))
    }
}

/// A mounted cgroup hierarchy, see cgroups(7).
///
/// A mount may show only a part of a hierarchy. In a container without its own cgroup namespace the
/// mount's root is the container's cgroup, while /proc/PID/cgroup counts from the top. Both paths
/// are equal below the mount's root.
#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    /// The root within the hierarchy.
    root: PathBuf,
    point: PathBuf,
    /// The controllers, or `name=`, of a version 1 hierarchy; `None` for the unified hierarchy.
    controllers: Option<String>,
}

impl CgroupMount {
    /// The cgroup mounts of a mountinfo, the topmost first. Only the current line is in memory.
    fn read_all(mountinfo: impl BufRead) -> io::Result<Vec<Self>> {
        let mut mounts = Vec::new();
        for line in mountinfo.split(b'\n') {
            // A mount with an unreadable line is skipped: the search for a cgroup checks each found
            // directory.
            let Ok(mount) = MountEntry::from_line(&line?) else {
                continue;
            };
            let controllers = match mount.fs_type.0.as_str() {
                "cgroup" => Some(mount.super_options.to_string_lossy().into_owned()),
                "cgroup2" => None,
                _ => continue,
            };
            mounts.push(Self {
                root: mount.root.path,
                point: mount.mount_point,
                controllers,
            });
        }
        mounts.reverse();
        Ok(mounts)
    }

    /// True if the mount shows the hierarchy of this controller, or the unified hierarchy.
    fn shows(&self, controller: Option<&str>) -> bool {
        match (&self.controllers, controller) {
            (Some(has), Some(wanted)) => has.split(',').any(|name| name == wanted),
            (None, None) => true,
            _ => false,
        }
    }

    /// The visible path of a cgroup, if it lies below the mount's root.
    fn directory_of(&self, cgroup: &str) -> Option<PathBuf> {
        let below = Path::new(cgroup).strip_prefix(&self.root).ok()?;
        Some(self.point.join(below))
    }
}

/// The hierarchies with the controllers of this node. Beside v1 hierarchies the unified hierarchy
/// has no controllers, and containerd does not use it.
pub fn with_controllers(root: &Path) -> Vec<PathBuf> {
    let mut all = hierarchies_in(root);
    if all != [root] {
        all.retain(|hierarchy| !is_unified_mount(hierarchy));
    }
    all
}

/// True for a mount of cgroup v2.
fn is_unified_mount(hierarchy: &Path) -> bool {
    fs::metadata(hierarchy.join("cgroup.controllers")).is_ok()
}

/// The hierarchies of a node, found without reading the mount table: all are below [`ROOT`].
fn hierarchies_in(root: &Path) -> Vec<PathBuf> {
    if is_unified_mount(root) {
        return vec![root.to_owned()];
    }
    let mut hierarchies = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        // Links such as `cpu` name the same hierarchy as `cpu,cpuacct`.
        if entry.file_type().is_ok_and(|kind| kind.is_dir())
            && fs::metadata(entry.path().join("cgroup.procs")).is_ok()
        {
            hierarchies.push(entry.path());
        }
    }
    hierarchies
}

const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// Enables the controllers of the topmost cgroup in all cgroups above this cgroup. A cgroup has a
/// controller if `cgroup.subtree_control` of every ancestor enables the controller, see cgroups(7).
///
/// A runtime enables the controllers for the container's limits, or leaves the work to systemd.
/// After each create Go's shim enables all controllers of the root, so that the figures exist. This
/// shim enables only the missing controllers. A failure is harmless: a cgroup with processes of its
/// own enables no controller, and in a user namespace the upper cgroups belong to a different user.
pub fn enable_controllers(cgroup: &Path) {
    let mut above = Vec::new();
    for path in cgroup.ancestors().skip(1) {
        if fs::metadata(path.join(SUBTREE_CONTROL)).is_err() {
            break;
        }
        above.push(path);
    }
    let Some(root) = above.last() else {
        return;
    };
    let Ok(all) = fs::read_to_string(root.join(CONTROLLERS)) else {
        return;
    };
    for cgroup in above.into_iter().rev() {
        if let Err(error) = hand_down(&cgroup.join(SUBTREE_CONTROL), &all) {
            tracing::debug!(%error, cgroup = %cgroup.display(), "some controllers stay disabled");
        }
    }
}

fn hand_down(file: &Path, all: &str) -> io::Result<()> {
    let enabled = fs::read_to_string(file)?;
    let mut result = Ok(());
    for name in all.split_whitespace() {
        if !enabled.split_whitespace().any(|enabled| enabled == name) {
            // A write for each name: the kernel accepts all names of a write, or no name.
            let opened = fs::OpenOptions::new().append(true).open(file);
            let written = opened.and_then(|mut file| file.write_all(format!("+{name}").as_bytes()));
            result = written.and(result);
        }
    }
    result
}

/// A process that the dead runtime forked sees the end of its pipe, and then ends. systemd usually
/// notices within the same time.
const TRIES: u32 = 25;
const PAUSE: Duration = Duration::from_millis(10);
/// The fifo by which crun and runc start the init.
const START_FIFO: &str = "exec.fifo";
/// The kernel's mark on the name of a file that was removed.
const DELETED: &[u8] = b" (deleted)";
/// runc's slice for a path without a slice.
const USUAL_SLICE: &str = "system.slice";

/// Ends the init that a killed runtime left waiting, and removes the empty cgroup that a spec names
/// by `cgroupsPath`, in every hierarchy. With a path in systemd's form it stops the scope. `state`
/// is the runtime's directory for the container.
pub async fn remove_leftover_cgroup(cgroups_path: &str, state: &Path) {
    let scope = systemd_scope(cgroups_path);
    let path = match &scope {
        Some((_, path)) => path,
        None => match below_the_root(cgroups_path) {
            Some(path) => path,
            None => return,
        },
    };
    let mut cgroups = hierarchies_in(Path::new(ROOT));
    for cgroup in &mut cgroups {
        cgroup.push(path);
    }
    let (within, state) = (cgroups.clone(), state.to_owned());
    if let Err(error) = run_blocking(move || end_waiting_init(&within, &state)).await {
        tracing::warn!(%error, "the init of an interrupted create may stay");
    }
    if let Some((unit, _)) = scope {
        return stop_if_empty(unit, &cgroups).await;
    }
    for cgroup in cgroups {
        for _ in 0..TRIES {
            match fs::remove_dir(&cgroup) {
                Ok(()) => {
                    tracing::debug!(cgroup = %cgroup.display(), "removed what a killed runtime left")
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(_) => {}
            }
            break;
        }
    }
}

/// Only an absolute path without `..` is the same folder for the runtime and for the shim.
fn below_the_root(cgroups_path: &str) -> Option<&Path> {
    let path = Path::new(cgroups_path).strip_prefix("/").ok()?;
    let is_plain = |part| matches!(part, Component::Normal(_));
    (path.components().all(is_plain) && !path.as_os_str().is_empty()).then_some(path)
}

/// Ends the processes in or below these cgroups that wait for the start of the container with this
/// state directory. `cgroups` has a path for each hierarchy.
///
/// crun's init waits for `start` before crun has recorded it. If crun is killed in between, no
/// `delete` finds the init. It waits without end, and its cgroup or scope stays.
///
/// Several containers may have the same `cgroupsPath`, so the cgroup alone proves nothing. The init
/// has the fifo open that `start` writes to: `exec.fifo` in the runtime's state of this container.
/// The init closes the fifo at the exec of the container's program. A process without this
/// descriptor is not touched.
///
/// Only links are read, by a thread that can be left behind: a process can block its readers for
/// ever.
fn end_waiting_init(cgroups: &[PathBuf], state: &Path) {
    let fifo = resolved(state).join(START_FIFO);
    let mut waits = HashSet::new();
    for line in cgroups.iter().flat_map(|cgroup| processes_within(cgroup)) {
        if let Ok(line) = line
            && let Some(pid) = line.parse().ok().and_then(Pid::from_raw)
        {
            waits.insert((pid, fifo.clone()));
        }
    }
    let waits = Vec::from_iter(waits);
    let read = read_each(&waits, |(pid, fifo)| waiting(*pid, fifo));
    for ((pid, _), waiting) in waits.iter().zip(read) {
        let waiting = waiting.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()));
        let ended = waiting.and_then(|process| match process {
            Some(process) => Ok(pidfd_send_signal(process, Signal::KILL).map(|()| true)?),
            None => Ok(false),
        });
        match ended {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(%pid, state = %state.display(), "ended the init that a killed runtime left")
            }
            Err(error) => tracing::warn!(%pid, %error, "a process of an interrupted create stays"),
        }
    }
}

/// The kernel shows a descriptor's path without links. The state directory itself may be gone.
#[expect(
    clippy::disallowed_methods,
    reason = "the runtime's own directory, not the source of a container's bind"
)]
fn resolved(state: &Path) -> PathBuf {
    let root = state.parent().and_then(|root| root.canonicalize().ok());
    match (root, state.file_name()) {
        (Some(root), Some(id)) => root.join(id),
        _ => state.to_owned(),
    }
}

/// The process, if it has the fifo open. The pidfd is opened before the links are read: a signal
/// then reaches the process with these links, or fails.
fn waiting(pid: Pid, fifo: &Path) -> io::Result<Option<OwnedFd>> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(link) = fs::read_link(descriptor?.path()) else {
            continue;
        };
        let link = link.as_os_str().as_bytes();
        if link.strip_suffix(DELETED).unwrap_or(link) == fifo.as_os_str().as_bytes() {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// The lines of `cgroup.procs` in the cgroup and below it; none if the cgroup is gone. A line is
/// `0` for a process of another pid namespace. A cgroup that cannot be read may have processes.
fn processes_within(cgroup: &Path) -> Vec<Result<String>> {
    let (mut found, mut left) = (Vec::new(), vec![cgroup.to_owned()]);
    while let Some(path) = left.pop() {
        let mut read = || {
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(entry.path());
                }
            }
            fs::read_to_string(path.join("cgroup.procs"))
        };
        match read() {
            Ok(own) => found.extend(own.lines().map(|line| Ok(line.to_owned()))),
            // ENODEV: the cgroup was removed while its file was open.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(nix::libc::ENOENT | nix::libc::ENODEV)
                ) => {}
            Err(error) => found.push(Err(failed(format!("read {}", path.display()))(error))),
        }
    }
    found
}

/// The unit that a runtime makes for `cgroupsPath` in systemd's form, `slice:prefix:name`, and its
/// cgroup below each hierarchy.
fn systemd_scope(cgroups_path: &str) -> Option<(String, PathBuf)> {
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    let [slice, prefix, name] = parts[..] else {
        return None;
    };
    let is_plain = |text: &str| !text.contains('/') && !text.is_empty();
    if !is_plain(prefix) || !is_plain(name) || name.ends_with(".slice") {
        return None;
    }
    let unit = format!("{prefix}-{name}.scope");
    let slice = if slice.is_empty() { USUAL_SLICE } else { slice };
    let path = path_of_slice(slice)?.join(&unit);
    Some((unit, path))
}

/// `a-b.slice` lies in `a.slice`: systemd.slice(5).
fn path_of_slice(slice: &str) -> Option<PathBuf> {
    let name = slice.strip_suffix(".slice")?;
    if name.contains('/') {
        return None;
    }
    let mut path = PathBuf::new();
    // `-.slice` is the root.
    if name == "-" {
        return Some(path);
    }
    for (end, _) in name.match_indices('-').chain([(name.len(), "")]) {
        let parent = &name[..end];
        if parent.is_empty() || parent.ends_with('-') {
            return None;
        }
        path.push(format!("{parent}.slice"));
    }
    Some(path)
}

/// Stops a scope if systemd leaves the empty scope in place.
///
/// systemd ends a scope with its last process. A runtime that is killed while systemd starts the
/// scope can leave an empty scope that systemd does not end. The cgroup stays, and the next create
/// with this name fails. Only an empty scope is stopped.
async fn stop_if_empty(unit: String, cgroups: &[PathBuf]) {
    for _ in 0..TRIES {
        if !cgroups.iter().any(|cgroup| fs::metadata(cgroup).is_ok()) {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    for cgroup in cgroups {
        match processes_within(cgroup).first() {
            None => {}
            Some(Ok(_)) => return,
            Some(Err(error)) => {
                return tracing::warn!(unit, error = error_chain(error), "a scope stays");
            }
        }
    }
    tracing::debug!(unit, "stopping the scope that a killed runtime left");
    let stop = move || {
        let mut command = Command::new("systemctl");
        command
            .args(["stop", "--no-block", "--quiet", "--", &unit])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        kernel::with_default_signals(&mut command);
        match command.status() {
            Ok(status) if status.success() => {}
            Ok(status) => {
                tracing::warn!(unit, %status, "an empty scope stays: systemctl stop failed")
            }
            Err(error) => tracing::warn!(unit, %error, "an empty scope stays: run systemctl"),
        }
    };
    if let Err(error) = run_blocking(stop).await {
        tracing::warn!(%error, "an empty scope stays: run systemctl");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_messages() {
        use containerd_shim_protos::{cgroups, cgroups_v2};
        use protobuf::MessageFull;
        let v1 = cgroups::metrics::Metrics::descriptor();
        let v2 = cgroups_v2::metrics::Metrics::descriptor();
        assert_eq!((v1.full_name(), v2.full_name()), (V1_NAME, V2_NAME));
    }

    #[test]
    fn a_cgroup_without_a_file_is_gone() {
        let cgroup = Cgroup::V2("/nowhere/at/all".into());
        assert_eq!(cgroup.metrics(), None);
    }

    #[test]
    fn the_option_goes_before_the_path_and_the_path_needs_a_systemd() {
        for path_is_systemds in [true, false] {
            assert!(decide(Some(true), path_is_systemds, || false));
            assert!(!decide(Some(false), path_is_systemds, || true));
        }
        assert!(decide(None, true, || true));
        assert!(!decide(None, true, || false));
        assert!(!decide(None, false, || true));
    }

    /// Tests on a plain folder, whose files keep what is written.
    #[test]
    fn missing_controllers_are_enabled_from_the_top_down_to_the_parent() {
        let dir = tempfile::tempdir().unwrap();
        let (root, slice) = (dir.path().join("cgroup"), dir.path().join("cgroup/pods"));
        let container = slice.join("c");
        fs::create_dir_all(&container).unwrap();
        let control = |cgroup: &Path| fs::read_to_string(cgroup.join(SUBTREE_CONTROL)).unwrap();
        for (cgroup, enabled) in [(&root, "cpu memory"), (&slice, "cpu "), (&container, "")] {
            fs::write(cgroup.join(CONTROLLERS), "cpu io memory pids\n").unwrap();
            fs::write(cgroup.join(SUBTREE_CONTROL), enabled).unwrap();
        }
        enable_controllers(&container);
        assert_eq!(control(&root), "cpu memory+io+pids");
        assert_eq!(control(&slice), "cpu +io+memory+pids");
        assert_eq!(control(&container), "", "a container decides for itself");
        enable_controllers(Path::new("/nowhere/at/all"));
    }
}

#[cfg(test)]
mod discovery_tests {
    use proptest::prelude::*;

    use super::*;

    fn memberships(text: &str) -> Vec<Membership<'_>> {
        text.lines().filter_map(Membership::parse).collect()
    }

    #[test]
    fn lines_name_controllers_and_path() {
        let lines = memberships("2:cpu,cpuacct:/pods/a:b\n9:name=systemd:/\n0::/x\nodd\n");
        assert_eq!(lines.len(), 3);
        assert!(lines[0].has("cpuacct") && !lines[0].has("cpuac"));
        assert_eq!(
            (lines[0].path, lines[2].controllers, lines[2].path),
            ("/pods/a:b", "", "/x")
        );
    }

    #[test]
    fn a_hybrid_node_is_version_1() {
        assert!(!is_unified(
            false,
            &memberships("4:memory:/a\n9:name=systemd:/\n0::/a\n")
        ));
        assert!(is_unified(false, &memberships("9:name=systemd:/\n0::/a\n")));
        // net_cls, or even pids, is mounted as version 1 on a node that is otherwise version 2.
        assert!(is_unified(true, &memberships("3:pids:/\n0::/a\n")));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error_that_names_its_file() {
        let error = find(u32::MAX).unwrap_err();
        assert_eq!(error.to_string(), format!("read /proc/{}/cgroup", u32::MAX));
    }

    #[test]
    fn our_own_cgroup_is_also_found_by_the_mount_table() {
        let search = Search {
            pid: std::process::id(),
            mounts: OnceCell::new(),
        };
        let text = fs::read_to_string("/proc/self/cgroup").unwrap();
        for membership in memberships(&text) {
            let controller = membership
                .controllers
                .split(',')
                .next()
                .filter(|name| !name.is_empty());
            let mut shown = search
                .mounts()
                .unwrap()
                .iter()
                .filter(|mount| mount.shows(controller));
            let is_found = shown.any(|mount| {
                mount
                    .directory_of(membership.path)
                    .is_some_and(|at| search.is_in(&at))
            });
            if !is_found {
                eprintln!(
                    "SKIPPED: the hierarchy {:?} is not mounted here",
                    membership.controllers
                );
            }
            if controller == Some("memory") {
                assert!(is_found);
            }
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read_without_panic(text: String) {
            let _ = is_unified(false, &memberships(&text));
        }
    }

    #[test]
    fn version_two_has_one_hierarchy_and_version_one_many() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu", "memory"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
        }
        assert_eq!(hierarchies_in(dir.path()).len(), 2);
        fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(hierarchies_in(dir.path()), [dir.path()]);
    }

    #[test]
    fn the_unified_hierarchy_of_a_hybrid_node_has_no_controllers() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| dir.path().join(name);
        for name in ["memory", "unified"] {
            fs::create_dir(folder(name)).unwrap();
            fs::write(folder(name).join("cgroup.procs"), "").unwrap();
        }
        fs::write(folder("unified").join("cgroup.controllers"), "").unwrap();
        assert_eq!(hierarchies_in(dir.path()).len(), 2);
        assert_eq!(with_controllers(dir.path()), [folder("memory")]);
        fs::write(folder("cgroup.controllers"), "cpu").unwrap();
        assert_eq!(with_controllers(dir.path()), [dir.path()]);
    }

    /// From a hybrid node, with a mount as seen by a container without a cgroup namespace.
    const MOUNTINFO: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
36 31 0:33 /docker/abc /my\\040cg/cpu,cpuacct rw,relatime shared:9 master:3 - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn the_mounts_of_a_hybrid_node() {
        let mounts = CgroupMount::read_all(MOUNTINFO.as_bytes()).unwrap();
        assert_eq!(mounts.len(), 4);
        let of = |controller| mounts.iter().find(|mount| mount.shows(controller)).unwrap();
        assert_eq!(
            of(Some("memory")).directory_of("/pods/a"),
            Some("/sys/fs/cgroup/memory/pods/a".into())
        );
        assert_eq!(
            of(None).directory_of("/"),
            Some("/sys/fs/cgroup/unified/".into())
        );
        let cpu = of(Some("cpuacct"));
        assert_eq!(
            cpu.directory_of("/docker/abc/pods/a"),
            Some("/my cg/cpu,cpuacct/pods/a".into())
        );
        assert_eq!(
            cpu.directory_of("/docker/abc"),
            Some("/my cg/cpu,cpuacct".into())
        );
        assert_eq!(
            (cpu.directory_of("/docker/abcd"), cpu.directory_of("/pods")),
            (None, None)
        );
    }

    proptest! {
        #[test]
        fn any_line_of_mountinfo_is_read_without_panic(line: Vec<u8>, cgroup: String) {
            for mount in CgroupMount::read_all(line.as_slice()).unwrap() {
                let _ = mount.directory_of(&cgroup);
            }
        }

        #[test]
        fn a_cgroup_is_found_below_any_root(root in "(/[a-zé ]{1,5}){0,3}", below in "(/[a-z:é]{1,5}){1,3}") {
            let mounted = if root.is_empty() { "/" } else { &root };
            let escaped = mounted.replace(' ', "\\040");
            let line = format!("1 2 0:3 {escaped} /cg rw - cgroup2 cgroup2 rw");
            let mounts = CgroupMount::read_all(line.as_bytes()).unwrap();
            let directory = mounts[0].directory_of(&format!("{root}{below}"));
            prop_assert_eq!(directory, Some(PathBuf::from(format!("/cg{below}"))));
        }
    }
}

#[cfg(test)]
mod leftover_tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use bindguard_testing::held_memory::{Executing, Holder, blocks_readers, unless_it_hangs};

    use super::*;

    #[test]
    fn only_plain_paths_from_the_top() {
        assert_eq!(
            below_the_root("/kubepods/burstable/web"),
            Some(Path::new("kubepods/burstable/web"))
        );
        for other in ["", "/", "web", "system.slice:cri:web", "/kubepods/../web"] {
            assert_eq!(below_the_root(other), None, "{other}");
        }
    }

    /// The state directory of a container, with the fifo.
    fn state(root: &Path, id: &str) -> PathBuf {
        let state = root.join(id);
        fs::create_dir(&state).unwrap();
        assert!(
            Command::new("mkfifo")
                .arg(state.join(START_FIFO))
                .status()
                .unwrap()
                .success()
        );
        state
    }

    /// A process that has the fifo of this state open and waits.
    fn waiting_for(state: &Path) -> Child {
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec 3<>\"$1\"; echo there; read forever; :", "crun"])
            .arg(state.join(START_FIFO));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut there = [0; 6];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut there)
            .unwrap();
        child
    }

    fn cgroup_of(pids: &[u32]) -> tempfile::TempDir {
        let cgroup = tempfile::tempdir().unwrap();
        let below = cgroup.path().join("container");
        fs::create_dir(&below).unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
        fs::write(
            below.join("cgroup.procs"),
            pids.iter()
                .map(|pid| format!("{pid}\n"))
                .collect::<String>(),
        )
        .unwrap();
        cgroup
    }

    #[test]
    fn of_the_processes_below_a_cgroup_only_the_waiting_init_is_ended() {
        let root = tempfile::tempdir().unwrap();
        let [web, longer, other] = ["web", "web2", "other"].map(|id| state(root.path(), id));
        let mut init = waiting_for(&web);
        let mut others = [waiting_for(&longer), waiting_for(&other)];
        let cgroup = cgroup_of(&[others[0].id(), others[1].id(), init.id()]);
        assert_eq!(processes_within(cgroup.path()).len(), 3);

        // The runtime's root may be named through a link, as /var/run is.
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        end_waiting_init(
            &[cgroup.path().to_owned(), cgroup.path().to_owned()],
            &link.join("web"),
        );
        assert_eq!(init.wait().unwrap().signal(), Some(9));
        for other in &mut others {
            assert_eq!(
                other.try_wait().unwrap(),
                None,
                "a process of another create was ended"
            );
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }

    /// `delete --force` may have removed the runtime's state.
    #[test]
    fn the_init_of_a_removed_state_is_ended() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let mut init = waiting_for(&web);
        fs::remove_dir_all(&web).unwrap();
        end_waiting_init(&[cgroup_of(&[init.id()]).path().to_owned()], &web);
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    /// The process of a second container in the cgroup: a read of the command line would hang the
    /// shim.
    #[test]
    fn a_process_that_holds_its_memory_does_not_delay_the_clean_up() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let Some(holder) = Holder::start(c"crun", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        let mut init = waiting_for(&web);
        end_waiting_init(
            &[cgroup_of(&[holder.pid(), init.id()]).path().to_owned()],
            &web,
        );
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    /// A process of a second container in the cgroup, whose links cannot be read.
    #[test]
    fn a_process_that_hangs_in_execve_does_not_delay_the_clean_up() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let Some(executing) = Executing::start() else {
            return;
        };
        let mut init = waiting_for(&web);
        let cgroup = cgroup_of(&[executing.pid(), init.id()]);
        let path = cgroup.path().to_owned();
        let ended = unless_it_hangs(move || end_waiting_init(&[path], &web));
        if ended.is_none() {
            init.kill().unwrap();
        }
        assert_eq!(ended, Some(()), "the clean-up hangs");
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_cgroup_that_is_gone_has_no_processes() {
        assert!(processes_within(Path::new("/no/such/cgroup")).is_empty());
    }

    #[test]
    fn a_process_in_a_cgroup_or_below_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("app");
        fs::create_dir(&below).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        fs::write(below.join("cgroup.procs"), "").unwrap();
        let is_empty = |cgroup: &Path| processes_within(cgroup).is_empty();
        assert!(is_empty(dir.path()) && is_empty(Path::new("/no/such/cgroup")));
        fs::write(below.join("cgroup.procs"), "0\n").unwrap();
        assert!(!is_empty(dir.path()));
    }

    /// EOPNOTSUPP of a threaded cgroup, EIO of a failing read: the file is there, and its content
    /// is not known.
    #[test]
    fn an_unreadable_cgroup_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
        assert!(processes_within(dir.path())[0].is_err());
    }

    fn scope(unit: &str, path: &str) -> Option<(String, PathBuf)> {
        Some((unit.to_owned(), path.into()))
    }

    #[test]
    fn a_path_in_systemds_form_names_a_scope_in_its_slices() {
        assert_eq!(
            systemd_scope(":cri:web"),
            scope("cri-web.scope", "system.slice/cri-web.scope")
        );
        assert_eq!(
            systemd_scope("kubepods-burstable-pod1_2.slice:cri-containerd:7"),
            scope(
                "cri-containerd-7.scope",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-7.scope"
            )
        );
        assert_eq!(
            systemd_scope("-.slice:cri:web"),
            scope("cri-web.scope", "cri-web.scope")
        );
        for other in [
            "",
            "/kubepods/web",
            "a.slice:cri",
            "a.slice::web",
            "a.slice:cri:b.slice",
            "a/b.slice:c:d",
            "a:b:c",
        ] {
            assert_eq!(systemd_scope(other), None, "{other}");
        }
        for slice in [
            "a--b.slice:cri:web",
            "-a.slice:cri:web",
            "a.slice:../cri:web",
        ] {
            assert_eq!(systemd_scope(slice), None, "{slice}");
        }
    }
}
