//! One guard at a time per pod.
//!
//! The lock is flock(2) on the pod's own directory: it leaves no file behind, and the kernel takes it back from a guard
//! that is killed. The kubelet takes no such lock; against it the swap itself is safe.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

const POLL: Duration = Duration::from_millis(2);

/// Held until it is dropped.
#[derive(Debug)]
pub struct PodLock {
    _directory: OwnedFd,
}

/// Why the lock was not had.
#[derive(Debug, thiserror::Error)]
pub enum PodLockError {
    /// The pod's directory could not be opened or locked.
    #[error("lock {}", directory.display())]
    Lock {
        /// The pod's directory.
        directory: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Somebody else kept it for too long.
    #[error("lock {}: another guard held it for {} ms", directory.display(), waited.as_millis())]
    Busy {
        /// The pod's directory.
        directory: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
}

impl PodLock {
    /// Locks a pod's directory, waiting at most `patience`.
    ///
    /// # Errors
    /// When the directory cannot be opened or locked, or somebody else keeps it.
    pub fn acquire(directory: &Path, patience: Duration) -> Result<Self, PodLockError> {
        let failed = |errno: Errno| PodLockError::Lock { directory: directory.to_owned(), source: errno.into() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(failed)?;
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _directory: fd }),
                Err(Errno::WOULDBLOCK) if start.elapsed() < patience => thread::sleep(POLL),
                Err(Errno::WOULDBLOCK) => {
                    return Err(PodLockError::Busy { directory: directory.to_owned(), waited: patience });
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
    }
}
