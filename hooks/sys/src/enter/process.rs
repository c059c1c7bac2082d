//! A container's init process, held by a pidfd: what is read of it belongs to it and to no later process of the same pid.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use bindguard_core::mount_table::MountTable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::mountinfo::MountinfoError;

/// A process, which may end at any time.
#[derive(Debug)]
pub struct HeldProcess {
    pid: u32,
    pidfd: OwnedFd,
}

/// Why a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It ended.
    #[error("process {0} ended")]
    Ended(u32),
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
    /// Its mount table could not be parsed.
    #[error("parse the mount table of process {pid}")]
    Table {
        /// Its pid.
        pid: u32,
        /// The parser's error.
        #[source]
        source: MountinfoError,
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
}

impl HeldProcess {
    /// Opens a process by its pid.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] if there is none.
    pub fn open(pid: u32) -> Result<Self, ProcessError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProcessError::Ended(pid))?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|_| ProcessError::Ended(pid))?;
        Ok(Self { pid, pidfd })
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready == 0)
    }

    /// The text of a file below `/proc/PID`.
    ///
    /// # Errors
    /// If it cannot be read, or the process ended.
    pub fn read(&self, name: &'static str) -> Result<Vec<u8>, ProcessError> {
        let text = read_at_once(format!("/proc/{}/{name}", self.pid));
        // Read first, then checked: while the process lived, its pid was no other's.
        if !self.is_alive() {
            return Err(ProcessError::Ended(self.pid));
        }
        text.map_err(|source| ProcessError::Read { pid: self.pid, name, source })
    }

    /// The file name of its program, by the link `exe` alone: the program's filesystem is not queried.
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub fn program_name(&self) -> Result<Vec<u8>, ProcessError> {
        let name = "exe";
        let link = fs::read_link(format!("/proc/{}/{name}", self.pid));
        if !self.is_alive() {
            return Err(ProcessError::Ended(self.pid));
        }
        let link = link.map_err(|source| ProcessError::Read { pid: self.pid, name, source })?;
        Ok(link.file_name().unwrap_or_default().as_bytes().to_vec())
    }

    /// The time of its start, in ticks since the boot: field 22 of proc_pid_stat(5).
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub fn start_time(&self) -> Result<u64, ProcessError> {
        let name = "stat";
        let text = String::from_utf8_lossy(&self.read(name)?).into_owned();
        // The name of the program may have spaces and parentheses.
        let field = text.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)?.parse().ok());
        let invalid = || ProcessError::Read { pid: self.pid, name, source: io::ErrorKind::InvalidData.into() };
        field.ok_or_else(invalid)
    }

    /// True if its mount namespace is that of the calling thread. No container of runc or crun has such a process; the
    /// virtual machine of a sandbox such as Kata has.
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub fn shares_own_mounts(&self) -> Result<bool, ProcessError> {
        self.shares("ns/mnt")
    }

    /// True if its user namespace is that of the calling thread.
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub(super) fn shares_own_users(&self) -> Result<bool, ProcessError> {
        self.shares("ns/user")
    }

    fn shares(&self, name: &'static str) -> Result<bool, ProcessError> {
        let namespace = |path: String| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
        let theirs = namespace(format!("/proc/{}/{name}", self.pid));
        if !self.is_alive() {
            return Err(ProcessError::Ended(self.pid));
        }
        let failed = |source| ProcessError::Read { pid: self.pid, name, source };
        Ok(theirs.map_err(failed)? == namespace(format!("/proc/thread-self/{name}")).map_err(failed)?)
    }

    /// The mounts that it sees.
    ///
    /// # Errors
    /// As [`HeldProcess::read`], and if a line is no mount.
    pub fn mounts(&self) -> Result<MountTable, ProcessError> {
        let text = self.read("mountinfo")?;
        let parsed = MountTable::from_mountinfo(&text);
        parsed.map_err(|error| ProcessError::Table { pid: self.pid, source: error.into() })
    }

    /// Its user namespace, for an idmapped mount.
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub fn user_namespace(&self) -> Result<File, ProcessError> {
        let name = "ns/user";
        let file = File::open(format!("/proc/{}/{name}", self.pid));
        if !self.is_alive() {
            return Err(ProcessError::Ended(self.pid));
        }
        file.map_err(|source| ProcessError::Read { pid: self.pid, name, source })
    }

    /// Locks its mount namespace against other refreshes: flock(2) on the namespace's own file. `None` if another process has
    /// the lock. A container can lock itself, and only itself.
    ///
    /// # Errors
    /// As [`HeldProcess::read`].
    pub fn try_lock_mounts(&self) -> Result<Option<MountsLock>, ProcessError> {
        let name = "ns/mnt";
        let failed = |source| ProcessError::Read { pid: self.pid, name, source };
        let file = File::open(format!("/proc/{}/{name}", self.pid));
        if !self.is_alive() {
            return Err(ProcessError::Ended(self.pid));
        }
        let file = file.map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(MountsLock(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(failed(errno.into())),
        }
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

/// The content of a file of procfs, which has no size: a buffer that holds most of them saves a dozen short reads.
fn read_at_once(path: String) -> io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(16 * 1024);
    File::open(path)?.read_to_end(&mut text)?;
    Ok(text)
}

/// A lock that ends with this value, also if a process that was forked meanwhile has a copy of the descriptor.
#[derive(Debug)]
pub struct MountsLock(File);

impl Drop for MountsLock {
    fn drop(&mut self) {
        // Closing the file unlocks it as well, but only once every copy is closed.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl AsFd for HeldProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}
