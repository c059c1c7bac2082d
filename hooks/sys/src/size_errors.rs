//! Makes a write beyond RLIMIT_FSIZE return EFBIG, and a write to a nearly full filesystem ENOSPC.
//!
//! The kernel sends SIGXFSZ to the writing thread first, which ends a process that does not ignore
//! it (setrlimit(2)). Guards inherit a service manager's `LimitFSIZE` from containerd. An ignored
//! signal belongs to the whole process: another thread may restore its action in the middle of a
//! write, and a runtime or a child would inherit it by exec. So the thread blocks the signal for
//! the time of the write.

use std::fs::File;
use std::io;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use rustix::io::Errno;

/// A runtime needs some 30 KiB for the state of a container, and a multiple of a long spec.
const ROOM_OF_A_RUNTIME: u64 = 128 << 10;

/// Runs `work`, in which a write of the calling thread beyond the limit is an error.
///
/// # Errors
/// Those of the work.
pub fn with_size_errors<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let signal = SigSet::from(Signal::SIGXFSZ);
    let former = signal
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map(FormerMask);
    let result = work();
    // A thread has the same signal pending only once. The second signal makes sure that there is one
    // to take, so the wait ends at once.
    if result.is_err() && former.is_ok() && raise(Signal::SIGXFSZ).is_ok() {
        let _ = signal.wait();
    }
    result
}

/// Checks that a file's filesystem keeps room for a runtime: the caller's write is worth less than a
/// create.
///
/// # Errors
/// ENOSPC if the filesystem is nearly full.
pub fn leave_room(file: &File) -> io::Result<()> {
    let found = rustix::fs::fstatvfs(file)?;
    // a filesystem without a limit has no blocks
    match found.f_blocks > 0 && found.f_bavail * found.f_frsize < ROOM_OF_A_RUNTIME {
        true => Err(Errno::NOSPC.into()),
        false => Ok(()),
    }
}

/// The former signal mask of the thread.
struct FormerMask(SigSet);

impl Drop for FormerMask {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}
