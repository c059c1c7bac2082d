//! Makes a write beyond RLIMIT_FSIZE return EFBIG.
//!
//! The kernel sends SIGXFSZ to the writing thread first, which ends a process that does not ignore
//! it (setrlimit(2)). Guards inherit a service manager's `LimitFSIZE` from containerd. An ignored
//! signal belongs to the whole process: another thread may restore its action in the middle of a
//! write, and a runtime or a child would inherit it by exec. So the thread blocks the signal for
//! the time of the write.

use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};

/// Runs `work`, in which a write of the calling thread beyond the limit is an error.
pub fn with_size_errors<T>(work: impl FnOnce() -> T) -> T {
    let signal = SigSet::from(Signal::SIGXFSZ);
    let _blocked = Blocked {
        signal,
        former: signal.thread_swap_mask(SigmaskHow::SIG_BLOCK).ok(),
    };
    work()
}

/// The blocked signal, and the former mask of the thread.
struct Blocked {
    signal: SigSet,
    former: Option<SigSet>,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let Some(former) = &self.former else { return };
        // A thread has the same signal pending only once. The second one makes sure that there is
        // one to take, so the wait ends at once.
        if raise(Signal::SIGXFSZ).is_ok() {
            let _ = self.signal.wait();
        }
        let _ = former.thread_set_mask();
    }
}
