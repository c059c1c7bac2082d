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

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};

use super::child::serve_container;
use super::descriptor_message::{receive_message, send_message, sockets};
use super::tree_child::serve_tree;
use super::user_namespace_child::serve_user_namespace;
use crate::fault;
use crate::fork::ChildProcess;
use crate::poll::is_readable;

/// Limit of children. Each may wait for a server or a daemon of its container.
const MAX_CHILDREN: usize = 32;

/// Limit of children that hang in one pod: the others are for the containers of other pods.
const MAX_HANGING_IN_POD: usize = 4;

/// Limit of the wait for the end of a child that was killed.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// The message for which a child waits: so the answer of the helper process is the first on the
/// socket.
const START: &[u8] = b"start";

/// The error number for a child beyond [`MAX_CHILDREN`].
const TOO_MANY: Errno = Errno::USERS;

/// The work of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// In the mount namespace of a container, with this number of replacements.
    Container(u16),
    /// In a new user namespace.
    UserNamespace,
    /// In a new mount namespace, with this number of changes to a tree of new mounts.
    Tree(u16),
}

impl Work {
    const SIZE: usize = 3;

    fn to_bytes(self) -> [u8; Self::SIZE] {
        let (kind, count) = match self {
            Self::Container(jobs) => (0, jobs),
            Self::UserNamespace => (1, 0),
            Self::Tree(parts) => (2, parts),
        };
        let [low, high] = count.to_le_bytes();
        [kind, low, high]
    }

    fn from_bytes([kind, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        match kind {
            0 => Some(Self::Container(u16::from_le_bytes([low, high]))),
            1 => Some(Self::UserNamespace),
            2 => Some(Self::Tree(u16::from_le_bytes([low, high]))),
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
    hanging: Arc<HangingChildren>,
}

/// The pidfds of children that were given up, each with the pod of its container.
#[derive(Debug, Default)]
struct HangingChildren(Mutex<Vec<(String, OwnedFd)>>);

impl HangingChildren {
    /// The number of children that still hang in a pod.
    fn count_in(&self, pod: &str) -> usize {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain(|(_, child)| !is_readable(child.as_fd(), Duration::ZERO));
        children.iter().filter(|(of, _)| of == pod).count()
    }

    fn add(&self, pod: &str, child: BorrowedFd<'_>) {
        // Without a free descriptor, the limit of all children is left.
        if let Ok(child) = child.try_clone_to_owned() {
            let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            children.push((pod.to_owned(), child));
        }
    }
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
        Ok(Self {
            socket,
            process,
            hanging: Arc::default(),
        })
    }

    /// Waits until it ended. Then no container can be refreshed.
    pub fn wait(&self) {
        self.process.wait();
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Starts a child. `subject` is the mount namespace to enter, or the tree to complete, and `pod`
    /// the pod that may let the child hang. The helper process answers at once, unless it waits for a
    /// processor.
    ///
    /// # Errors
    /// If the helper process ended, gives no answer until this time, or starts no child.
    pub(super) fn start_child(
        &self,
        work: Work,
        subject: Option<BorrowedFd<'_>>,
        pod: String,
        until: Instant,
    ) -> io::Result<RemoteChild> {
        if self.hanging.count_in(&pod) >= MAX_HANGING_IN_POD {
            return Err(io::Error::other(TooManyInPod));
        }
        let (socket, theirs) = sockets()?;
        let descriptors: Vec<_> = [Some(theirs.as_fd()), subject]
            .into_iter()
            .flatten()
            .collect();
        send_message(self.socket.as_fd(), &work.to_bytes(), &descriptors)
            .map_err(|_| io::Error::other(HelperEnded))?;
        drop(theirs);
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
                    pod,
                    hanging: Arc::clone(&self.hanging),
                })
            }
            (errno, None) if errno == -TOO_MANY.raw_os_error() => {
                Err(io::Error::other(TooManyChildren))
            }
            (errno, None) => Err(io::Error::from_raw_os_error(-errno)),
        }
    }
}

/// Why no child was started.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_CHILDREN} children wait in containers already")]
struct TooManyChildren;

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
    pod: String,
    hanging: Arc<HangingChildren>,
}

impl Drop for RemoteChild {
    /// A killed child that waits for a server of the container ends when the server answers.
    fn drop(&mut self) {
        let mut timeout = Duration::ZERO;
        if !self.has_to_finish.get() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            timeout = END_TIMEOUT;
        }
        if !is_readable(self.pidfd.as_fd(), timeout) {
            self.hanging.add(&self.pod, self.pidfd.as_fd());
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
            children.extend(started(work, descriptors, children.len()));
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
fn started(work: Work, descriptors: Vec<OwnedFd>, count: usize) -> Option<ChildProcess> {
    let mut descriptors = descriptors.into_iter();
    let (socket, subject) = (descriptors.next()?, descriptors.next());
    let child = match count < MAX_CHILDREN {
        true => start(work, &socket, subject.as_ref()),
        false => Err(TOO_MANY.into()),
    };
    let answer = match &child {
        Ok(child) => child.pid(),
        Err(error) => -error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
    };
    let pidfd = child.as_ref().ok().and_then(ChildProcess::pidfd);
    // If the reader is gone, the child ends.
    let _ = send_message(socket.as_fd(), &answer.to_le_bytes(), pidfd.as_slice());
    child.ok()
}

fn start(work: Work, socket: &OwnedFd, subject: Option<&OwnedFd>) -> io::Result<ChildProcess> {
    let mut kept: Vec<RawFd> = [Some(socket), subject]
        .into_iter()
        .flatten()
        .map(AsRawFd::as_raw_fd)
        .collect();
    kept.sort_unstable();
    ChildProcess::start(&kept, || {
        if rustix::io::read(socket, &mut [0; START.len()]) != Ok(START.len()) {
            return;
        }
        match (work, subject) {
            (Work::Container(jobs), Some(namespace)) => serve_container(socket, namespace, jobs),
            (Work::Tree(parts), Some(tree)) => serve_tree(socket, tree, parts),
            (Work::Container(_) | Work::Tree(_), None) => {}
            (Work::UserNamespace, _) => serve_user_namespace(socket),
        }
    })
}
