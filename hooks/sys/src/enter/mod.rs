//! Replaces mounts in a container's mount namespace, from a short-lived child.
//! [`complete_tree`] prepares the new mounts in a child with a mount namespace of its own.
//!
//! ```text
//!   agent ── socket ── child: setns(2) ── open, attach beneath, detach
//!     └ checks the namespace, reads its mount table, decides
//! ```
//!
//! The namespace is opened once: the checks, the entry and the reading of its mount table use this
//! descriptor.
//!
//! The child makes a few syscalls and decides nothing. A container can make its walk to a mount
//! point hang, for example with a FUSE mount above it: then the child is abandoned. When the agent
//! dies, the child reads the end of the socket and ends.

mod child;
mod namespace;
mod process;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountEntry;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::enter::child::{Done, Job, serve_container, serve_tree};
use crate::own_process::disable_faults;
use crate::own_process::{
    ChildProcess, Registered, hanging, is_answered, is_readable, receive, send, sockets,
};
use crate::replace::{NewMount, ReplaceError, Step};
use crate::{SourceError, errno_of};

pub use self::child::{Action, TreeChange};
pub use self::namespace::{
    ContainerNamespace, MountNamespace, MountsLock, NamespaceError, mounts_in,
};
pub use self::process::{
    HeldProcess, ProcessError, mount_namespaces, open_process_file, selinux_denies_read,
};

/// Limit of requests that wait for the child. They and their replies fit into the buffers of the
/// socket.
const MAX_PENDING_REQUESTS: usize = 32;

/// Limit of replacements of a child.
pub const MAX_REPLACEMENTS: usize = 256;

/// Why a step in a container was not done.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// No child could be started.
    #[error("start a child for the container")]
    NoChild(#[source] io::Error),
    /// The child gave no answer in this time.
    #[error("the container did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    #[error("the child in the container ended")]
    Ended,
    #[error(transparent)]
    Step(#[from] ReplaceError),
}

impl EnterError {
    /// True if the kernel, or this mount, does not allow the step.
    pub fn is_not_possible(&self) -> bool {
        matches!(self, Self::Step(error) if error.is_not_possible())
    }

    /// True if a process uses the mount.
    pub fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Step(ReplaceError::Failed(Step::Unmount, Errno::BUSY))
        )
    }

    /// True if the child serves no further request.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Silent(_) | Self::Ended)
    }

    /// True if the new file was removed before it was attached: the volume changed again.
    pub fn is_target_gone(&self) -> bool {
        matches!(self, Self::Step(error) if error.is_target_gone())
    }
}

/// A stale mount of a container, by the lines of its mount table, and the mount to put in its
/// place.
#[derive(Debug)]
pub struct Replacement<'a> {
    pub stale: &'a MountEntry,
    pub parent: Option<&'a MountEntry>,
    /// The new mount, attached nowhere; `None` if the new mount already lies beneath the stale
    /// mount.
    pub new: Option<NewMount>,
}

/// A child of the helper process, in a container's mount namespace or with a tree of new mounts.
/// Dropping this value kills the child, unless the child has to finish its work.
#[derive(Debug)]
pub struct Entered {
    socket: OwnedFd,
    pid: i32,
    pidfd: OwnedFd,
    step_timeout: Duration,
    /// No step is waited for after this time.
    until: Instant,
    /// A reply did not arrive in time, or the child ended. A late reply would be read as the answer
    /// to the next request.
    is_over: Cell<bool>,
    /// The child ends by itself when the socket closes.
    has_to_finish: Cell<bool>,
    /// Dropped last: a child that lives on hangs.
    _registered: Option<Registered>,
}

impl Entered {
    /// Starts a child that enters a container's mount namespace. Each later step may take as long
    /// as `step_timeout`, and all of them until this time.
    ///
    /// # Errors
    /// If there is no child, or it may not enter.
    pub fn enter(
        helper: &HelperProcess,
        namespace: &ContainerNamespace,
        replacements: Vec<Replacement<'_>>,
        step_timeout: Duration,
        until: Instant,
    ) -> Result<Self, EnterError> {
        if replacements.len() > MAX_REPLACEMENTS {
            return Err(EnterError::NoChild(io::ErrorKind::InvalidInput.into()));
        }
        let work = Work::Container(replacements.len());
        let (subject, pod) = (namespace.as_fd(), namespace.pod());
        let entered = helper
            .start_child(&work, subject, &pod, step_timeout, until)
            .map_err(EnterError::NoChild)?;
        // The child reads all of them before it enters.
        for replacement in &replacements {
            let new = replacement.new.as_ref().map(|new| new.mount.as_fd());
            send(&entered.socket, &Job::of(replacement), new.as_slice())
                .map_err(|_| EnterError::Ended)?;
        }
        entered.done()?;
        Ok(entered)
    }

    /// Does this with the replacement at this index.
    ///
    /// # Errors
    /// If the kernel refuses, or the child gives no answer.
    pub fn call(&self, action: Action, index: usize) -> Result<(), EnterError> {
        let is_tuck = action == Action::Tuck;
        if is_tuck {
            // The child changes a propagation and must restore that propagation.
            self.has_to_finish.set(true);
        }
        let done = self.send(action, index).and_then(|()| self.done());
        if is_tuck {
            let is_silent = matches!(done, Err(EnterError::Silent(_)));
            self.has_to_finish.set(is_silent);
        }
        done
    }

    /// Does this with several replacements and returns a result for each; not for [`Action::Tuck`]. Sends
    /// requests ahead of their replies: the child and the caller need not take turns on a busy
    /// processor.
    pub fn call_all(&self, action: Action, indices: &[usize]) -> Vec<Result<(), EnterError>> {
        let mut results = Vec::with_capacity(indices.len());
        for some in indices.chunks(MAX_PENDING_REQUESTS) {
            let sent: Vec<_> = some.iter().map(|index| self.send(action, *index)).collect();
            for sent in sent {
                results.push(sent.and_then(|()| self.done()));
            }
        }
        results
    }

    /// True if the child serves no further request.
    pub fn is_over(&self) -> bool {
        self.is_over.get()
    }

    /// Gives it up. The value shows if the child still waits for something in the container.
    pub fn abandon(self) -> Abandoned {
        Abandoned {
            pid: self.pid.unsigned_abs(),
            child: self.pidfd.try_clone().ok(),
        }
    }

    fn send(&self, action: Action, index: usize) -> Result<(), EnterError> {
        if self.is_over() {
            return Err(EnterError::Ended);
        }
        send(&self.socket, &(action, index), &[]).map_err(|_| EnterError::Ended)
    }

    fn done(&self) -> Result<(), EnterError> {
        self.reply().map(drop)
    }

    /// Receives the result of a step, and the descriptor that the step gave. The caller does not
    /// wait a second time for a child whose reply was late.
    ///
    /// # Errors
    /// Those of the step, and if the child does not answer in time.
    fn reply(&self) -> Result<Option<OwnedFd>, EnterError> {
        if self.is_over() {
            return Err(EnterError::Ended);
        }
        let left = self.until.saturating_duration_since(Instant::now());
        let timeout = self.step_timeout.min(left);
        // Until the reply is here.
        self.is_over.set(true);
        if !is_answered(&self.socket, self.pid, timeout, self.until) {
            return Err(EnterError::Silent(timeout));
        }
        let received = receive::<Done>(&self.socket).map_err(|_| EnterError::Ended)?;
        self.is_over.set(false);
        let (done, mut descriptors) = received;
        done?;
        Ok(descriptors.pop())
    }
}

impl Drop for Entered {
    /// A killed child that waits for a server of the container ends when the server answers.
    fn drop(&mut self) {
        if !self.has_to_finish.get() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            is_readable(&self.pidfd, END_TIMEOUT);
        }
    }
}

/// A child that was given up.
#[derive(Debug)]
pub struct Abandoned {
    pid: u32,
    child: Option<OwnedFd>,
}

impl Abandoned {
    /// The pid of the child.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        let child = self.child.as_ref();
        child.is_some_and(|child| !is_readable(child, Duration::ZERO))
    }
}

/// A change of a tree of new mounts that is attached nowhere.
#[derive(Debug)]
pub struct TreePart {
    /// The path below the top.
    pub path: PathBuf,
    pub change: TreeChange,
    /// The mount to attach.
    pub new: Option<NewMount>,
}

/// The error of a step with this act, when a tree is completed.
fn tree_error(error: EnterError, act: &str) -> SourceError {
    match error {
        EnterError::NoChild(error) => SourceError::of("start a child for the new mounts")(error),
        EnterError::Step(error) => SourceError::of(act)(error),
        EnterError::Silent(time) => SourceError::new(format!(
            "the new mount did not answer within {} ms",
            time.as_millis()
        )),
        EnterError::Ended => SourceError::new("the child for the new mounts ended"),
    }
}

/// Makes these changes in this order, and returns the changed tree. Nothing is attached in the
/// caller's namespace. `namespace` is that of the container for which the tree is made.
///
/// # Errors
/// If the tree lacks a place, the kernel refuses, or a server does not answer within `step_timeout`.
pub fn complete_tree(
    helper: &HelperProcess,
    namespace: &ContainerNamespace,
    top: NewMount,
    parts: &[TreePart],
    step_timeout: Duration,
    until: Instant,
) -> Result<NewMount, SourceError> {
    const PREPARE: &str = "prepare the new mounts";
    if parts.is_empty() {
        return Ok(top);
    }
    let work = Work::Tree(parts.len());
    let child = helper
        .start_child(
            &work,
            top.mount.as_fd(),
            &namespace.pod(),
            step_timeout,
            until,
        )
        .map_err(|error| tree_error(EnterError::NoChild(error), PREPARE))?;
    // The reply to a part comes before the next part is sent: the buffers cannot fill up.
    let reply = |act: &str| child.reply().map_err(|error| tree_error(error, act));
    reply(PREPARE)?;
    for part in parts {
        let mount = part.new.as_ref().map(|new| new.mount.as_fd());
        let path = part.path.as_os_str();
        send(&child.socket, &(path, part.change), mount.as_slice())
            .map_err(|_| tree_error(EnterError::Ended, PREPARE))?;
        reply(&format!(
            "prepare the nested mount at {}",
            part.path.display()
        ))?;
    }
    let mount = reply(PREPARE)?.ok_or_else(|| tree_error(EnterError::Ended, PREPARE))?;
    Ok(NewMount { mount })
}

// The helper process: it forks the children that work in containers and complete trees of new
// mounts.
//
// ```text
//   agent ── socket, namespace or tree ──► helper process ── fork ──► child
//     ◄──────────── pid and pidfd ─────────────┘                       │
//     ◄──────────── work, on the socket ───────────────────────────────►
// ```
//
// The agent has threads and many pages: a fork of the agent copies page tables, makes all threads
// fault on their next writes, and gives the child locks that no thread releases. So the agent
// forks the helper process once, at the start of `main`. The helper process has one thread and
// holds nothing. It receives the checked namespace or the tree as a descriptor, never a pid. It
// reaps its children, and ends when the agent ends.
//
// A child of a container is in the [register](crate::own_process), so a child that hangs
// counts for its pod also after the end of the agent. Only memory limits the children of all pods:
// a limit of their number could be reached by some pods, and would stop the refreshes of all.

/// Limit of children that hang in one pod.
const MAX_HANGING_IN_POD: usize = 4;

/// Limit of the wait for the end of a child that was killed.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// The work of a child. The child waits for this message: so the answer of the helper process is
/// the first on the socket.
#[derive(Debug, Serialize, Deserialize)]
enum Work {
    /// In the mount namespace of a container, with this number of replacements.
    Container(usize),
    /// In a new mount namespace, with this number of changes to a tree of new mounts.
    Tree(usize),
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
    fn start_child(
        &self,
        work: &Work,
        subject: BorrowedFd<'_>,
        pod: &str,
        step_timeout: Duration,
        until: Instant,
    ) -> io::Result<Entered> {
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
        if !is_readable(&socket, until.saturating_duration_since(Instant::now())) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (pid, mut descriptors) = receive::<Result<i32, i32>>(&socket).map_err(|_| ended())?;
        let pid = pid.map_err(io::Error::from_raw_os_error)?;
        let pidfd = descriptors.pop().ok_or(Errno::MFILE)?;
        send(&socket, work, &[])?;
        Ok(Entered {
            socket,
            pid,
            pidfd,
            step_timeout,
            until,
            is_over: Cell::new(false),
            has_to_finish: Cell::new(false),
            _registered: registered,
        })
    }
}

/// Starts children until the other end of the socket closes.
fn serve(socket: &OwnedFd) {
    disable_faults();
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
