//! The exits of processes, and their waiters.
//!
//! The shim is a subreaper: processes that outlive the runtime, above all a container's init,
//! become its children. Each known process is waited for by its own pidfd. There is no
//! `waitpid(-1)`, which would race with these waits and with `tokio::process`. [`reap_on_sigchld`]
//! reaps every unknown zombie at once.
//!
//! The inits of containers and the execs become known too late. Such a process is the shim's child
//! as soon as the parent has ended, but the shim reads the pid only after the runtime's call. If
//! such a process ends before, the reaper treats it as an orphan. So the statuses of reaped orphans
//! are kept while such a call runs: see [`PendingProcess`].

mod pidfd;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use nix::libc::SIGCHLD;
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, waitid};

pub use pidfd::{Exit, Watched};
use pidfd::{kill_child, status_of};

use crate::blocking::lock;
use crate::signals::Signals;
use crate::step::StepError;

/// The largest number of statuses: a call may hang for ever in a pod whose containers leave orphans
/// all the time. Beyond it the oldest status is dropped. If that was a call's process, it is
/// reported with a lost status.
const MAX_STATUSES: usize = 1024;

/// The processes that have waiters.
#[derive(Debug, Default)]
pub struct Exits {
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
    pub fn pending_process(self: &Arc<Self>) -> PendingProcess {
        let since = self.inner().statuses.begin_call();
        PendingProcess {
            exits: Arc::clone(self),
            since,
        }
    }

    /// Marks a pid as waited for until the result is dropped.
    pub fn know(self: &Arc<Self>, pid: u32) -> KnownPid {
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
        lock(&self.inner)
    }
}

/// A process that a running call of the runtime makes. While this value exists, the statuses of
/// reaped orphans are kept: the process may be among them.
#[derive(Debug)]
pub struct PendingProcess {
    exits: Arc<Exits>,
    since: u64,
}

impl PendingProcess {
    /// Watches the process, after the runtime has reported its pid. This works also after the
    /// process was reaped. If it cannot be watched it is killed: its client gets an error.
    pub fn watch(&self, pid: u32) -> Result<Watched, StepError> {
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
pub struct KnownPid {
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

/// The statuses of reaped orphans, for as long as an orphan may be the process of a running call.
///
/// Calls and orphans are numbered in the order of their arrival. An orphan that was reaped before a
/// call began is not that call's process, whatever its pid.
#[derive(Debug, Default)]
struct Statuses {
    last: u64,
    calls: BTreeSet<u64>,
    kept: VecDeque<OrphanStatus>,
}

#[derive(Debug)]
struct OrphanStatus {
    number: u64,
    pid: u32,
    exit: Exit,
}

impl Statuses {
    /// Returns the call's number.
    fn begin_call(&mut self) -> u64 {
        self.last += 1;
        self.calls.insert(self.last);
        self.last
    }

    /// Drops the statuses that no running call may need.
    fn end_call(&mut self, number: u64) {
        self.calls.remove(&number);
        match self.calls.first() {
            Some(oldest) => {
                let needless = self.kept.partition_point(|kept| kept.number < *oldest);
                self.kept.drain(..needless);
            }
            // Frees the memory as well.
            None => self.kept = VecDeque::new(),
        }
    }

    /// Keeps the status of an orphan, if a call is running.
    fn keep(&mut self, pid: u32, exit: Exit) {
        if self.calls.is_empty() {
            return;
        }
        if self.kept.len() >= MAX_STATUSES {
            self.kept.pop_front();
        }
        self.last += 1;
        self.kept.push_back(OrphanStatus {
            number: self.last,
            pid,
            exit,
        });
    }

    /// The status of the last orphan of that pid that was reaped since a call began.
    fn find(&self, since: u64, pid: u32) -> Option<Exit> {
        let mut newest_first = self.kept.iter().rev();
        let found = newest_first.find(|kept| kept.pid == pid)?;
        (found.number > since).then_some(found.exit)
    }
}

/// Reaps zombies that have no waiter, for as long as the shim lives.
///
/// A subreaper inherits unknown processes: leftovers of a container in the host's pid namespace, or
/// children of a runtime's hook. Orphans are reaped at once, even during a call of the runtime: a
/// zombie counts against its container's pids limit, and the call may hang for ever. On SIGCHLD the
/// task reads the kernel's list of the shim's children and reaps each dead, unknown child. The
/// shim's own children are known before this task can see them, because their starter runs on the
/// same thread.
pub async fn reap_on_sigchld(exits: Arc<Exits>) {
    let mut children = match Signals::register(&[SIGCHLD]) {
        Ok(children) => children,
        Err(error) => {
            return tracing::error!(%error, "orphans will stay zombies: no SIGCHLD");
        }
    };
    while children.next().await.is_ok() {
        // Usually the child's own waiter was faster, and no zombie is left.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if matches!(waitid(WaitId::All, options), Ok(None) | Err(Errno::CHILD)) {
            continue;
        }
        for pid in child_pids() {
            if !exits.is_known(pid) {
                reap(pid, &exits);
            }
        }
    }
}

/// The children of the event loop's thread, including zombies.
pub fn child_pids() -> Vec<u32> {
    children_of(getpid())
}

/// The children of a thread: a child belongs to the thread that forked it. The kernel gives orphans
/// to a process's first thread (find_new_reaper in kernel/exit.c), the event loop's thread. Threads
/// for FUSE and for mappings of ids in rootfs start and reap children of their own.
fn children_of(thread: Pid) -> Vec<u32> {
    let path = format!("/proc/self/task/{}/children", thread.as_raw_pid());
    let list = fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Reaps the process if it is dead, and keeps the status for a call that may have started the
/// process.
fn reap(pid: u32, exits: &Exits) {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    match waitid(WaitId::Pid(raw), options) {
        Ok(Some(status)) => {
            let exit = Exit {
                status: status_of(&status),
                at: SystemTime::now(),
            };
            exits.inner().statuses.keep(pid, exit);
            tracing::debug!(pid, "reaped an orphan");
        }
        Ok(None) => {}
        Err(error) => tracing::debug!(pid, %error, "an orphan was gone already"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::SystemTime;

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
            reap(pid, &exits);
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

    fn exit(status: u32) -> Exit {
        Exit {
            status,
            at: SystemTime::now(),
        }
    }

    fn found(statuses: &Statuses, since: u64, pid: u32) -> Option<u32> {
        statuses.find(since, pid).map(|exit| exit.status)
    }

    #[test]
    fn a_call_finds_orphans_reaped_since_it_began() {
        let mut statuses = Statuses::default();
        statuses.keep(7, exit(1));
        let early = statuses.begin_call();
        statuses.keep(7, exit(2));
        let late = statuses.begin_call();
        assert_eq!(
            (found(&statuses, early, 7), found(&statuses, late, 7)),
            (Some(2), None)
        );
        statuses.keep(7, exit(3));
        assert_eq!(
            (found(&statuses, early, 7), found(&statuses, late, 7)),
            (Some(3), Some(3))
        );
        statuses.end_call(early);
        assert_eq!(
            (statuses.kept.len(), found(&statuses, late, 7)),
            (1, Some(3))
        );
        statuses.end_call(late);
        assert_eq!((statuses.kept.len(), statuses.kept.capacity()), (0, 0));
    }

    #[test]
    fn a_hanging_call_keeps_a_limited_number_of_statuses() {
        let mut statuses = Statuses::default();
        let hanging = statuses.begin_call();
        for pid in 0..10_000 {
            statuses.keep(pid, exit(pid));
        }
        assert_eq!(statuses.kept.len(), MAX_STATUSES);
        assert_eq!(
            (
                found(&statuses, hanging, 0),
                found(&statuses, hanging, 9999)
            ),
            (None, Some(9999))
        );
    }

    #[test]
    fn a_child_is_listed_for_the_thread_that_forked_it() {
        let mut child = Command::new("sleep").arg("10").spawn().unwrap();
        assert!(children_of(rustix::thread::gettid()).contains(&child.id()));
        let elsewhere = std::thread::spawn(|| children_of(rustix::thread::gettid()))
            .join()
            .unwrap();
        assert!(!elsewhere.contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
