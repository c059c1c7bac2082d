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
//!
//! When the pidfd becomes readable, waitid(2) with P_PIDFD takes the status of exactly this
//! process, never of a later process with the same pid. A pidfd can also be opened for a zombie.
//! The orphans' reaper forgets a process when it is reaped: then the kernel may reuse the pid.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use nix::libc::{ESRCH, SIGCHLD};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, getpid, kill_process, pidfd_open,
    waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::kernel::{self, Signals};
use crate::work::{Result, failed, lock};

/// The largest number of statuses: a call may hang for ever in a pod whose containers leave orphans
/// all the time. Beyond it the oldest status is dropped. If that was a call's process, it is
/// reported with a lost status.
const MAX_STATUSES: usize = 1024;

/// A pod's containers start and end within less time, and the next container would use the pages of
/// memory again.
const QUIET_TIME: Duration = Duration::from_secs(1);

/// The processes that have waiters.
#[derive(Default)]
pub struct Exits {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    known: HashMap<u32, Weak<u32>>,
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

    /// Marks a pid as waited for until the last clone of the result is dropped.
    pub fn know(&self, pid: u32) -> KnownPid {
        let mut inner = self.inner();
        inner.known.retain(|_, known| known.strong_count() > 0);
        if let Some(known) = inner.known.get(&pid).and_then(Weak::upgrade) {
            return known;
        }
        let known = Arc::new(pid);
        inner.known.insert(pid, Arc::downgrade(&known));
        known
    }

    fn is_known(&self, pid: u32) -> bool {
        let inner = self.inner();
        let known = inner.known.get(&pid);
        known.is_some_and(|known| known.strong_count() > 0)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

/// A process that a running call of the runtime makes. While this value exists, the statuses of
/// reaped orphans are kept: the process may be among them.
pub struct PendingProcess {
    exits: Arc<Exits>,
    since: u64,
}

impl PendingProcess {
    /// Watches the process, after the runtime has reported its pid. This works also after the
    /// process was reaped. If it cannot be watched it is killed: its client gets an error.
    pub fn watch(&self, pid: u32) -> Result<Watched> {
        match Watched::known(self.exits.know(pid)) {
            Ok(watched) if watched.is_child() => Ok(watched),
            // The process is gone, or a new process has the pid.
            other => match self.exits.inner().statuses.find(self.since, pid) {
                Some(exit) => Ok(Watched {
                    pid,
                    process: WatchedState::Reaped(exit),
                }),
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

/// While this value exists, the process with this pid is no orphan. A pid may be used again before
/// the last waiter for its old process is gone.
pub type KnownPid = Arc<u32>;

/// The statuses of reaped orphans, for as long as an orphan may be the process of a running call.
///
/// Calls and orphans are numbered in the order of their arrival. An orphan that was reaped before a
/// call began is not that call's process, whatever its pid.
#[derive(Default)]
struct Statuses {
    last: u64,
    calls: BTreeSet<u64>,
    kept: VecDeque<OrphanStatus>,
}

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

/// Reaps zombies that have no waiter, for as long as the shim lives. Returns unused memory whenever no
/// child has ended for a moment.
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
            return log::error!(
                error:%;
                "orphans will stay zombies, and memory of a burst will be kept: no SIGCHLD"
            );
        }
    };
    let mut arrived = children.next().await;
    while arrived.is_ok() {
        // Usually the child's own waiter was faster, and no zombie is left.
        if !matches!(waitid(WaitId::All, LOOK), Ok(None) | Err(Errno::CHILD)) {
            for pid in children_of(getpid()) {
                if !exits.is_known(pid) {
                    reap(pid, &exits);
                }
            }
        }
        arrived = match timeout(QUIET_TIME, children.next()).await {
            Ok(arrived) => arrived,
            Err(_) => {
                kernel::return_unused_memory();
                children.next().await
            }
        };
    }
}

/// The children of a thread, including zombies: a child belongs to the thread that forked it. The kernel gives orphans
/// to a process's first thread (find_new_reaper in kernel/exit.c), the event loop's thread. Threads
/// for FUSE and for mappings of ids in rootfs start and reap children of their own.
pub fn children_of(thread: Pid) -> Vec<u32> {
    let path = format!("/proc/self/task/{}/children", thread.as_raw_pid());
    let list = fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Reaps the process if it is dead, and keeps the status for a call that may have started the
/// process.
fn reap(pid: u32, exits: &Exits) {
    let Some(raw) = kernel_pid(pid) else {
        return;
    };
    match waitid(WaitId::Pid(raw), REAP) {
        Ok(Some(status)) => {
            let exit = Exit::now(status_of(&status));
            exits.inner().statuses.keep(pid, exit);
            log::debug!(pid:%; "reaped an orphan");
        }
        Ok(None) => {}
        Err(error) => log::debug!(pid:%, error:%; "an orphan was gone already"),
    }
}

/// The status that containerd gets when the real status is lost, as with Go's shim.
const LOST_STATUS: u32 = 255;

const REAP: WaitIdOptions = WaitIdOptions::EXITED.union(WaitIdOptions::NOHANG);
/// For a look at a child that leaves it to be reaped.
const LOOK: WaitIdOptions = REAP.union(WaitIdOptions::NOWAIT);

/// The status and the time of a process's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 plus the number of the signal that ended it.
    pub status: u32,
    /// The time at which the shim learned of it.
    pub at: SystemTime,
}

impl Exit {
    pub fn now(status: u32) -> Self {
        let at = SystemTime::now();
        Self { status, at }
    }
}

/// A child, or a process that becomes a child when the runtime ends.
pub struct Watched {
    pub pid: u32,
    process: WatchedState,
}

enum WatchedState {
    /// Not reaped yet by `exit`.
    Present {
        pidfd: AsyncFd<OwnedFd>,
        known: Mutex<Option<KnownPid>>,
    },
    /// The orphans' reaper reaped it before its pid was known.
    Reaped(Exit),
}

impl Watched {
    /// Opens a process. Its pid must be known before the process can have been reaped: until then the
    /// kernel does not reuse the pid.
    pub fn known(known: KnownPid) -> Result<Self> {
        let step = format!("watch process {known}");
        Self::watch(known).map_err(failed(step))
    }

    /// A child that was just started. If it cannot be watched it is killed, and becomes an orphan.
    pub fn child(pid: u32, exits: &Arc<Exits>) -> io::Result<Self> {
        Self::watch(exits.know(pid)).inspect_err(|_| kill_child(pid))
    }

    fn watch(known: KnownPid) -> io::Result<Self> {
        let pid = *known;
        let raw = kernel_pid(pid);
        let raw = raw.ok_or(io::ErrorKind::InvalidInput)?;
        let fd = pidfd_open(raw, PidfdFlags::empty())?;
        Ok(Self {
            pid,
            process: WatchedState::Present {
                pidfd: kernel::watch(fd, Interest::READABLE)?,
                known: Mutex::new(Some(known)),
            },
        })
    }

    /// True if it is a child of this process, not yet reaped.
    pub fn is_child(&self) -> bool {
        let WatchedState::Present { pidfd, .. } = &self.process else {
            return false;
        };
        let looked = waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), LOOK);
        !matches!(looked, Err(Errno::CHILD))
    }

    /// Sends a signal; it cannot reach a later process with the same pid.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        match &self.process {
            WatchedState::Present { pidfd, .. } => {
                kernel::send_signal(pidfd.get_ref().as_fd(), signal)
            }
            WatchedState::Reaped(_) => Err(io::Error::from_raw_os_error(ESRCH)),
        }
    }

    /// True if the process has ended, reaped or not: its pidfd is readable from then on.
    pub fn has_ended(&self) -> bool {
        let WatchedState::Present { pidfd, .. } = &self.process else {
            return true;
        };
        let mut fds = [PollFd::new(pidfd.get_ref(), PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    /// Waits until the process has ended and reaps it.
    pub async fn exit(&self) -> Exit {
        let (pidfd, known) = match &self.process {
            WatchedState::Present { pidfd, known } => (pidfd, known),
            WatchedState::Reaped(exit) => return *exit,
        };
        let status = loop {
            let mut ready = match pidfd.readable().await {
                Ok(ready) => ready,
                Err(error) => {
                    log::error!(pid:% = self.pid, error:%; "cannot wait for a process");
                    break LOST_STATUS;
                }
            };
            match waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), REAP) {
                Ok(Some(status)) => break status_of(&status),
                // Woken too early; the kernel will wake this again.
                Ok(None) => ready.clear_ready(),
                Err(error) => {
                    // ECHILD: the process is not the shim's child, so the kernel reports the end
                    // without the status.
                    log::warn!(pid:% = self.pid, error:%; "the exit status of a process is lost");
                    break LOST_STATUS;
                }
            }
        };
        lock(known).take();
        Exit::now(status)
    }
}

/// `None` for a number that is no pid.
pub fn kernel_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// Kills a process that has no pidfd. A child that is not reaped yet still has its pid; any other
/// process is left alone.
pub fn kill_child(pid: u32) {
    if let Some(raw) = kernel_pid(pid)
        && waitid(WaitId::Pid(raw), LOOK).is_ok()
    {
        let _ = kill_process(raw, Signal::KILL);
    }
}

/// The exit code, or 128 plus the signal.
pub fn status_of(status: &WaitIdStatus) -> u32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code.unsigned_abs(),
        (None, Some(signal)) => 128 + signal.unsigned_abs(),
        (None, None) => LOST_STATUS,
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
        let watched = Watched::known(exits.know(pid)).unwrap();
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

#[cfg(test)]
mod pidfd_tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// A child of which only the pid is kept: the test waits for it like the shim.
    fn child(program: &str, args: &[&str]) -> u32 {
        let mut command = std::process::Command::new(program);
        command.args(args).spawn().map(|child| child.id()).unwrap()
    }

    async fn status_of(script: &str, wait_first: bool) -> u32 {
        let exits = Arc::new(Exits::default());
        let pid = child("sh", &["-c", script]);
        if wait_first {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Watched::known(exits.know(pid)).unwrap().exit().await.status
    }

    #[tokio::test]
    async fn codes_and_signals_of_the_living_and_the_dead() {
        assert_eq!(status_of("exit 7", false).await, 7);
        assert_eq!(status_of("exit 7", true).await, 7);
        assert_eq!(status_of("kill -9 $$", true).await, 137);
        assert_eq!(status_of("sleep 0.1; exit 255", false).await, 255);
    }

    #[tokio::test]
    async fn only_a_child_is_killed_by_its_pid() {
        let mut parent = std::process::Command::new("sh")
            .args(["-c", "sleep 100 & echo $!; read end"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(parent.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let grandchild = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        kill_child(grandchild.as_raw_pid().unsigned_abs());
        assert!(rustix::process::test_kill_process(grandchild).is_ok());
        kill_process(grandchild, Signal::KILL).unwrap();
        kill_child(parent.id());
        assert_eq!(parent.wait().unwrap().signal(), Some(9));
    }

    #[tokio::test]
    async fn a_real_time_signal_reaches_its_process() {
        let exits = Arc::new(Exits::default());
        let pid = child("sleep", &["100"]);
        let watched = Watched::known(exits.know(pid)).unwrap();
        watched.signal(40).unwrap();
        assert_eq!(watched.exit().await.status, 128 + 40);
    }
}
