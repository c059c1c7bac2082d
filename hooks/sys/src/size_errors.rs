//! Makes a write beyond RLIMIT_FSIZE return EFBIG.
//!
//! The kernel sends SIGXFSZ to the writing thread first, which ends a process that does not ignore
//! it (setrlimit(2)). Guards inherit a service manager's `LimitFSIZE` from containerd. An ignored
//! signal belongs to the whole process: another thread may restore its action in the middle of a
//! write, and a runtime or a child would inherit it by exec. So the thread blocks the signal for
//! the time of the write.

use std::io;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};

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

/// The former signal mask of the thread.
struct FormerMask(SigSet);

impl Drop for FormerMask {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}
