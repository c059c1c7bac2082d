//! Makes a write beyond RLIMIT_FSIZE return EFBIG.
//!
//! The kernel sends SIGXFSZ first, which ends a process that does not ignore it (setrlimit(2)).
//! Guards inherit a service manager's `LimitFSIZE` from containerd. The guard becomes the runtime
//! by exec, and an ignored signal would stay ignored there. So it is ignored only during a write.
#![allow(unsafe_code)]

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Runs `work`, in which a write beyond the limit is an error.
pub fn with_size_errors<T>(work: impl FnOnce() -> T) -> T {
    let _ignored = Ignored::begin();
    work()
}

/// The previous action of the signal.
struct Ignored(Option<SigAction>);

impl Ignored {
    fn begin() -> Self {
        let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
        // SAFETY: to ignore a signal runs no code.
        Self(unsafe { sigaction(Signal::SIGXFSZ, &ignore) }.ok())
    }
}

impl Drop for Ignored {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: it is the action that the process had; no program of bindguard's has a
            // handler for this signal.
            let _ = unsafe { sigaction(Signal::SIGXFSZ, before) };
        }
    }
}
