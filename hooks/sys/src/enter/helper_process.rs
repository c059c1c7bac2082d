//! The helper process: it forks the children that work in containers and complete trees of new
//! mounts.
//!
//! ```text
//!   agent ── kind of work, socket, namespace or tree ──► helper process ── fork ──► child
//!     ◄──────────── pid and pidfd ───────────────────────────┘                       │
//!     ◄──────────── the socket ──────────────────────────────────────────────────────┘
//! ```
//!
//! The agent has threads and many pages: a fork of the agent copies page tables, makes all threads
//! fault on their next writes, and gives the child locks that no thread releases. So the agent
//! forks the helper process once, at the start of `main`. The helper process has one thread and
//! holds nothing. It receives the checked namespace or the tree as a descriptor, never a pid. It
//! reaps its children, and ends when the agent ends.
//!
//! A child of a container is in the [register](crate::hanging_processes), so a child that hangs
//! counts for its pod also after the end of the agent. Only memory limits the children of all pods:
//! a limit of their number could be reached by some pods, and would stop the refreshes of all.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};

use super::child::serve_container;
use super::descriptor_message::{receive_message, send_message, sockets};
use super::tree_child::serve_tree;
use crate::fault;
use crate::fork::ChildProcess;
use crate::hanging_processes::{Registered, hanging};
use crate::poll::is_readable;

/// Limit of children that hang in one pod.
const MAX_HANGING_IN_POD: usize = 4;

/// Limit of the wait for the end of a child that was killed.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// The message for which a child waits: so the answer of the helper process is the first on the
/// socket.
const START: &[u8] = b"start";

/// The work of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// In the mount namespace of a container, with this number of replacements.
    Container(u16),
    /// In a new mount namespace, with this number of changes to a tree of new mounts.
    Tree(u16),
}

impl Work {
    const SIZE: usize = 3;

    fn to_bytes(self) -> [u8; Self::SIZE] {
        let (kind, count) = match self {
            Self::Container(jobs) => (0, jobs),
            Self::Tree(parts) => (1, parts),
        };
        let [low, high] = count.to_le_bytes();
        [kind, low, high]
    }

    fn from_bytes([kind, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        match kind {
            0 => Some(Self::Container(u16::from_le_bytes([low, high]))),
            1 => Some(Self::Tree(u16::from_le_bytes([low, high]))),
            _ => None,
        }
    }
}

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
        self.process.wait();
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Starts a child. `subject` is the mount namespace to enter, or the tree to complete, with the
    /// pod that may let the child hang. The helper process answers at once, unless it waits for a
    /// processor.
    ///
    /// # Errors
    /// If the helper process ended, gives no answer until this time, or starts no child.
    pub(super) fn start_child(
        &self,
        work: Work,
        (subject, pod): (BorrowedFd<'_>, String),
        until: Instant,
    ) -> io::Result<RemoteChild> {
        let pod = format!("pod {pod}");
        if hanging().iter().filter(|known| **known == pod).count() >= MAX_HANGING_IN_POD {
            return Err(io::Error::other(TooManyInPod));
        }
        // Without room in /run the child is not counted: a full disk stops no refresh.
        let mut registered = Registered::new(&pod).ok();
        let (socket, theirs) = sockets()?;
        let mut descriptors = vec![theirs.as_fd(), subject];
        descriptors.extend(registered.as_ref().and_then(Registered::file));
        send_message(self.socket.as_fd(), &work.to_bytes(), &descriptors)
            .map_err(|_| io::Error::other(HelperEnded))?;
        drop(theirs);
        if let Some(registered) = &mut registered {
            registered.start();
        }
        if !is_readable(
            socket.as_fd(),
            until.saturating_duration_since(Instant::now()),
        ) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut number = [0; 4];
        let (size, mut descriptors) = receive_message(socket.as_fd(), &mut number)?;
        match (i32::from_le_bytes(number), descriptors.pop()) {
            _ if size != number.len() => Err(io::Error::other(HelperEnded)),
            (pid, Some(pidfd)) => {
                send_message(socket.as_fd(), START, &[])?;
                Ok(RemoteChild {
                    socket,
                    pid,
                    pidfd,
                    has_to_finish: Cell::new(false),
                    _registered: registered,
                })
            }
            (errno, None) => Err(io::Error::from_raw_os_error(-errno)),
        }
    }
}

/// Why no child was started for a container of this pod.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_HANGING_IN_POD} children hang in the containers of its pod already")]
struct TooManyInPod;

/// Why no child can be started any more.
#[derive(Debug, thiserror::Error)]
#[error("the helper process ended")]
struct HelperEnded;

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

impl Drop for RemoteChild {
    /// A killed child that waits for a server of the container ends when the server answers.
    fn drop(&mut self) {
        if !self.has_to_finish.get() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            is_readable(self.pidfd.as_fd(), END_TIMEOUT);
        }
    }
}

/// Starts children until the other end of the socket closes.
fn serve(socket: &OwnedFd) {
    fault::disable();
    let mut children: Vec<ChildProcess> = Vec::new();
    while let Ok(has_message) = wait(socket, &children) {
        // Those that ended are reaped.
        children.retain(|child| !child.has_ended());
        if !has_message {
            continue;
        }
        let mut bytes = [0; Work::SIZE];
        let Ok((Work::SIZE, descriptors)) = receive_message(socket.as_fd(), &mut bytes) else {
            break;
        };
        if let Some(work) = Work::from_bytes(bytes) {
            children.extend(started(work, descriptors));
        }
    }
    // The kernel ends them with this process, but for a child that has to finish its work.
    children.into_iter().for_each(std::mem::forget);
}

/// Waits for a message or the end of a child. True if there is a message, or none can come.
fn wait(socket: &OwnedFd, children: &[ChildProcess]) -> Result<bool, Errno> {
    let of_children = children.iter().filter_map(ChildProcess::pidfd);
    let mut ready: Vec<_> = [socket.as_fd()]
        .into_iter()
        .chain(of_children)
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
        .collect();
    match poll(&mut ready, None) {
        Ok(_) => Ok(!ready[0].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Starts a child, and passes its pid and its pidfd, or the error, to its socket.
fn started(work: Work, descriptors: Vec<OwnedFd>) -> Option<ChildProcess> {
    let mut kept: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let (socket, subject) = (descriptors.first()?, descriptors.get(1)?);
    let child = start(work, &kept, socket, subject);
    let answer = match &child {
        Ok(child) => child.pid(),
        Err(error) => -error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
    };
    let pidfd = child.as_ref().ok().and_then(ChildProcess::pidfd);
    // If the reader is gone, the child ends.
    let _ = send_message(socket.as_fd(), &answer.to_le_bytes(), pidfd.as_slice());
    child.ok()
}

fn start(
    work: Work,
    kept: &[RawFd],
    socket: &OwnedFd,
    subject: &OwnedFd,
) -> io::Result<ChildProcess> {
    ChildProcess::start(kept, || {
        if rustix::io::read(socket, &mut [0; START.len()]) != Ok(START.len()) {
            return;
        }
        match work {
            Work::Container(jobs) => serve_container(socket, subject, jobs),
            Work::Tree(parts) => serve_tree(socket, subject, parts),
        }
    })
}
