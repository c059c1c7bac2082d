//! A mount namespace with its mounts, and the holder that keeps it alive.

use bindguard_core::error_chain;
use bindguard_core::mount_table::MountTable;
use serde::Serialize;

use super::UnreadTable;

/// A mount namespace.
#[derive(Debug)]
pub struct NamespaceMounts {
    /// Its number, as in `mnt:[4026531841]`.
    pub id: u64,
    /// The holder of the namespace.
    pub held_by: HeldBy,
    /// The number of processes in it.
    pub processes: usize,
    /// Its mounts, or why they could not be read.
    pub table: Result<MountTable, UnreadTable>,
}

impl NamespaceMounts {
    /// The reason for unknown mounts, with the numbers of the namespace and of a process in the
    /// namespace.
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
    /// The oldest process in the namespace.
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

/// The number of objects checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Processes whose namespace was queried.
    pub processes: usize,
    /// Mount namespaces; the table of each was read once.
    pub namespaces: usize,
}
