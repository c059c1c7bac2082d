//! A line of the mount table.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::attributes::MountAttributes;
use crate::paths::below;

/// A mount's id. The kernel reuses the ids of unmounted mounts: an id names a mount only while an
/// open file descriptor keeps that mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountId(pub u32);

/// major:minor as mountinfo prints it. Never compare a `Device` with a `st_dev`: on btrfs the
/// `st_dev` differs between subvolumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// The directory or file of the filesystem that a mount shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountRoot {
    /// The path within the filesystem; for a deleted root, the last path before the deletion.
    pub path: PathBuf,
    /// The kernel marked the root `//deleted`: nothing can be bound from this mount any more.
    pub deleted: bool,
}

impl MountRoot {
    const DELETED: &'static [u8] = b"//deleted";

    /// Splits the kernel's mark from the path. No file name contains two slashes, so a file name
    /// cannot contain the mark.
    pub fn from_kernel(root: &[u8]) -> Self {
        let (path, deleted) = match root.strip_suffix(Self::DELETED) {
            Some(path) => (path, true),
            None => (root, false),
        };
        Self {
            path: Path::new(OsStr::from_bytes(path)).to_path_buf(),
            deleted,
        }
    }

    /// The root as the kernel prints it, including the mark.
    pub fn display_name(&self) -> String {
        String::from_utf8_lossy(&self.to_kernel()).into_owned()
    }

    pub(super) fn to_kernel(&self) -> Vec<u8> {
        let mut root = self.path.as_os_str().as_bytes().to_vec();
        if self.deleted {
            root.extend_from_slice(Self::DELETED);
        }
        root
    }
}

/// The optional fields: see mount_namespaces(7).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Propagation {
    /// `shared:N`, this mount's peer group.
    pub peer_group: Option<u32>,
    /// `master:N`, the peer group from which this mount receives events.
    pub master: Option<u32>,
    /// `propagate_from:N`, the nearest dominating peer group below this process's root.
    pub propagate_from: Option<u32>,
    /// `unbindable`.
    pub unbindable: bool,
    /// Fields that bindguard does not know, as the kernel wrote the text.
    pub unknown: Vec<String>,
}

impl Propagation {
    /// True if umounts elsewhere can reach a slave or peer of this mount.
    pub fn passes_umounts_on(&self) -> bool {
        self.peer_group.is_some() || self.master.is_some()
    }
}

/// A filesystem type such as `ext4` or `fuse.sshfs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsType(pub String);

impl FsType {
    /// Filesystems whose operations never wait for a server or a daemon.
    const LOCAL: [&'static str; 32] = [
        "bcachefs",
        "bpf",
        "btrfs",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "hugetlbfs",
        "iso9660",
        "jfs",
        "mqueue",
        "overlay",
        "proc",
        "pstore",
        "ramfs",
        "rootfs",
        "securityfs",
        "squashfs",
        "sysfs",
        "tmpfs",
        "tracefs",
        "vfat",
        "xfs",
        "zfs",
    ];

    /// True if the kernel reports `/` as every mount's root, and the mount's source ends with the
    /// path that the mount shows: `server:/share/db`. NFS does, because the server decides which
    /// directory is the root.
    pub fn has_root_in_source(&self) -> bool {
        matches!(self.0.as_str(), "nfs" | "nfs4")
    }

    /// Filesystems that may query their server, or the nodes that share a disk, for a file's
    /// attributes despite statx(2)'s `AT_STATX_DONT_SYNC`. 9p usually queries, gfs2 and ocfs2
    /// always, cifs, coda, orangefs and smb3 when the client doubts its cached attributes.
    const ASKING: [&'static str; 7] = ["9p", "cifs", "coda", "gfs2", "ocfs2", "orangefs", "smb3"];

    /// True if even the cheapest stat of a file may wait for a server: only the kernel's own tables
    /// may be read.
    pub fn queries_server_for_attributes(&self) -> bool {
        Self::ASKING.contains(&self.0.as_str())
    }

    /// True if a call on this filesystem never waits for a server or daemon. An unknown type is
    /// treated as not local.
    pub fn is_local(&self) -> bool {
        Self::LOCAL.contains(&self.0.as_str())
    }
}

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The mount's id.
    pub id: MountId,
    /// The id that the kernel never reuses; ids increase with each new mount. `None` in a table
    /// that was read as text, and before Linux 6.8.
    pub unique_id: Option<u64>,
    /// The id of the mount below. For the namespace's root, the table does not contain that mount.
    pub parent: MountId,
    /// Device of the mount's filesystem.
    pub device: Device,
    /// The path in the filesystem that the mount shows, from the root field or the source.
    pub root: MountRoot,
    /// The mount point, as seen from the reader's root directory.
    pub mount_point: PathBuf,
    /// Per-mount options, as the kernel wrote them.
    pub options: OsString,
    /// The attributes from these options.
    pub attributes: MountAttributes,
    /// Peer group and master.
    pub propagation: Propagation,
    /// Filesystem type.
    pub fs_type: FsType,
    /// The source as the filesystem names it: a device, a server or free text.
    pub source: OsString,
    /// Options of the filesystem, as the kernel wrote them.
    pub super_options: OsString,
}

impl MountEntry {
    /// True if nothing can be written through the mount: the mount or its filesystem is read-only.
    pub fn is_read_only(&self) -> bool {
        let mut words = self.super_options.as_bytes().split(|byte| *byte == b',');
        self.attributes.is_read_only() || words.any(|word| word == b"ro")
    }

    /// The path in the filesystem that the mount shows, if the source contains this path.
    pub(super) fn root_in_source(&self) -> Option<&Path> {
        let server_and_path =
            Some(self.source.as_bytes()).filter(|_| self.fs_type.has_root_in_source())?;
        // An IPv6 address is in brackets.
        let colon = server_and_path.windows(2).position(|two| two == b":/")?;
        Some(Path::new(OsStr::from_bytes(&server_and_path[colon + 1..])))
    }

    /// The place of `path` within this mount's filesystem: the mount's root, then the part of
    /// `path` below the mount point.
    ///
    /// `path` must be as the kernel would print it, without symlinks. `None` for a `path` outside
    /// of this mount.
    pub fn place_in_filesystem(&self, path: &Path) -> Option<PathBuf> {
        let rest = below(path, &self.mount_point)?;
        // Joining an empty path would leave a slash at the end.
        Some(if rest.as_os_str().is_empty() {
            self.root.path.clone()
        } else {
            self.root.path.join(rest)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_may_be_queried_for_attributes_or_for_everything() {
        for (fs_type, is_local, queries) in [
            ("ext4", true, false),
            ("nfs4", false, false),
            ("cifs", false, true),
            ("unheard-of", false, false),
        ] {
            let fs_type = FsType(fs_type.to_owned());
            assert_eq!(fs_type.is_local(), is_local, "{}", fs_type.0);
            assert_eq!(fs_type.queries_server_for_attributes(), queries);
        }
    }
}
