//! Who keeps the mounts at or below a path alive: "device or resource busy", answered.
//!
//! A mount namespace is a copy of another one's mounts, so a mount that is gone here may live on there. What belongs
//! together is told in two ways, neither of which needs paths to agree between namespaces:
//!
//! ```text
//! the same thing is shown     its device and root are those of a mount at or below the path
//! the same place is covered   its parent shows the very directory of the filesystem that the path names
//! ```
//!
//! The second finds what nobody here shows any more: after a lazy umount, and for a mount point that cannot be removed.

mod cgroup;
mod free;
mod report;
mod spread;
mod system;
mod wanted;

pub use cgroup::{container_ids, pod_uid};
pub use free::Way;
pub use report::{Holder, HoldersReport, KeptMount, Looked};
pub use wanted::Wanted;

use crate::mount_table::MountTable;

/// One mount namespace as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenNamespace {
    /// Its number, as in `mnt:[4026531841]`.
    pub id: u64,
    /// What keeps it alive.
    pub kept_by: KeptBy,
    /// How many processes live in it.
    pub processes: usize,
    /// Its mounts, or why they could not be read.
    pub table: Result<MountTable, String>,
}

/// What keeps a mount namespace alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeptBy {
    /// Processes live in it; this is the oldest.
    Process {
        /// In the reader's numbers.
        pid: u32,
        /// Its name, as the kernel cuts it.
        command: String,
        /// The text of its `/proc/PID/cgroup`.
        cgroup: String,
    },
    /// Nobody lives in it; a process has it open.
    Descriptor {
        /// The process.
        pid: u32,
        /// Its name.
        command: String,
    },
    /// Nobody lives in it; it is bind-mounted here.
    BindMount(std::path::PathBuf),
}
