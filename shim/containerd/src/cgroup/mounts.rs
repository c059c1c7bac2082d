//! The cgroup mounts among the lines of a mountinfo, see proc_pid_mountinfo(5).
//!
//! A mount may show only a part of a hierarchy. In a container without its own cgroup namespace the
//! mount's root is the container's cgroup, while /proc/PID/cgroup counts from the top. Both paths
//! are equal below the mount's root.

use std::path::PathBuf;

use bindguard_core::mount_table::unescape;

/// A mounted cgroup hierarchy.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CgroupMount {
    /// The root within the hierarchy.
    root: String,
    point: PathBuf,
    /// The controllers, or `name=`, of a hierarchy of version 1; none for the unified one.
    controllers: Option<Vec<String>>,
}

impl CgroupMount {
    /// All cgroup mounts of a mountinfo, the topmost first.
    pub(super) fn parse_all(mountinfo: &str) -> Vec<Self> {
        mountinfo.lines().rev().filter_map(Self::parse).collect()
    }

    /// `36 31 0:33 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory`
    fn parse(line: &str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let controllers = match filesystem.next()? {
            "cgroup" => Some(filesystem.nth(1)?.split(',').map(str::to_owned).collect()),
            "cgroup2" => None,
            _ => return None,
        };
        let mut fields = mount.split(' ').skip(3);
        let mut path = || {
            let path = unescape(fields.next()?.as_bytes());
            Some(String::from_utf8_lossy(&path).into_owned())
        };
        Some(Self {
            root: path()?,
            point: path()?.into(),
            controllers,
        })
    }

    /// True if it shows the hierarchy of this controller, or the unified one.
    pub(super) fn shows(&self, controller: Option<&str>) -> bool {
        match (&self.controllers, controller) {
            (Some(has), Some(wanted)) => has.iter().any(|name| name == wanted),
            (None, None) => true,
            _ => false,
        }
    }

    /// The visible path of a cgroup, if it lies below the mount's root.
    pub(super) fn directory_of(&self, cgroup: &str) -> Option<PathBuf> {
        let below = cgroup.strip_prefix(self.root.trim_end_matches('/'))?;
        match below.strip_prefix('/') {
            Some(below) => Some(self.point.join(below.trim_start_matches('/'))),
            // `/a` is not above `/ab`.
            None => below.is_empty().then(|| self.point.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// From a hybrid node, with one mount as a container without a cgroup namespace sees it.
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
        let mounts = CgroupMount::parse_all(MOUNTINFO);
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
        fn any_line_is_read_without_panic(line: String, cgroup: String) {
            for mount in CgroupMount::parse_all(&line) {
                let _ = mount.directory_of(&cgroup);
            }
        }

        #[test]
        fn a_cgroup_is_found_below_any_root(root in "(/[a-zé ]{1,5}){0,3}", below in "(/[a-z:é]{1,5}){0,3}") {
            let mounted = if root.is_empty() { "/" } else { &root };
            let escaped = mounted.replace(' ', "\\040");
            let line = format!("1 2 0:3 {escaped} /cg rw - cgroup2 cgroup2 rw");
            let mount = CgroupMount::parse(&line).unwrap();
            let directory = mount.directory_of(&format!("{root}{below}"));
            prop_assert_eq!(directory, Some(PathBuf::from(format!("/cg{below}"))));
        }
    }
}
