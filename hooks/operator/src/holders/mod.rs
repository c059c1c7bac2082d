//! Finds the holders of the mounts at or below a path: the cause of "device or resource busy".
//!
//! A mount namespace is a copy of another one's mounts, so a mount that is gone here can still
//! exist there. Two rules find related mounts. Neither needs equal paths in both namespaces:
//!
//! ```text
//! it shows the same           its device and root are those of a mount at or below the path
//! it covers the same place    its parent shows the very directory of the filesystem that the path names
//! ```
//!
//! The second rule finds mounts that no mount here shows: after a lazy umount, and on a mount point
//! that cannot be removed.

mod cgroup;
mod release;
mod report;
mod spread;
mod system;
mod wanted;

pub use cgroup::{container_ids, pod_uid};
pub use release::Release;
pub use report::{Checked, HeldMount, Holder, HolderKind, HoldersReport};
pub use wanted::Wanted;

use bindguard_core::error_chain;
use bindguard_core::mount_table::MountTable;

use crate::namespaces::UnreadTable;

/// One mount namespace.
#[derive(Debug)]
pub struct MountNamespace {
    /// Its number, as in `mnt:[4026531841]`.
    pub id: u64,
    /// The holder that keeps it alive.
    pub held_by: HeldBy,
    /// The number of processes in it.
    pub processes: usize,
    /// Its mounts, or why they could not be read.
    pub table: Result<MountTable, UnreadTable>,
}

impl MountNamespace {
    /// The reason for which its mounts are unknown, with its number and its process.
    pub(crate) fn unread(&self) -> Option<String> {
        let why = error_chain(self.table.as_ref().err()?);
        Some(match &self.held_by {
            HeldBy::Process { pid, .. } => {
                format!("mount namespace {} of process {pid}: {why}", self.id)
            }
            HeldBy::Descriptor { .. } | HeldBy::BindMount(_) => {
                format!("mount namespace {}: {why}", self.id)
            }
        })
    }
}

/// The holder that keeps a mount namespace alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeldBy {
    /// Processes run in it; this is the oldest.
    Process {
        /// Its pid in the reader's pid namespace.
        pid: u32,
        /// Its name, truncated by the kernel.
        command: String,
        /// The text of its `/proc/PID/cgroup`.
        cgroup: String,
    },
    /// No process runs in it; a process has it open.
    Descriptor {
        /// The process.
        pid: u32,
        /// Its name.
        command: String,
    },
    /// No process runs in it; it is bind-mounted here.
    BindMount(std::path::PathBuf),
}
