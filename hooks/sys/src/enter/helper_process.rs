//! The helper process: it forks the children that work in containers and complete trees of new
//! mounts.
//!
//! ```text
//!   agent ── socket, namespace or tree ──► helper process ── fork ──► child
//!     ◄──────────── pid and pidfd ─────────────┘                       │
//!     ◄──────────── work, on the socket ───────────────────────────────►
//! ```
//!
//! The agent has threads and many pages: a fork of the agent copies page tables, makes all threads
//! fault on their next writes, and gives the child locks that no thread releases. So the agent
//! forks the helper process once, at the start of `main`. The helper process has one thread and
//! holds nothing. It receives the checked namespace or the tree as a descriptor, never a pid. It
//! reaps its children, and ends when the agent ends.
//!
//! A child of a container is in the [register](crate::separate_process), so a child that hangs
//! counts for its pod also after the end of the agent. Only memory limits the children of all pods:
//! a limit of their number could be reached by some pods, and would stop the refreshes of all.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::enter::EnterError;
use crate::enter::child::serve_container;
use crate::enter::tree::serve_tree;
use crate::failure::errno_of;
use crate::fault;
use crate::fork::{ChildProcess, is_readable, receive, send, sockets};
use crate::replace::ReplaceError;
use crate::separate_process::{Registered, hanging, is_runnable};

/// Limit of children that hang in one pod.
const MAX_HANGING_IN_POD: usize = 4;

/// Limit of the wait for the end of a child that was killed.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// The work of a child. The child waits for this message: so the answer of the helper process is
/// the first on the socket.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Work {
    /// In the mount namespace of a container, with this number of replacements.
    Container(usize),
    /// In a new mount namespace, with this number of changes to a tree of new mounts.
    Tree(usize),
}

/// The result of a step of a child.
pub(super) type Done = Result<(), ReplaceError>;

/// The helper process of this process. It ends with this value.
#[derive(Debug)]
pub struct HelperProcess {
    /// Closed before the process is waited for.
    socket: OwnedFd,
    process: ChildProcess,
}

impl HelperProcess {
    /// Forks it. Call it while the program has one thread and no socket. Its thread must stay until
    /// the program ends.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn start() -> io::Result<Self> {
        let (socket, theirs) = sockets()?;
        let kept = [theirs.as_raw_fd()];
        let process = ChildProcess::start(&kept, || serve(&theirs))?;
        Ok(Self { socket, process })
    }

    /// Waits until it ended. Then no container can be refreshed.
    pub fn wait(&self) {
        while !is_readable(&self.process.pidfd, Duration::from_secs(3600)) {}
    }

    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Starts a child. `subject` is the mount namespace to enter, or the tree to complete; `pod`
    /// may let the child hang. The helper process answers at once, unless it waits for a processor.
    ///
    /// # Errors
    /// If the helper process ended, gives no answer until this time, or starts no child.
    pub(super) fn start_child(
        &self,
        work: &Work,
        subject: BorrowedFd<'_>,
        pod: &str,
        until: Instant,
    ) -> io::Result<RemoteChild> {
        let pod = format!("pod {pod}");
        if hanging().iter().filter(|known| **known == pod).count() >= MAX_HANGING_IN_POD {
            return Err(io::Error::other(format!(
                "{MAX_HANGING_IN_POD} children hang in the containers of its pod already"
            )));
        }
        let ended = || io::Error::other("the helper process ended");
        // Without room in /run the child is not counted: a full disk stops no refresh.
        let mut registered = Registered::new(&pod).ok();
        let (socket, theirs) = sockets()?;
        let mut descriptors = vec![theirs.as_fd(), subject];
        descriptors.extend(registered.as_ref().and_then(Registered::file));
        send(&self.socket, &(), &descriptors).map_err(|_| ended())?;
        drop(theirs);
        if let Some(registered) = &mut registered {
            registered.start();
        }
        let left = until.saturating_duration_since(Instant::now());
        if !is_readable(&socket, left) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (started, mut descriptors) = receive(&socket).map_err(|_| ended())?;
        let pid: Result<i32, i32> = started;
        let pid = pid.map_err(io::Error::from_raw_os_error)?;
        let pidfd = descriptors.pop().ok_or(Errno::MFILE)?;
        send(&socket, work, &[])?;
        Ok(RemoteChild {
            socket,
            pid,
            pidfd,
            has_to_finish: Cell::new(false),
            _registered: registered,
        })
    }
}

/// A child of the helper process, and the socket to the child. Dropping this value kills the child,
/// unless the child has to finish its work.
#[derive(Debug)]
pub(super) struct RemoteChild {
    pub(super) socket: OwnedFd,
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
    /// The child ends by itself when the socket closes.
    pub(super) has_to_finish: Cell<bool>,
    /// Dropped last: a child that lives on hangs.
    _registered: Option<Registered>,
}

impl RemoteChild {
    /// Receives the result of a step, and the descriptor that the step gave.
    ///
    /// # Errors
    /// Those of the step, and if the child does not answer within `step_timeout` and until this
    /// time.
    pub(super) fn reply(
        &self,
        step_timeout: Duration,
        until: Instant,
    ) -> Result<Option<OwnedFd>, EnterError> {
        let timeout = step_timeout.min(until.saturating_duration_since(Instant::now()));
        if !is_answered(&self.socket, self.pid, timeout, until) {
            return Err(EnterError::Silent(timeout));
        }
        let received = receive::<Done>(&self.socket).map_err(|_| EnterError::Ended)?;
        let (done, mut descriptors) = received;
        done?;
        Ok(descriptors.pop())
    }
}

impl Drop for RemoteChild {
    /// A killed child that waits for a server of the container ends when the server answers.
    fn drop(&mut self) {
        if !self.has_to_finish.get() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            is_readable(&self.pidfd, END_TIMEOUT);
        }
    }
}

/// Polls until the child has answered. A child that waits for a processor is late, not silent: it
/// has until this time.
pub(super) fn is_answered(socket: &OwnedFd, child: i32, timeout: Duration, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if is_readable(socket, timeout.min(left)) {
            return true;
        }
        if timeout >= left || !is_runnable(child) {
            return false;
        }
    }
}

/// Starts children until the other end of the socket closes.
fn serve(socket: &OwnedFd) {
    fault::disable();
    let mut children: Vec<ChildProcess> = Vec::new();
    loop {
        let mut polled = vec![PollFd::new(socket, PollFlags::IN)];
        for child in &children {
            polled.push(PollFd::new(&child.pidfd, PollFlags::IN));
        }
        let has_message = match poll(&mut polled, None) {
            Ok(_) => !polled[0].revents().is_empty(),
            Err(Errno::INTR) => false,
            Err(_) => break,
        };
        // Those that ended are reaped.
        children.retain(|child| !child.has_ended());
        if has_message {
            let Ok(((), descriptors)) = receive(socket) else {
                break;
            };
            children.extend(start(&descriptors));
        }
    }
    // The kernel ends them with this process, but for a child that has to finish its work.
    std::mem::forget(children);
}

/// Starts a child, and passes its pid and its pidfd, or the error, to its socket.
fn start(descriptors: &[OwnedFd]) -> Option<ChildProcess> {
    let [socket, subject, ..] = descriptors else {
        return None;
    };
    let mut kept: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let child = ChildProcess::start(&kept, || {
        // If the agent is gone, the work ends.
        let _ = receive(socket).and_then(|(work, _)| match work {
            Work::Container(jobs) => serve_container(socket, subject, jobs),
            Work::Tree(parts) => serve_tree(socket, subject, parts),
        });
    });
    let started = match &child {
        Ok(child) => Ok(child.pid),
        Err(error) => Err(errno_of(error).raw_os_error()),
    };
    let pidfd = child.as_ref().ok().map(|child| child.pidfd.as_fd());
    // If the reader is gone, the child ends.
    let _ = send(socket, &started, pidfd.as_slice());
    child.ok()
}
