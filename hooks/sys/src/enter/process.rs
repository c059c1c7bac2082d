//! A container's init process, held by a pidfd: what is read of it belongs to it and to no later
//! process of the same pid.

use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::mount_table::{MountTable, TableError};
use bindguard_core::process::{START_TIME, number};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::enter::helper_process::is_answered;
use crate::enter::namespace::MountNamespace;
use crate::enter::owner::{Kind, MOUNT, namespace_of};
use crate::fork::{ChildProcess, is_readable, receive, send, sockets};
use crate::mounts::ReadTableError;
use crate::process_files;
use crate::process_files::ProcessFile;

/// A process with its pidfd. The process may end at any time.
#[derive(Debug)]
pub struct HeldProcess {
    pid: u32,
    pidfd: OwnedFd,
    /// The id of the container whose init it is; `None` if that was not checked.
    pub(super) container: Option<String>,
}

impl HeldProcess {
    /// Opens a process by its pid.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] if there is none, and [`ProcessError::Open`].
    pub fn open(pid: u32) -> Result<Self, ProcessError> {
        let number = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(ProcessError::Ended(pid))?;
        let opened = pidfd_open(number, PidfdFlags::empty());
        let pidfd = opened.map_err(|errno| match errno {
            // INVAL, or NOENT of newer kernels: a thread of another process has this number.
            Errno::SRCH | Errno::INVAL | Errno::NOENT => ProcessError::Ended(pid),
            errno => ProcessError::Open {
                pid,
                source: errno.into(),
            },
        })?;
        Ok(Self {
            pid,
            pidfd,
            container: None,
        })
    }

    /// The same, as the init of the container with this id.
    #[must_use]
    pub fn of_container(self, id: &str) -> Self {
        Self {
            container: Some(id.to_owned()),
            ..self
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        !self.ends_within(Duration::ZERO)
    }

    /// Waits for its end for at most this time. A process that exits loses its namespaces first, and
    /// ends when its mounts are gone and its children ended.
    pub fn ends_within(&self, time: Duration) -> bool {
        is_readable(&self.pidfd, time)
    }

    /// The text of a file below `/proc/PID` for which the kernel takes no lock that the process can
    /// hold: see [`process_files`].
    ///
    /// # Errors
    /// If it cannot be read, or the process ended.
    pub fn read(&self, name: &'static str) -> Result<Vec<u8>, ProcessError> {
        // A file of procfs has no size: a buffer that holds most of them saves a dozen short reads.
        let mut text = Vec::with_capacity(16 * 1024);
        let file = File::open(format!("/proc/{}/{name}", self.pid));
        let read = file.and_then(|mut file| file.read_to_end(&mut text));
        self.checked(name, read)?;
        Ok(text)
    }

    /// The file name of its program, by the link `exe` alone: the program's filesystem is not
    /// queried.
    ///
    /// # Errors
    /// As [`HeldProcess::read`], and [`ProcessError::Blocked`].
    pub fn program_name(&self) -> Result<Vec<u8>, ProcessError> {
        let link = process_files::links(&[ProcessFile::of(self.pid, "exe")]);
        let link = self.checked("exe", link.into_iter().collect::<io::Result<PathBuf>>())?;
        Ok(link.file_name().unwrap_or_default().as_bytes().to_vec())
    }

    /// The time of its start, in ticks since the boot.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`].
    pub fn start_time(&self) -> Result<u64, ProcessError> {
        let name = "stat";
        let text = process_files::contents(&[ProcessFile::of(self.pid, name)]);
        let text = self.checked(name, text.into_iter().collect::<io::Result<Vec<_>>>())?;
        let text = String::from_utf8_lossy(&text.concat()).into_owned();
        number(&text, START_TIME).ok_or_else(|| ProcessError::Read {
            pid: self.pid,
            name,
            source: io::ErrorKind::InvalidData.into(),
        })
    }

    /// The mounts of its mount namespace, without their sources.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`], and if the table is too large or a line is no mount.
    pub fn mounts(&self) -> Result<MountTable, ProcessError> {
        let pid = self.pid;
        let namespace = self.mount_namespace()?;
        let table = namespace.mounts(|| File::open(format!("/proc/{pid}/mountinfo")));
        if !self.is_alive() {
            return Err(ProcessError::Ended(pid));
        }
        table.map_err(|error| ProcessError::of_table(pid, error))
    }

    /// The current mount namespace of the process.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`].
    pub fn mount_namespace(&self) -> Result<MountNamespace, ProcessError> {
        Ok(MountNamespace {
            file: self.namespace(MOUNT)?,
            process: self.pid,
        })
    }

    pub(super) fn namespace(&self, kind: Kind) -> Result<File, ProcessError> {
        let file = match namespace_of(&self.pidfd, kind) {
            // Before Linux 6.11 there is only the file, whose open may wait for a lock.
            Err(error)
                if matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::NOTTY | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS)
                ) =>
            {
                open_process_file(&ProcessFile::of(self.pid, kind.name)).map(File::from)
            }
            file => file,
        };
        self.checked(kind.name, file)
    }

    /// The result, if the process is still alive: the kernel does not reuse the pid of a live
    /// process.
    fn checked<T>(&self, name: &'static str, read: io::Result<T>) -> Result<T, ProcessError> {
        let pid = self.pid;
        if !self.is_alive() {
            return Err(ProcessError::Ended(pid));
        }
        read.map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => ProcessError::Blocked { pid, name },
            _ => ProcessError::Read { pid, name, source },
        })
    }

    /// Sends it a signal: pidfd_send_signal(2).
    ///
    /// # Errors
    /// If it ended, or may not be signalled.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        pidfd_send_signal(&self.pidfd, signal).map_err(|errno| ProcessError::Signal {
            pid: self.pid,
            signal: format!("{signal:?}"),
            source: errno.into(),
        })
    }
}

/// The numbers of the mount namespaces of these processes, in the same order. A process that blocks
/// its readers costs the others at most this time.
pub fn mount_namespaces(pids: &[u32], time: Duration) -> Vec<io::Result<u64>> {
    let number = |pid: &u32| {
        let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw);
        let pidfd = pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
        Ok(namespace_of(&pidfd, MOUNT)?.metadata()?.ino())
    };
    // Before Linux 6.11 there is only the file, which a separate process reads.
    if number(&std::process::id()).is_err() {
        let files = ProcessFile::of_each(pids, MOUNT.name);
        return process_files::inodes_within(time, &files);
    }
    pids.iter().map(number).collect()
}

impl AsFd for HeldProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

// Errors of reading a process of a container.

/// Why a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("process {0} ended")]
    Ended(u32),
    /// It could not be opened: pidfd_open(2).
    #[error("open process {pid}")]
    Open {
        pid: u32,
        #[source]
        source: io::Error,
    },
    /// A file of it could not be read.
    #[error("read {name} of process {pid}")]
    Read {
        pid: u32,
        /// The name below `/proc/PID`.
        name: &'static str,
        #[source]
        source: io::Error,
    },
    /// A file of the process could not be read within the time limit: the process holds a lock that
    /// the reader needs.
    #[error(
        "read {name} of process {pid}: the process blocks its readers, for example in an execve(2) that waits for a file server"
    )]
    Blocked {
        pid: u32,
        /// The name below `/proc/PID`.
        name: &'static str,
    },
    /// Its mount table was not accepted, for example because it is too large.
    #[error("parse the mount table of process {pid}")]
    Table {
        pid: u32,
        #[source]
        source: TableError,
    },
    /// The signal could not be sent.
    #[error("send {signal} to process {pid}")]
    Signal {
        pid: u32,
        signal: String,
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

// Opens a file below `/proc/PID` in a child, which passes the descriptor back: unix(7).
//
// The process can hold a lock that the open needs: see [`crate::process_files`]. Then the child is
// killed. The kill ends the child's wait for the lock.

/// Time limit of an open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit of an open whose child waits for a processor.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a file of a process to read it.
///
/// # Errors
/// The kernel's, and `TimedOut` if the process holds a lock.
pub fn open_process_file(file: &ProcessFile) -> io::Result<OwnedFd> {
    // A process can replace its descriptor with a fifo, whose open would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let (ours, theirs) = sockets()?;
    let child = ChildProcess::start(&[theirs.as_raw_fd()], || {
        let opened = openat(CWD, &file.path, flags, Mode::empty());
        let number = opened.as_ref().err().map(|errno| errno.raw_os_error());
        let opened = opened.as_ref().ok().map(AsFd::as_fd);
        // If the reader is gone, the answer is not needed.
        let _ = send(&theirs, &number, opened.as_slice());
    })?;
    drop(theirs);
    let until = Instant::now() + BUSY_TIMEOUT;
    let opened = match is_answered(&ours, child.pid, OPEN_TIMEOUT, until) {
        true => receive::<Option<i32>>(&ours),
        false => Err(io::ErrorKind::TimedOut.into()),
    };
    child.kill();
    let (number, mut descriptors) = opened?;
    match number {
        Some(number) => Err(io::Error::from_raw_os_error(number)),
        // There are too many open files.
        None => Ok(descriptors.pop().ok_or(Errno::MFILE)?),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::thread;

    use bindguard_testing::deny_call;
    use nix::libc;

    use super::*;

    #[test]
    fn only_a_process_that_is_gone_has_ended() {
        let own = std::process::id();
        let opened = thread::spawn(move || {
            let of_thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let of_thread = HeldProcess::open(of_thread);
            deny_call(libc::SYS_pidfd_open, nix::errno::Errno::EMFILE);
            (of_thread, HeldProcess::open(own))
        });
        let (of_thread, denied) = opened.join().unwrap();
        assert!(
            matches!(of_thread, Err(ProcessError::Ended(_))),
            "{of_thread:?}"
        );
        assert!(
            matches!(denied, Err(ProcessError::Open { .. })),
            "{denied:?}"
        );
        assert!(HeldProcess::open(own).is_ok());
    }
}
