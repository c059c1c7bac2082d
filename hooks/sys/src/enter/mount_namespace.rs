//! The mount namespace that a process was in, by an open descriptor. The process may enter another
//! namespace later; the descriptor still refers to this namespace.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use bindguard_core::mount_table::MountTable;

use super::mounts::mounts_in;
use super::opened_by_child::open_process_file;
use super::process_error::ProcessError;
use crate::mountinfo::ReadTableError;
use crate::process_files::ProcessFile;

/// The mount namespace that a process was in when it was opened.
#[derive(Debug)]
pub struct MountNamespace {
    pub(super) file: File,
    pub(super) process: u32,
}

/// Why a mount namespace is not taken for that of a container.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The owner of the mount namespace is not the user namespace that the spec requests.
    #[error(
        "process {0} is in a mount namespace that its runtime did not make: another user namespace than that of the container \
         owns it"
    )]
    OtherOwner(u32),
    /// The ids that the owner maps differ from the spec's.
    #[error(
        "the user namespace that owns the mounts of process {0} maps other ids than the container's spec"
    )]
    OtherIds(u32),
    /// The process left the user namespace of its mounts, so the ids of that namespace cannot be
    /// read.
    #[error("process {0} is in another user namespace than the one that owns its mounts")]
    OtherUsers(u32),
    /// The spec names a different user namespace.
    #[error("the user namespace that owns the mounts of process {process} is not {}", path.display())]
    OtherPath {
        /// The process.
        process: u32,
        /// The path in the spec.
        path: PathBuf,
    },
    /// The process ended, or could not be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A step failed.
    #[error("{step} of process {process}")]
    Failed {
        /// The step.
        step: &'static str,
        /// The process.
        process: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl MountNamespace {
    pub(super) fn new(file: File, process: u32) -> Self {
        Self { file, process }
    }

    /// Opens the mount namespace of a process, by the process's file below a `/proc`.
    ///
    /// # Errors
    /// See [`open_process_file`].
    pub fn open(file: &ProcessFile) -> io::Result<Self> {
        Ok(Self::new(open_process_file(file)?.into(), file.pid))
    }

    /// Its number: namespaces(7).
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn number(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// Its mounts, without their sources. `text` opens its mountinfo.
    ///
    /// # Errors
    /// See [`mounts_in`].
    pub fn mounts<R: Read>(
        &self,
        text: impl FnOnce() -> io::Result<R>,
    ) -> Result<MountTable, ReadTableError> {
        mounts_in(&self.file, text)
    }

    /// True if it is that of the calling thread. No container of runc or crun is in that namespace;
    /// the virtual machine of a sandbox such as Kata is.
    ///
    /// # Errors
    /// If it cannot be compared.
    pub fn is_own(&self) -> Result<bool, NamespaceError> {
        let own = File::open("/proc/thread-self/ns/mnt").and_then(|own| is_same(&own, &self.file));
        own.map_err(|source| self.failed("compare the mount namespace", source))
    }

    pub(super) fn failed(&self, step: &'static str, source: io::Error) -> NamespaceError {
        NamespaceError::Failed {
            step,
            process: self.process,
            source,
        }
    }
}

/// Namespaces are compared while both are open: a number may belong to another namespace later.
pub(super) fn is_same(one: &File, other: &File) -> io::Result<bool> {
    Ok(identity(&one.metadata()?) == identity(&other.metadata()?))
}

pub(super) fn identity(namespace: &fs::Metadata) -> (u64, u64) {
    (namespace.dev(), namespace.ino())
}
