//! What was seen of a bind source, before anyone judges it.
//!
//! Plain data: `bindguard-sys` fills it in from the kernel, tests write it down. Each thing that could be looked at is
//! [`Observed`], so "could not read" can never look like "is not there".

use std::path::PathBuf;

use crate::kubelet::{Layout, Plugin, TimestampDirectory};
use crate::mount_table::{Device, FsType, MountRoot};

/// The result of a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    /// It is there.
    Seen(T),
    /// It is known not to be there.
    Absent,
    /// The look failed, and this is why.
    Unreadable(String),
}

/// What kind of file something is, as far as bind mounts care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A directory: it can be bound over a directory only.
    Directory,
    /// Anything else: it can be bound over anything but a directory.
    File,
}

/// Which file something is, whatever its paths.
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
    /// A file that is gone, of which no more is known than its kind: the same as no other. Nothing has the inode number 0.
    pub fn of_what_is_gone(kind: FileKind) -> Self {
        Self { device: 0, inode: 0, kind }
    }
}

/// What is known of one volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathEvidence {
    /// The mount that a bind of the subpath would be made from. [`Observed::Absent`]: the path is not a mount point.
    pub mount: Observed<SubpathMount>,
    /// What it answered. Local filesystems are not asked.
    pub reach: Reach,
    /// The volume. [`Observed::Absent`]: none of the plugins that the guard understands has a volume of that name, and the
    /// filesystem of the mount was not looked for, or not found, on the host.
    pub volume: Observed<Volume>,
    /// What the kubelet would bind today for the same sub path. Looked for only when the two above were seen and the
    /// sub path could be told from them; [`Observed::Absent`] otherwise, and when the volume holds no payload.
    pub target: Observed<Target>,
}

/// The topmost mount at a volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathMount {
    /// What of its filesystem it shows.
    pub root: MountRoot,
    /// Its device.
    pub device: Device,
    /// Its filesystem's type.
    pub fs_type: FsType,
    /// The file that it shows, as far as the kernel knows without asking a server.
    pub identity: Observed<FileIdentity>,
    /// Another mount lies directly below it at the same path: an earlier swap was cut off before its last step.
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
    /// Whether it is a mount of its own.
    pub is_mount_point: bool,
    /// Whether that mount was made after the subpath's. Looked for only where the two are of different devices; `true` otherwise.
    pub is_newer: bool,
    /// How its files lie.
    pub layout: Layout,
}

/// What a sub path leads to today.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The payload directory that `..data` names; `None` in volumes that have no payload.
    pub timestamp: Option<TimestampDirectory>,
    /// The file or directory itself.
    pub file: Observed<FileIdentity>,
}

/// What is mounted where a volume has to be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeMount {
    /// Its filesystem's type.
    pub fs_type: FsType,
    /// What it was bound from is deleted: nothing can be bound from it any more.
    pub deleted: bool,
}

/// What a source answered to a walk and a stat(2), asked by a process that may hang.
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
    /// It should have been probed, and there was no time left, or no process to do it.
    NotProbed,
    /// Nobody asked.
    NotAsked,
}

impl Reach {
    /// What dead mounts answer. errno(3): EIO, ECONNABORTED (a FUSE connection that was aborted), ENOTCONN (a FUSE daemon
    /// that died), ETIMEDOUT, ECONNREFUSED (one that died before it had begun, Linux 7), EHOSTDOWN, EHOSTUNREACH, ESTALE
    /// (an NFS handle that the server forgot), EREMOTEIO.
    const DEAD: [i32; 9] = [5, 103, 107, 110, 111, 112, 113, 116, 121];

    /// The words of a source that is dead for certain. One that is only silent may yet answer.
    pub fn words_of_the_dead(&self) -> Option<&str> {
        match self {
            Self::Refused { number, words } if Self::DEAD.contains(number) => Some(words),
            Self::Refused { .. } | Self::Silent(_) | Self::Alive | Self::NotProbed | Self::NotAsked => None,
        }
    }

    /// Somebody says that nothing is there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { number: 2, .. })
    }

    /// Somebody behind it answers, if only that nothing is there.
    pub fn is_answer(&self) -> bool {
        match self {
            Self::Alive => true,
            Self::Refused { .. } => self.words_of_the_dead().is_none(),
            Self::Silent(_) | Self::NotProbed | Self::NotAsked => false,
        }
    }
}

/// What is known of the mount that a host-root bind would be made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMount {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// It is shared or a slave: an rslave copy of it receives umounts.
    pub passes_umounts_on: bool,
}
