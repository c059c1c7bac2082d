//! Mounts and folders of pods that have ended: "orphaned pod found, but volume paths are still
//! present" (kubernetes#105536, #134075, #139535).
//!
//! ```text
//! pod folders ─┐
//! CRI ─────────┼─► absent pods ─► observations: absent for ten minutes ─► ended pods ─► removal
//! kubelet ─────┘
//! ```
//!
//! The kubelet mounts a pod's volumes long before a sandbox exists, and a pod leaves its lists
//! before its volumes are unmounted. So a pod has ended only if both lists lack the pod twice in
//! the same boot, with ten minutes between. Not removed: files, mounts in use, and block devices of
//! CSI drivers, which only the driver may unpublish.

mod folders;
mod observations;
mod removal;

use std::fmt;
use std::path::PathBuf;

use bindguard_core::text::{serialize_path, serialize_paths};
use serde::Serialize;

pub use self::folders::{EndedPodsError, PodFolders};
pub use self::observations::{AbsentPod, CONFIRMATION_INTERVAL, Observations};
pub use self::removal::{LeftoversAct, left_by};

/// Ended pods with their mounts and directories.
#[derive(Debug, Clone, Default, Serialize)]
pub struct EndedPods {
    /// The pods that the CRI and the kubelet lack.
    pub pods: Vec<EndedPod>,
    /// Why it is not known if pods have ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<String>,
}

impl EndedPods {
    /// No answer.
    pub fn unchecked(why: String) -> Self {
        Self {
            pods: Vec::new(),
            unchecked: Some(why),
        }
    }

    /// True if there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.unchecked.is_none()
    }

    /// True if there is a pod that has ended for certain.
    pub fn has_findings(&self) -> bool {
        self.pods.iter().any(|pod| pod.confirmed && pod.is_left())
    }

    /// True if something could not be read or removed.
    pub fn has_problems(&self) -> bool {
        self.pods.iter().any(|pod| !pod.problems.is_empty())
    }
}

/// A pod that the CRI and the kubelet lack, and what it left.
#[derive(Debug, Clone, Serialize)]
pub struct EndedPod {
    /// Its uid.
    pub uid: String,
    /// Its folder.
    pub folder: PathBuf,
    /// The time since it was first absent, in seconds.
    pub absent_s: u64,
    /// True if that is ten minutes or more: it has ended.
    pub confirmed: bool,
    /// The pod's mounts, in the order of the umounts.
    pub mounts: Vec<LeftMount>,
    /// The pod's empty directories, the deepest first. `repair` removes these directories.
    #[serde(serialize_with = "serialize_paths")]
    pub empty_directories: Vec<PathBuf>,
    /// True if `repair` removed the empty directories.
    pub removed: bool,
    /// The first files that are left. No file is removed.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        serialize_with = "serialize_paths"
    )]
    pub files: Vec<PathBuf>,
    /// The number of all files that are left.
    pub file_count: usize,
    /// Errors of reading and removing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl EndedPod {
    /// True if anything of it is left.
    pub fn is_left(&self) -> bool {
        let is_mounted = |mount: &LeftMount| mount.outcome != LeftOutcome::Unmounted;
        self.mounts.iter().any(is_mounted)
            || self.file_count > 0
            || !self.removed && !self.empty_directories.is_empty()
            || !self.problems.is_empty()
    }
}

/// A mount of an ended pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftMount {
    /// Its mount point.
    #[serde(serialize_with = "serialize_path")]
    pub mount_point: PathBuf,
    /// Its filesystem type.
    pub fs_type: String,
    /// The source, as the filesystem names it.
    pub source: String,
    /// The result of its umount.
    #[serde(flatten)]
    pub outcome: LeftOutcome,
}

/// The result for a mount of an ended pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum LeftOutcome {
    /// Nothing.
    Left,
    /// Nothing, ever: the block device of a CSI driver.
    BlockDevice,
    /// It is unmounted.
    Unmounted,
    /// A process uses it.
    Busy,
    /// The umount failed otherwise.
    Failed {
        /// Why.
        error: String,
    },
}

impl fmt::Display for LeftOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("mounted"),
            Self::BlockDevice => f.write_str("left to its CSI driver: a block device"),
            Self::Unmounted => f.write_str("unmounted"),
            Self::Busy => f.write_str("busy: a process uses it"),
            Self::Failed { error } => write!(f, "not unmounted: {error}"),
        }
    }
}
