//! The repair of a stale subpath, or the reason why bindguard has none.

use std::path::PathBuf;

use super::path_in_volume::NotInVolume;
use super::path_in_volume::PathInVolume;
use crate::kubelet::{VolumeLayout, Writer};

/// The repair of a stale subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The volume's directory.
    pub volume: PathBuf,
    /// The path within it.
    pub sub_path: PathInVolume,
    /// The writer of the volume.
    pub writer: Writer,
    /// The layout of its files.
    pub layout: VolumeLayout,
    /// The permitted repair.
    pub method: RepairMethod,
}

/// The methods that repair a stale subpath.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMethod {
    /// Bind the current target in place of the stale target.
    Rebind,
    /// A directory is in the way of a file: only the spec's source can be changed.
    PointSpecAtVolume,
    /// Create the missing directory again, then bind it.
    Remake,
}

/// Why a stale subpath or volume has no repair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRemedy {
    /// The pod has no volume of that name whose files bindguard can compare.
    #[error("no volume of that name is one that can be repaired")]
    NoVolume,
    /// It shows a whole share, so its root does not contain the sub path.
    #[error("its sub path is recorded nowhere; delete the pod")]
    WholeShare,
    /// The NFS client renamed the deleted file, so its root does not contain the sub path.
    #[error(
        "the NFS client keeps it by another name; its sub path is recorded nowhere; delete the pod"
    )]
    RenamedByClient,
    /// The source is a whole volume, and a driver mounts a volume once for a pod.
    #[error("only its driver can mount it anew, for a new pod")]
    MountedByDriver,
    /// The directory contains mounts, which a detach would lose.
    #[error("other mounts are in its directory")]
    Occupied,
    /// Its mount could not be mapped to a path of its volume.
    #[error(transparent)]
    NotInVolume(#[from] NotInVolume),
    /// The evidence about its volume could not be read.
    #[error("{0}")]
    Unreadable(String),
}
