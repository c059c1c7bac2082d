//! The evidence about a bind source, before any verdict.
//!
//! Plain data: `bindguard-sys` fills it in from the kernel, tests write literals. Each part that
//! may be unreadable is [`Observed`], so "could not read" never looks like "does not exist".

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::kubelet::{Plugin, TimestampDirectory, VolumeLayout};
use crate::mount_table::{Device, FsType, MountEntry, MountRoot};

/// The result of an observation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    Seen(T),
    /// The object is known not to exist.
    Absent,
    /// The observation failed, for this reason.
    Unreadable(String),
}

/// The kind of a file, as far as bind mounts distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A directory: it can be bound over a directory only.
    Directory,
    /// A file of any kind except a directory: it can be bound over any file but a directory.
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
    /// A deleted file of which only the kind is known. Its inode number 0 equals that of no
    /// existing file.
    pub fn of_what_is_gone(kind: FileKind) -> Self {
        Self {
            device: 0,
            inode: 0,
            kind,
        }
    }
}

/// A file or folder, identified by its filesystem and its path within the filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePlace {
    /// The device of the filesystem.
    pub device: Device,
    /// The path within the filesystem.
    pub path: PathBuf,
}

impl FilePlace {
    /// The root of a mount.
    pub fn root_of(mount: &MountEntry) -> Self {
        Self {
            device: mount.device,
            path: mount.root.path.clone(),
        }
    }

    /// True if this file or folder is the root of the mount.
    pub fn is_root_of(&self, mount: &MountEntry) -> bool {
        mount.device == self.device && mount.root.path == self.path
    }
}

/// The evidence about a volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathEvidence {
    /// The mount from which a bind of the subpath would be made. [`Observed::Absent`]: the path is
    /// not a mount point.
    pub mount: Observed<SubpathMount>,
    /// The subpath's answer to a probe. Local filesystems are not probed.
    pub reach: Reach,
    /// The volume. [`Observed::Absent`]: no known plugin has a volume of this name, and the mount's
    /// filesystem was not searched for, or not found, on the host.
    pub volume: Observed<Volume>,
    /// The target that the kubelet would bind today for the same sub path. It is read only if mount
    /// and volume were seen and the sub path could be derived. Otherwise, and if the volume has no
    /// payload, it is [`Observed::Absent`].
    pub target: Observed<Target>,
}

/// The topmost mount at a volume-subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathMount {
    /// The path in the filesystem that the mount shows.
    pub root: MountRoot,
    pub device: Device,
    pub fs_type: FsType,
    /// The file that the mount shows, as far as the kernel knows without a query to a server.
    pub identity: Observed<FileIdentity>,
    /// A second mount is directly below at the same path: an earlier swap was interrupted before
    /// its last step.
    pub covers_its_equal: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub plugin: Plugin,
    pub directory: PathBuf,
    /// Device of the filesystem that contains the volume.
    pub device: Device,
    /// Type of that filesystem.
    pub fs_type: FsType,
    /// The volume's path within its filesystem.
    pub place: PathBuf,
    /// True if the volume is a mount point.
    pub is_mount_point: bool,
    /// True if the volume was mounted after the subpath. Checked only if their devices differ;
    /// otherwise `true`.
    pub is_newer: bool,
    /// The layout of the volume's files.
    pub layout: VolumeLayout,
}

/// The target of a sub path today.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The payload directory that `..data` names; `None` in volumes that have no payload.
    pub timestamp: Option<TimestampDirectory>,
    /// The file or directory at the sub path.
    pub file: Observed<FileIdentity>,
}

/// The mount at a path where a volume must be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeMount {
    pub fs_type: FsType,
    /// The mount's root is deleted: nothing can be bound from this mount any more.
    pub deleted: bool,
}

/// The answer of a source to a path walk and a stat(2), made by a process that may hang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    Alive,
    /// The source gave no answer for this many milliseconds.
    Silent(u64),
    Refused {
        /// The error's number, errno(3).
        number: i32,
        words: String,
    },
    /// A probe was due, but no time was left, or no process could be started.
    NotProbed,
    /// No probe was requested.
    NotNeeded,
}

impl Reach {
    /// The errors of dead mounts, errno(3): EIO, ECONNABORTED, ENOTCONN, ETIMEDOUT, ECONNREFUSED,
    /// EHOSTDOWN, EHOSTUNREACH, ESTALE, EREMOTEIO. ECONNABORTED means an aborted FUSE connection,
    /// ENOTCONN a FUSE daemon that died. ECONNREFUSED is a FUSE daemon that died before it was
    /// ready (Linux 7). ESTALE is an NFS handle that the server forgot.
    const DEAD: [i32; 9] = [5, 103, 107, 110, 111, 112, 113, 116, 121];

    /// The error text of a source that is certainly dead. A source that is only silent may still
    /// answer.
    pub fn error_of_dead_source(&self) -> Option<&str> {
        match self {
            Self::Refused { number, words } if Self::DEAD.contains(number) => Some(words),
            Self::Refused { .. } | Self::Silent(_) | Self::Alive => None,
            Self::NotProbed | Self::NotNeeded => None,
        }
    }

    /// True if the source's server or filesystem answers that the path does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { number: 2, .. })
    }

    /// True if the source's server or filesystem answers, even with "not found".
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
    /// The path at which the mount is attached.
    pub mount_point: PathBuf,
    /// The mount is shared or a slave: an rslave copy of this mount receives umounts.
    pub passes_umounts_on: bool,
}
