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

mod figures;
mod leftover;
#[cfg(test)]
mod live;
mod oom;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountEntry;
use protobuf::well_known_types::any::Any;

use crate::step::{Result, failed};
use figures::Metrics;

pub use leftover::remove_leftover_cgroup;
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
    controllers: Option<Vec<String>>,
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
                "cgroup" => {
                    let options = mount.super_options.to_string_lossy();
                    Some(options.split(',').map(str::to_owned).collect())
                }
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
            (Some(has), Some(wanted)) => has.iter().any(|name| name == wanted),
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
