//! One line of the mount table.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::attributes::MountAttributes;
use crate::paths::below;

/// A mount's id. The kernel gives the id of a mount that is gone to the next one: it names a mount only while an open
/// file descriptor holds that mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountId(pub u32);

/// major:minor as mountinfo prints it. Never compare it with a `st_dev`: btrfs gives each subvolume its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    /// Its path within the filesystem; the last one it had when it is deleted.
    pub path: PathBuf,
    /// The kernel marked it `//deleted`: nothing can be bound from this mount any more.
    pub deleted: bool,
}

impl MountRoot {
    const DELETED: &'static [u8] = b"//deleted";

    /// Takes the kernel's mark apart from the path. No file can have a name with two slashes, so the mark is never
    /// part of one.
    pub fn from_kernel(root: &[u8]) -> Self {
        let (path, deleted) = match root.strip_suffix(Self::DELETED) {
            Some(path) => (path, true),
            None => (root, false),
        };
        Self { path: Path::new(OsStr::from_bytes(path)).to_path_buf(), deleted }
    }

    /// The root as the kernel tells it, mark included, for people to read.
    pub fn for_people(&self) -> String {
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
    /// `shared:N`, the peer group that this mount is in.
    pub peer_group: Option<u32>,
    /// `master:N`, the peer group that this mount receives from.
    pub master: Option<u32>,
    /// `propagate_from:N`, the nearest dominating peer group below this process's root.
    pub propagate_from: Option<u32>,
    /// `unbindable`.
    pub unbindable: bool,
    /// Fields that this version does not know, as they were written.
    pub unknown: Vec<String>,
}

impl Propagation {
    /// Whether umounts elsewhere can reach a slave or peer of this mount.
    pub fn passes_umounts_on(&self) -> bool {
        self.peer_group.is_some() || self.master.is_some()
    }
}

/// A filesystem type such as `ext4` or `fuse.sshfs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsType(pub String);

impl FsType {
    /// Filesystems whose every operation ends without a server or a daemon having to answer.
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

    /// Whether the kernel names every mount's root `/` and what the mount shows at the end of its source:
    /// `server:/share/db`. NFS does, whose own root is the server's business.
    pub fn has_root_in_source(&self) -> bool {
        matches!(self.0.as_str(), "nfs" | "nfs4")
    }

    /// Filesystems that ask their server, or the nodes that share a disk, for a file's attributes although statx(2) was told
    /// that it need not be (`AT_STATX_DONT_SYNC`): 9p as a rule, gfs2 and ocfs2 always, the others once they doubt what they have.
    const ASKING: [&'static str; 7] = ["9p", "cifs", "coda", "gfs2", "ocfs2", "orangefs", "smb3"];

    /// Whether even the cheapest look at a file may wait for a server: the kernel's own tables have to do then.
    pub fn asks_for_attributes(&self) -> bool {
        Self::ASKING.contains(&self.0.as_str())
    }

    /// Whether a call on this filesystem cannot wait for somebody else. What is not known to be local is not.
    pub fn is_local(&self) -> bool {
        Self::LOCAL.contains(&self.0.as_str())
    }
}

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Its id.
    pub id: MountId,
    /// The mount that it is mounted on; one that is not in the table for the root of the namespace.
    pub parent: MountId,
    /// Device of its filesystem.
    pub device: Device,
    /// What of the filesystem it shows, wherever the kernel says it.
    pub root: MountRoot,
    /// Where, seen from the reader's root directory.
    pub mount_point: PathBuf,
    /// Per-mount options, as written.
    pub options: OsString,
    /// What these options say.
    pub attributes: MountAttributes,
    /// Peer group and master.
    pub propagation: Propagation,
    /// Filesystem type.
    pub fs_type: FsType,
    /// Device, server or whatever the filesystem calls its source.
    pub source: OsString,
    /// Options of the filesystem, as written.
    pub super_options: OsString,
}

impl MountEntry {
    /// What of its filesystem the mount shows, where the source says that.
    pub(super) fn root_in_source(&self) -> Option<&Path> {
        let server_and_path = Some(self.source.as_bytes()).filter(|_| self.fs_type.has_root_in_source())?;
        // An IPv6 address stands in brackets.
        let colon = server_and_path.windows(2).position(|two| two == b":/")?;
        Some(Path::new(OsStr::from_bytes(&server_and_path[colon + 1..])))
    }

    /// The place of `path` within this mount's filesystem: the mount's root, then what of the path lies below the mount
    /// point.
    ///
    /// `path` has to be as the kernel would print it, without symlinks. `None` when it does not lie below this mount.
    pub fn place_in_filesystem(&self, path: &Path) -> Option<PathBuf> {
        let rest = below(path, &self.mount_point)?;
        // Joining an empty path would leave a slash at the end.
        Some(if rest.as_os_str().is_empty() { self.root.path.clone() } else { self.root.path.join(rest) })
    }
}
