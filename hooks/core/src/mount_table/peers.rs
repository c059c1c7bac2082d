//! The same directory on two mounts: mounts made on `other` appear here, see mount_namespaces(7).

use std::path::{Path, PathBuf};

use super::entry::MountEntry;
use crate::paths::{below, lies_in};

impl MountEntry {
    /// Translates `path` on this mount to the same place on `other`, if mounts made on `other`
    /// appear on this mount. This mount is then a peer or slave of `other`. For a place above the
    /// root of `other`, the result is the mount point of `other`.
    ///
    /// `path` must be as the kernel would print it, without symlinks. `None` if `other` and this
    /// mount are the same.
    pub fn name_at_origin(&self, path: &Path, other: &MountEntry) -> Option<PathBuf> {
        let group = other.propagation.peer_group?;
        let receives =
            [self.propagation.peer_group, self.propagation.master].contains(&Some(group));
        if !receives || self.id == other.id {
            return None;
        }
        let place = self.place_in_filesystem(path)?;
        match below(&place, &other.root.path) {
            // Joining an empty path would leave a slash at the end.
            Some(rest) if !rest.as_os_str().is_empty() => Some(other.mount_point.join(rest)),
            _ => lies_in(&other.root.path, &place).then(|| other.mount_point.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;
    use crate::mount_table::MountTable;

    /// As on Container-Optimized OS: one disk, with several folders bound to the paths that
    /// programs use.
    const TABLE: &str = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 8:9 / /mnt/disk rw shared:9 - ext4 /dev/sda9 rw
31 21 8:9 /var /var rw shared:9 - ext4 /dev/sda9 rw
32 31 8:9 /var/lib/kubelet /var/lib/kubelet rw shared:9 - ext4 /dev/sda9 rw
33 21 8:9 /var /slave rw master:9 - ext4 /dev/sda9 rw
34 21 8:9 / /alone rw - ext4 /dev/sda9 rw
";

    #[test]
    fn a_peer_and_a_slave_show_mounts_at_another_name() {
        let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        let mount = |point: &str| {
            table
                .entries()
                .iter()
                .find(|entry| entry.mount_point == Path::new(point))
                .unwrap()
        };
        let kubelets = mount("/var/lib/kubelet");
        let name = |on: &str, path: &str| mount(on).name_at_origin(Path::new(path), kubelets);
        for (on, path, expected) in [
            ("/mnt/disk", "/mnt/disk", "/var/lib/kubelet"),
            ("/mnt/disk", "/mnt/disk/var/lib", "/var/lib/kubelet"),
            ("/mnt/disk", "/mnt/disk/var/lib/kubelet", "/var/lib/kubelet"),
            (
                "/mnt/disk",
                "/mnt/disk/var/lib/kubelet/pods",
                "/var/lib/kubelet/pods",
            ),
            (
                "/slave",
                "/slave/lib/kubelet/pods/u",
                "/var/lib/kubelet/pods/u",
            ),
        ] {
            assert_eq!(
                name(on, path).as_deref(),
                Some(Path::new(expected)),
                "{path}"
            );
        }
        for (on, path) in [
            ("/mnt/disk", "/mnt/disk/var/log"),
            ("/mnt/disk", "/mnt/disk/var/lib/kubelet2"),
            ("/alone", "/alone/var/lib/kubelet"),
            ("/", "/etc"),
            ("/var/lib/kubelet", "/var/lib/kubelet/pods"),
        ] {
            assert_eq!(name(on, path), None, "{path}");
        }
    }
}
