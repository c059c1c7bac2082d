//! Errors of reading a process of a container.

use std::io;

use bindguard_core::mount_table::TableError;

use crate::mountinfo::ReadTableError;

/// Why a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It ended.
    #[error("process {0} ended")]
    Ended(u32),
    /// It could not be opened: pidfd_open(2).
    #[error("open process {pid}")]
    Open {
        /// Its pid.
        pid: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A file of it could not be read.
    #[error("read {name} of process {pid}")]
    Read {
        /// Its pid.
        pid: u32,
        /// The name below `/proc/PID`.
        name: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A file of the process could not be read within the time limit: the process holds a lock that
    /// the reader needs.
    #[error(
        "read {name} of process {pid}: the process blocks its readers, for example in an execve(2) that waits for a file server"
    )]
    Blocked {
        /// Its pid.
        pid: u32,
        /// The name below `/proc/PID`.
        name: &'static str,
    },
    /// Its mount table was not accepted, for example because it is too large.
    #[error("parse the mount table of process {pid}")]
    Table {
        /// Its pid.
        pid: u32,
        /// The reason.
        #[source]
        source: TableError,
    },
    /// The signal could not be sent.
    #[error("send {signal} to process {pid}")]
    Signal {
        /// Its pid.
        pid: u32,
        /// The signal.
        signal: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No process of the container runs the program.
    #[error("no process of the container runs {0:?}")]
    NoProgram(String),
    /// Not all processes of the container were read, so the program may be among the rest.
    #[error("the container has too many processes to find {0:?} in time")]
    TooManyProcesses(String),
    /// The cgroup of the container is not known, so neither are its processes.
    #[error("the processes of the container with process {0} are not known")]
    NoContainer(u32),
}

impl ProcessError {
    /// The error of reading the mount table of a process.
    pub(super) fn of_table(pid: u32, error: ReadTableError) -> Self {
        let name = "mountinfo";
        match error {
            ReadTableError::Read(source) => Self::Read { pid, name, source },
            ReadTableError::Table(source) => Self::Table { pid, source },
        }
    }
}
