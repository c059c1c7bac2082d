//! Makes a write beyond RLIMIT_FSIZE return EFBIG.
//!
//! The kernel sends SIGXFSZ first, which ends a process that does not ignore it (setrlimit(2)).
//! Guards inherit a service manager's `LimitFSIZE` from containerd. The guard becomes the runtime
//! by exec, and an ignored signal would stay ignored there. So the guard ignores SIGXFSZ only
//! during a write.

use nix::sys::signal::Signal;

use crate::signal_action::{FormerAction, ignore, restore};

/// Runs `work`, in which a write beyond the limit is an error.
pub fn with_size_errors<T>(work: impl FnOnce() -> T) -> T {
    let _ignored = Ignored(ignore(Signal::SIGXFSZ));
    work()
}

/// The previous action of the signal.
struct Ignored(Option<FormerAction>);

impl Drop for Ignored {
    fn drop(&mut self) {
        if let Some(former) = &self.0 {
            restore(Signal::SIGXFSZ, former);
        }
    }
}
