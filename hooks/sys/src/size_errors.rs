//! Writes that answer EFBIG where RLIMIT_FSIZE is reached.
//!
//! The kernel sends SIGXFSZ first, which ends a process that does not ignore it (setrlimit(2)). A service manager's
//! `LimitFSIZE` comes to guards from containerd. The guard becomes the runtime by exec, and an ignored signal would stay ignored
//! there: so it is ignored for the time of a write only.
#![allow(unsafe_code)]

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Does `work`, in which a write beyond the limit is an error.
pub fn with_size_errors<T>(work: impl FnOnce() -> T) -> T {
    let _ignored = Ignored::begin();
    work()
}

/// The signal's action as it was.
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
            // SAFETY: it is the action that the process had; no program of bindguard's has a handler for this signal.
            let _ = unsafe { sigaction(Signal::SIGXFSZ, before) };
        }
    }
}
