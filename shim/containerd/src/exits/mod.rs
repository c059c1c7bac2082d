//! The exits of processes, and their waiters.
//!
//! The shim is a subreaper: processes that outlive the runtime, above all a container's init,
//! become its children. Each known process is waited for by its own pidfd. There is no
//! `waitpid(-1)`, which would race with these waits and with `tokio::process`. The reaper in
//! `orphans` reaps every unknown zombie at once.
//!
//! The inits of containers and the execs become known too late. Such a process is the shim's child
//! as soon as the parent has ended, but the shim reads the pid only after the runtime's call. If
//! such a process ends before, the reaper treats it as an orphan. So the statuses of reaped orphans
//! are kept while such a call runs: see [`PendingProcess`].

mod orphans;
mod pidfd;
mod statuses;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use orphans::{child_pids, reap_on_sigchld};
use pidfd::kill_child;
pub(crate) use pidfd::{Exit, WatchError, Watched};
use statuses::Statuses;

/// The processes that have waiters.
#[derive(Debug, Default)]
pub(crate) struct Exits {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The number of waiters by pid: a pid may be used again before the last waiter for its old
    /// process is gone.
    known: HashMap<u32, usize>,
    statuses: Statuses,
}

impl Exits {
    /// Begins a call of the runtime that makes a process.
    pub(crate) fn pending_process(self: &Arc<Self>) -> PendingProcess {
        let since = self.inner().statuses.begin_call();
        PendingProcess {
            exits: Arc::clone(self),
            since,
        }
    }

    /// Marks a pid as waited for until the result is dropped.
    pub(crate) fn know(self: &Arc<Self>, pid: u32) -> KnownPid {
        *self.inner().known.entry(pid).or_default() += 1;
        KnownPid {
            exits: Arc::clone(self),
            pid,
        }
    }

    fn is_known(&self, pid: u32) -> bool {
        self.inner().known.contains_key(&pid)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that a running call of the runtime makes. While this value exists, the statuses of
/// reaped orphans are kept: the process may be among them.
#[derive(Debug)]
pub(crate) struct PendingProcess {
    exits: Arc<Exits>,
    since: u64,
}

impl PendingProcess {
    /// Watches the process, after the runtime has reported its pid. This works also after the
    /// process was reaped. If it cannot be watched it is killed: its client gets an error.
    pub(crate) fn watch(&self, pid: u32) -> Result<Watched, WatchError> {
        match Watched::open(pid, &self.exits) {
            Ok(watched) if watched.is_child() => Ok(watched),
            // The process is gone, or a new process has the pid.
            other => match self.exits.inner().statuses.find(self.since, pid) {
                Some(exit) => Ok(Watched::reaped(pid, exit)),
                None => other.inspect_err(|_| kill_child(pid)),
            },
        }
    }
}

impl Drop for PendingProcess {
    fn drop(&mut self) {
        self.exits.inner().statuses.end_call(self.since);
    }
}

/// While this value exists, the process with this pid is no orphan.
#[derive(Debug)]
pub(crate) struct KnownPid {
    exits: Arc<Exits>,
    pid: u32,
}

impl Drop for KnownPid {
    fn drop(&mut self) {
        if let Entry::Occupied(mut waiting) = self.exits.inner().known.entry(self.pid) {
            *waiting.get_mut() -= 1;
            if *waiting.get() == 0 {
                waiting.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_pid_is_known_while_it_has_a_waiter() {
        let exits = Arc::new(Exits::default());
        let known = exits.know(7);
        assert!(exits.is_known(7));
        drop(known);
        assert!(!exits.is_known(7));
    }

    /// Issue 14: the deletion of an old exec made an orphan of a new exec with the same pid, whose
    /// exit code was lost.
    #[test]
    fn a_pid_that_is_used_again_is_known_by_its_new_process() {
        let exits = Arc::new(Exits::default());
        let (old, new) = (exits.know(7), exits.know(7));
        drop(old);
        assert!(exits.is_known(7));
        drop(new);
        assert!(!exits.is_known(7));
    }

    /// An undeleted ended process must not keep a new process with the same pid from being reaped.
    #[tokio::test]
    async fn a_reaped_pid_is_free() {
        let exits = Arc::new(Exits::default());
        let pid = Command::new("true").spawn().unwrap().id();
        let watched = Watched::open(pid, &exits).unwrap();
        assert!(exits.is_known(pid));
        watched.exit().await;
        assert!(!exits.is_known(pid));
    }

    #[tokio::test]
    async fn a_process_that_was_reaped_before_its_call_ended_keeps_its_status() {
        let exits = Arc::new(Exits::default());
        let pending = exits.pending_process();
        let pid = Command::new("sh")
            .args(["-c", "exit 42"])
            .spawn()
            .unwrap()
            .id();
        while exits.inner().statuses.find(0, pid).is_none() {
            orphans::reap(pid, &exits);
        }
        let watched = pending.watch(pid).unwrap();
        assert!(watched.has_ended() && watched.signal(9).is_err());
        assert_eq!(watched.exit().await.status, 42);
        drop(pending);
        assert!(
            exits.pending_process().watch(pid).is_err(),
            "the pid may be another's by now"
        );
    }
}
