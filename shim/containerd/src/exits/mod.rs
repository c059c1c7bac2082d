//! Who waits for whom.
//!
//! The shim is a subreaper: what the runtime leaves behind, a container's init first of all, becomes its child. Every
//! process it knows is waited for by its own pidfd; there is no `waitpid(-1)`, which would race with each of those
//! waits and with the ones of `tokio::process`. What nobody knows is reaped by `orphans`.

mod orphans;
mod pidfd;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub(crate) use orphans::reap_on_sigchld;
pub(crate) use pidfd::{Exit, WatchError, Watched};

/// The processes somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Exits {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    known: HashSet<u32>,
    holds: usize,
}

impl Exits {
    /// Keeps the orphans' reaper off while the runtime runs: until its pid-file is read, nobody can tell a container's
    /// init, dead already perhaps, from an orphan.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.inner().holds += 1;
        Hold(Arc::clone(self))
    }

    /// Marks a pid as waited for until the answer is dropped.
    pub(crate) fn know(self: &Arc<Self>, pid: u32) -> Known {
        self.inner().known.insert(pid);
        Known { exits: Arc::clone(self), pid }
    }

    fn may_reap(&self) -> bool {
        self.inner().holds == 0
    }

    fn is_known(&self, pid: u32) -> bool {
        self.inner().known.contains(&pid)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While it lives, orphans are left alone.
#[derive(Debug)]
pub(crate) struct Hold(Arc<Exits>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.inner().holds -= 1;
    }
}

/// While it lives, this pid is no orphan.
#[derive(Debug)]
pub(crate) struct Known {
    exits: Arc<Exits>,
    pid: u32,
}

impl Drop for Known {
    fn drop(&mut self) {
        self.exits.inner().known.remove(&self.pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_wait_for_the_last_hold() {
        let exits = Arc::new(Exits::default());
        let (one, two) = (exits.hold(), exits.hold());
        drop(one);
        assert!(!exits.may_reap());
        drop(two);
        assert!(exits.may_reap());
    }

    #[test]
    fn a_pid_is_known_as_long_as_somebody_waits() {
        let exits = Arc::new(Exits::default());
        let known = exits.know(7);
        assert!(exits.is_known(7));
        drop(known);
        assert!(!exits.is_known(7));
    }
}
