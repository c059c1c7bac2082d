//! A line of the mount table.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::mount_table::MountTable;
use crate::mount_table::parse::{as_text, escape};
use crate::text::{below, join};

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
        let undeleted = root.strip_suffix(Self::DELETED);
        Self {
            path: PathBuf::from(OsStr::from_bytes(undeleted.unwrap_or(root))),
            deleted: undeleted.is_some(),
        }
    }

    /// The root as the kernel prints it, including the mark.
    pub fn display_name(&self) -> String {
        as_text(&self.to_kernel())
    }

    fn to_kernel(&self) -> Vec<u8> {
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
    /// True if the kernel reports `/` as every mount's root, and the mount's source ends with the
    /// path that the mount shows: `server:/share/db`. NFS does, because the server decides which
    /// directory is the root.
    pub fn has_root_in_source(&self) -> bool {
        matches!(self.0.as_str(), "nfs" | "nfs4")
    }

    /// True if even the cheapest stat of a file may wait for a server: only the kernel's own tables
    /// may be read. These filesystems may query their server, or the nodes that share a disk, for a
    /// file's attributes despite statx(2)'s `AT_STATX_DONT_SYNC`. 9p usually queries, gfs2 and ocfs2
    /// always, cifs, coda, orangefs and smb3 when the client doubts its cached attributes.
    pub fn queries_server_for_attributes(&self) -> bool {
        matches!(
            self.0.as_str(),
            "9p" | "cifs" | "coda" | "gfs2" | "ocfs2" | "orangefs" | "smb3"
        )
    }

    /// True if a call on this filesystem never waits for a server or daemon. An unknown type is
    /// treated as not local.
    pub fn is_local(&self) -> bool {
        matches!(
            self.0.as_str(),
            "bcachefs"
                | "bpf"
                | "btrfs"
                | "cgroup"
                | "cgroup2"
                | "configfs"
                | "debugfs"
                | "devpts"
                | "devtmpfs"
                | "efivarfs"
                | "erofs"
                | "ext2"
                | "ext3"
                | "ext4"
                | "f2fs"
                | "hugetlbfs"
                | "iso9660"
                | "jfs"
                | "mqueue"
                | "overlay"
                | "proc"
                | "pstore"
                | "ramfs"
                | "rootfs"
                | "securityfs"
                | "squashfs"
                | "sysfs"
                | "tmpfs"
                | "tracefs"
                | "vfat"
                | "xfs"
                | "zfs"
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
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
    /// True if the mount is in a peer group.
    pub fn is_shared(&self) -> bool {
        self.propagation.peer_group.is_some()
    }

    /// True if nothing can be written through the mount: the mount or its filesystem is read-only.
    pub fn is_read_only(&self) -> bool {
        let mut words = self.super_options.as_bytes().split(|byte| *byte == b',');
        self.attributes.is_read_only() || words.any(|word| word == b"ro")
    }

    /// The path in the filesystem that the mount shows, if the source contains this path.
    pub(super) fn root_in_source(&self) -> Option<&Path> {
        if !self.fs_type.has_root_in_source() {
            return None;
        }
        let source = self.source.as_bytes();
        // An IPv6 address is in brackets.
        let colon = source.windows(2).position(|two| two == b":/")?;
        Some(Path::new(OsStr::from_bytes(&source[colon + 1..])))
    }

    /// The place of `path` within this mount's filesystem: the mount's root, then the part of
    /// `path` below the mount point.
    ///
    /// `path` must be as the kernel would print it, without symlinks. `None` for a `path` outside
    /// of this mount.
    pub fn place_in_filesystem(&self, path: &Path) -> Option<PathBuf> {
        let rest = below(path, &self.mount_point)?;
        Some(join(self.root.path.clone(), rest))
    }
}

// The attributes of a mount that deny access or set how access times are kept: mount_setattr(2).
//
// Each mount of a filesystem has its own attributes. mountinfo names them in words, statmount(2)
// by the bits of `MOUNT_ATTR_*`.

/// The attributes of a mount. Serialized as bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MountAttributes(u64);

/// `MOUNT_ATTR_*` of the kernel's `include/uapi/linux/mount.h`, and its name in mountinfo.
const WORDS: [(&str, u64); 8] = [
    ("ro", READ_ONLY),
    ("nosuid", NOSUID),
    ("nodev", NODEV),
    ("noexec", NOEXEC),
    ("noatime", NOATIME),
    ("nodiratime", NODIRATIME),
    ("idmapped", IDMAPPED),
    ("nosymfollow", NOSYMFOLLOW),
];

const READ_ONLY: u64 = 0x1;
const NOSUID: u64 = 0x2;
const NODEV: u64 = 0x4;
const NOEXEC: u64 = 0x8;
const NOATIME: u64 = 0x10;
const STRICTATIME: u64 = 0x20;
const NODIRATIME: u64 = 0x80;
const IDMAPPED: u64 = 0x10_0000;
const NOSYMFOLLOW: u64 = 0x20_0000;

impl MountAttributes {
    /// Read-only, nosuid, nodev, noexec and nosymfollow: each attribute takes a permission from the
    /// users of the mount.
    const DENYING: u64 = READ_ONLY | NOSUID | NODEV | NOEXEC | NOSYMFOLLOW;

    /// `MOUNT_ATTR__ATIME` and `MOUNT_ATTR_NODIRATIME`: how access times are kept.
    pub const ACCESS_TIMES: u64 = 0x70 | NODIRATIME;

    /// Reads the bits of statmount(2), without the bits that this version does not know.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits & (Self::DENYING | Self::ACCESS_TIMES | IDMAPPED))
    }

    /// Reads mountinfo's options. Without an option for access times, access times are kept
    /// strictly.
    pub fn from_options(options: &OsStr) -> Self {
        let (mut bits, mut is_relative) = (0, false);
        for word in options.as_bytes().split(|byte| *byte == b',') {
            is_relative |= word == b"relatime";
            if let Some((_, bit)) = WORDS.iter().find(|(name, _)| name.as_bytes() == word) {
                bits |= bit;
            }
        }
        if bits & NOATIME == 0 && !is_relative {
            bits |= STRICTATIME;
        }
        Self(bits)
    }

    /// The bits for mount_setattr(2). An idmapping cannot be set by a bit alone and is not
    /// included.
    pub fn bits(self) -> u64 {
        self.0 & !IDMAPPED
    }

    /// True if nothing can be written through the mount.
    pub fn is_read_only(self) -> bool {
        self.0 & READ_ONLY != 0
    }

    /// True if the mount maps the owners of the filesystem's files. Only a copy of the mount shows
    /// the same owners.
    pub fn is_idmapped(self) -> bool {
        self.0 & IDMAPPED != 0
    }

    /// The permissions that mount options of a spec deny on the bind, and on each mount below. Of
    /// `ro` and `rw` and their kin, the last option applies. `rro` and its kin, which runtimes pass
    /// to mount_setattr(2), apply below; `rro` denies writes on the bind in any order.
    pub fn denied_by_spec(options: &[&str]) -> (Self, Self) {
        let (mut bits, mut below) = (0, 0);
        for option in options {
            match *option {
                "ro" => bits |= READ_ONLY,
                "rw" => bits &= !READ_ONLY,
                "nosuid" => bits |= NOSUID,
                "suid" => bits &= !NOSUID,
                "nodev" => bits |= NODEV,
                "dev" => bits &= !NODEV,
                "noexec" => bits |= NOEXEC,
                "exec" => bits &= !NOEXEC,
                "rro" => below |= READ_ONLY,
                "rnosuid" => below |= NOSUID,
                "rnodev" => below |= NODEV,
                "rnoexec" => below |= NOEXEC,
                "rnosymfollow" => below |= NOSYMFOLLOW,
                _ => {}
            }
        }
        (Self(bits | below & READ_ONLY), Self(below))
    }

    /// True for an option of [`MountAttributes::denied_by_spec`] that concerns the bind alone.
    pub fn is_flag_of_spec(option: &str) -> bool {
        let option = option.strip_prefix("no").unwrap_or(option);
        matches!(option, "ro" | "rw" | "suid" | "dev" | "exec")
    }

    /// The permissions that `self` denies and `other` does not.
    #[must_use]
    pub fn denied_only_here(self, other: Self) -> Self {
        Self(self.0 & !other.0 & Self::DENYING)
    }

    /// True without any attribute.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// nosuid, nodev and noexec, if `self` does not deny them.
    #[must_use]
    pub fn allowed(self) -> Self {
        Self((NOSUID | NODEV | NOEXEC) & !self.0)
    }

    /// The number of permissions that `self` denies and `other` does not.
    pub fn denied_beyond(self, other: Self) -> u32 {
        self.denied_only_here(other).0.count_ones()
    }

    /// The same attributes, and the denials of `other`.
    #[must_use]
    pub fn with_denied_by(self, other: Self) -> Self {
        Self(self.0 | other.0 & Self::DENYING)
    }
}

/// Prints the words of mountinfo, without the words for access times that mountinfo omits.
impl fmt::Display for MountAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        for (word, bit) in WORDS {
            if self.0 & bit != 0 {
                words.push(word);
            }
        }
        f.write_str(&words.join(","))
    }
}

// A mount table as the kernel would print it: for reports to people, and to prove that parsing
// loses nothing.

impl MountEntry {
    /// This mount as a line of mountinfo, without the newline.
    pub fn to_line(&self) -> Vec<u8> {
        let mut root = self.root.clone();
        if self.root_in_source() == Some(&root.path) {
            root.path = PathBuf::from("/");
        }
        let mut line = format!("{} {} {} ", self.id.0, self.parent.0, self.device).into_bytes();
        line.extend(escape(&root.to_kernel()));
        line.push(b' ');
        line.extend(escape(self.mount_point.as_os_str().as_bytes()));
        line.push(b' ');
        line.extend(self.options.as_bytes());
        let propagation = &self.propagation;
        for (tag, number) in [
            ("shared", propagation.peer_group),
            ("master", propagation.master),
            ("propagate_from", propagation.propagate_from),
        ] {
            if let Some(number) = number {
                line.extend(format!(" {tag}:{number}").bytes());
            }
        }
        if propagation.unbindable {
            line.extend(b" unbindable");
        }
        for field in &propagation.unknown {
            line.push(b' ');
            line.extend(field.bytes());
        }
        line.extend(b" - ");
        line.extend(escape(self.fs_type.0.as_bytes()));
        line.push(b' ');
        line.extend(escape(self.source.as_bytes()));
        line.push(b' ');
        line.extend(self.super_options.as_bytes());
        line
    }
}

impl MountTable {
    /// The whole table as mountinfo.
    pub fn to_mountinfo(&self) -> Vec<u8> {
        let mut text = Vec::new();
        for entry in self.entries() {
            text.extend(entry.to_line());
            text.push(b'\n');
        }
        text
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

#[cfg(test)]
mod attributes_tests {
    use super::*;

    #[test]
    fn words_and_bits_say_the_same() {
        for (words, bits) in [
            ("rw,relatime", 0),
            ("rw", 0x20),
            ("ro,ro,relatime", 0x1),
            ("ro,nosuid,nodev,noexec,noatime,nodiratime", 0x9f),
            ("rw,nosuid,relatime,nosymfollow,idmapped", 0x30_0002),
        ] {
            assert_eq!(
                MountAttributes::from_options(words.as_ref()),
                MountAttributes::from_bits(bits),
                "{words}"
            );
        }
    }

    #[test]
    fn the_last_of_two_opposite_options_of_a_spec_applies() {
        let denied = |options: &str| {
            let words: Vec<_> = options.split(',').collect();
            MountAttributes::denied_by_spec(&words).0.to_string()
        };
        assert_eq!(
            denied("rbind,ro,nosuid,nodev,noexec"),
            "ro,nosuid,nodev,noexec"
        );
        assert_eq!(denied("ro,rw,noexec,exec,nodev,suid"), "nodev");
        assert_eq!(denied("rro,rw"), "ro");
        assert_eq!(denied("ro,rro"), "ro");
        assert_eq!(denied("nosuid,nodev,noexec,suid,dev,exec"), "");
        assert_eq!(denied("bind,rprivate"), "");
    }

    #[test]
    fn rights_denied_by_either_are_denied_and_access_times_stay() {
        let [strict, lax] = ["ro,noexec,noatime", "rw,nosuid,relatime"]
            .map(|it| MountAttributes::from_options(it.as_ref()));
        assert_eq!(
            lax.with_denied_by(strict),
            MountAttributes::from_options("ro,nosuid,noexec,relatime".as_ref())
        );
        assert_eq!(
            (strict.denied_beyond(lax), lax.denied_beyond(strict)),
            (2, 1)
        );
        assert_eq!(strict.with_denied_by(strict), strict);
    }

    #[test]
    fn flags_of_the_bind_alone_are_not_flags_of_the_mounts_below() {
        for option in ["ro", "rw", "suid", "nosuid", "nodev", "exec"] {
            assert!(MountAttributes::is_flag_of_spec(option), "{option}");
        }
        for option in ["rro", "rnosuid", "nosymfollow", "rbind"] {
            assert!(!MountAttributes::is_flag_of_spec(option), "{option}");
        }
        let below = |options: &str| {
            let words: Vec<_> = options.split(',').collect();
            MountAttributes::denied_by_spec(&words).1.to_string()
        };
        assert_eq!(
            below("rro,rro,rnosuid,rnodev,rnoexec,rnosymfollow"),
            "ro,nosuid,nodev,noexec,nosymfollow"
        );
        assert_eq!(below("ro,nosuid,nodev,noexec"), "");
    }

    #[test]
    fn nosuid_nodev_and_noexec_are_allowed_unless_denied() {
        let attributes = MountAttributes::from_options("ro,nosuid,idmapped".as_ref());
        assert_eq!(attributes.allowed().to_string(), "nodev,noexec");
        assert_eq!(attributes.bits(), READ_ONLY | NOSUID | STRICTATIME);
    }
}
