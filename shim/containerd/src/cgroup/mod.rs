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
            log::debug!(error:%, cgroup:% = cgroup.display(); "some controllers stay disabled");
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
        log::warn!(error:%; "the init of an interrupted create may stay");
    }
    if let Some((unit, _)) = scope {
        return stop_if_empty(unit, &cgroups).await;
    }
    for cgroup in cgroups {
        for _ in 0..TRIES {
            match fs::remove_dir(&cgroup) {
                Ok(()) => {
                    log::debug!(cgroup:% = cgroup.display(); "removed what a killed runtime left")
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
                log::warn!(
                    pid:%, state:% = state.display();
                    "ended the init that a killed runtime left"
                )
            }
            Err(error) => log::warn!(pid:%, error:%; "a process of an interrupted create stays"),
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
                return log::warn!(unit:%, error:% = error_chain(error); "a scope stays");
            }
        }
    }
    log::debug!(unit:%; "stopping the scope that a killed runtime left");
    let mut command = Command::new("systemctl");
    command
        .args(["stop", "--no-block", "--quiet", "--", &unit])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    kernel::with_default_signals(&mut command);
    let run = run_blocking(move || command.status()).await;
    match run.and_then(|ended| ended) {
        Ok(status) if status.success() => {}
        Ok(status) => {
            log::warn!(unit:%, status:%; "an empty scope stays: systemctl stop failed");
        }
        Err(error) => log::warn!(unit:%, error:%; "an empty scope stays: run systemctl"),
    }
}

#[cfg(test)]
mod discovery_tests;
#[cfg(test)]
mod leftover_tests;
#[cfg(test)]
mod tests;
