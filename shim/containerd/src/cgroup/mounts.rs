//! The cgroup mounts of a mount table, see cgroups(7).
//!
//! A mount may show only a part of a hierarchy. In a container without its own cgroup namespace the
//! mount's root is the container's cgroup, while /proc/PID/cgroup counts from the top. Both paths
//! are equal below the mount's root.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountEntry;

/// A mounted cgroup hierarchy.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CgroupMount {
    /// The root within the hierarchy.
    root: PathBuf,
    point: PathBuf,
    /// The controllers, or `name=`, of a version 1 hierarchy; `None` for the unified hierarchy.
    controllers: Option<Vec<String>>,
}

impl CgroupMount {
    /// The cgroup mounts of a mountinfo, the topmost first. Only the current line is in memory.
    pub(super) fn read_all(mountinfo: impl BufRead) -> io::Result<Vec<Self>> {
        let mut mounts = Vec::new();
        for line in mountinfo.split(b'\n') {
            // A mount with an unreadable line is skipped: the search for a cgroup checks each found
            // directory.
            if let Ok(mount) = MountEntry::from_line(&line?) {
                mounts.extend(Self::of(mount));
            }
        }
        mounts.reverse();
        Ok(mounts)
    }

    fn of(mount: MountEntry) -> Option<Self> {
        let controllers = match mount.fs_type.0.as_str() {
            "cgroup" => {
                let options = mount.super_options.to_string_lossy();
                Some(options.split(',').map(str::to_owned).collect())
            }
            "cgroup2" => None,
            _ => return None,
        };
        Some(Self {
            root: mount.root.path,
            point: mount.mount_point,
            controllers,
        })
    }

    /// True if the mount shows the hierarchy of this controller, or the unified hierarchy.
    pub(super) fn shows(&self, controller: Option<&str>) -> bool {
        match (&self.controllers, controller) {
            (Some(has), Some(wanted)) => has.iter().any(|name| name == wanted),
            (None, None) => true,
            _ => false,
        }
    }

    /// The visible path of a cgroup, if it lies below the mount's root.
    pub(super) fn directory_of(&self, cgroup: &str) -> Option<PathBuf> {
        let below = Path::new(cgroup).strip_prefix(&self.root).ok()?;
        Some(self.point.join(below))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
        fn any_line_is_read_without_panic(line: Vec<u8>, cgroup: String) {
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
