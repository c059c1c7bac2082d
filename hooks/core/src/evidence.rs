//! The evidence about a bind source, before any verdict.
//!
//! Plain data: `bindguard-sys` fills it in from the kernel, tests write it as literals. Each part
//! that may be unreadable is [`Observed`], so "could not read" can never look like "does not
//! exist".

use std::path::PathBuf;

use crate::kubelet::{Plugin, TimestampDirectory, VolumeLayout};
use crate::mount_table::{Device, FsType, MountRoot};

/// The result of one observation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    /// It exists.
    Seen(T),
    /// It is known not to exist.
    Absent,
    /// The observation failed, for this reason.
    Unreadable(String),
}

/// The kind of a file, as far as bind mounts distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A directory: it can be bound over a directory only.
    Directory,
    /// Anything else: it can be bound over anything but a directory.
    File,
}

/// The identity of a file, independent of its paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// `st_dev`; compared only with another `st_dev`.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Directory or not.
    pub kind: FileKind,
}

impl FileIdentity {
    /// A deleted file of which only the kind is known. It equals no other file: no file has the
    /// inode number 0.
    pub fn of_what_is_gone(kind: FileKind) -> Self {
        Self {
            device: 0,
            inode: 0,
            kind,
        }
    }
}

/// A file or folder by its filesystem and its path within that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    /// The device of the filesystem.
    pub device: Device,
    /// The path within the filesystem.
    pub path: PathBuf,
}

/// The evidence about one volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathEvidence {
    /// The mount that a bind of the subpath would be made from. [`Observed::Absent`]: the path is
    /// not a mount point.
    pub mount: Observed<SubpathMount>,
    /// Its answer to a probe. Local filesystems are not probed.
    pub reach: Reach,
    /// The volume. [`Observed::Absent`]: no known plugin has a volume of that name, and the
    /// filesystem of the mount was not searched for, or not found, on the host.
    pub volume: Observed<Volume>,
    /// The target that the kubelet would bind today for the same sub path. It is read only if mount
    /// and volume were seen and the sub path could be derived from them. Otherwise, and if the
    /// volume has no payload, it is [`Observed::Absent`].
    pub target: Observed<Target>,
}

/// The topmost mount at a volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathMount {
    /// Its root: the path in its filesystem that it shows.
    pub root: MountRoot,
    /// Its device.
    pub device: Device,
    /// Its filesystem's type.
    pub fs_type: FsType,
    /// The file that it shows, as far as the kernel knows without a query to a server.
    pub identity: Observed<FileIdentity>,
    /// Another mount is directly below it at the same path: an earlier swap was interrupted before
    /// its last step.
    pub covers_its_equal: bool,
}

/// A kubelet volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Its plugin.
    pub plugin: Plugin,
    /// Its directory.
    pub directory: PathBuf,
    /// Device of the filesystem it is on.
    pub device: Device,
    /// Type of that filesystem.
    pub fs_type: FsType,
    /// Its place within that filesystem.
    pub place: PathBuf,
    /// True if it is a mount of its own.
    pub is_mount_point: bool,
    /// True if that mount was made after the subpath's. Checked only if the two are of different
    /// devices; otherwise `true`.
    pub is_newer: bool,
    /// The layout of its files.
    pub layout: VolumeLayout,
}

/// The target of a sub path today.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The payload directory that `..data` names; `None` in volumes that have no payload.
    pub timestamp: Option<TimestampDirectory>,
    /// The file or directory itself.
    pub file: Observed<FileIdentity>,
}

/// The mount at a path where a volume must be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeMount {
    /// Its filesystem's type.
    pub fs_type: FsType,
    /// Its root is deleted: nothing can be bound from it any more.
    pub deleted: bool,
}

/// The answer of a source to a walk and a stat(2), made by a process that may hang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// It is there.
    Alive,
    /// It gave no answer for this many milliseconds.
    Silent(u64),
    /// The kernel's answer.
    Refused {
        /// The error's number, errno(3).
        number: i32,
        /// The error in words.
        words: String,
    },
    /// A probe was due, but there was no time left, or no process to do it.
    NotProbed,
    /// No probe was requested.
    NotNeeded,
}

impl Reach {
    /// The errors of dead mounts. errno(3): EIO, ECONNABORTED (an aborted FUSE connection),
    /// ENOTCONN (a FUSE daemon that died), ETIMEDOUT, ECONNREFUSED (one that died before it had
    /// begun, Linux 7), EHOSTDOWN, EHOSTUNREACH, ESTALE (an NFS handle that the server forgot),
    /// EREMOTEIO.
    const DEAD: [i32; 9] = [5, 103, 107, 110, 111, 112, 113, 116, 121];

    /// The error text of a source that is certainly dead. A source that is only silent may still
    /// answer.
    pub fn error_of_dead_source(&self) -> Option<&str> {
        match self {
            Self::Refused { number, words } if Self::DEAD.contains(number) => Some(words),
            Self::Refused { .. }
            | Self::Silent(_)
            | Self::Alive
            | Self::NotProbed
            | Self::NotNeeded => None,
        }
    }

    /// True if the answer is that nothing is there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { number: 2, .. })
    }

    /// True if something behind it answers, even if only that nothing is there.
    pub fn is_answer(&self) -> bool {
        match self {
            Self::Alive => true,
            Self::Refused { .. } => self.error_of_dead_source().is_none(),
            Self::Silent(_) | Self::NotProbed | Self::NotNeeded => false,
        }
    }
}

/// The evidence about the mount that a host-root bind would be made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMount {
    /// Its mount point.
    pub mount_point: PathBuf,
    /// It is shared or a slave: an rslave copy of it receives umounts.
    pub passes_umounts_on: bool,
}
