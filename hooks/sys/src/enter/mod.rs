//! Replaces mounts in a container's mount namespace, from a short-lived child.
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
mod clone;
mod fork;
mod helper;
mod job;
mod message;
mod mount_namespace;
mod mounts;
mod namespace;
mod opened_by_child;
mod owner;
mod process;
mod process_error;
mod user_namespace;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use self::child::{Child, Opened};
use self::fork::ChildProcess;
use self::job::Job;
use self::message::{Reply, Request};
use crate::separate_process::is_runnable;

pub use self::clone::{CloneError, NewMount, clone_like};
pub use self::job::Replacement;
pub use self::message::EnterStep;
pub use self::mount_namespace::{MountNamespace, NamespaceError};
pub use self::mounts::mounts_in;
pub use self::namespace::{ContainerNamespace, MountsLock};
pub use self::opened_by_child::open_process_file;
pub use self::process::HeldProcess;
pub use self::process_error::ProcessError;
pub use self::user_namespace::user_namespace_of;

/// Limit of requests that wait for the child. They and their replies fit into the buffers of the
/// socket.
const AHEAD: usize = 32;

/// Limit of replacements of one child.
pub const AT_A_TIME: usize = 256;

/// Why a step in a container was not done.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// No child could be started.
    #[error("start a child for the container")]
    NoChild(#[source] io::Error),
    /// The child gave no answer in this time.
    #[error("the container did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    /// The child ended.
    #[error("the child in the container ended")]
    Ended,
    /// The mount point shows another mount than the mount table named.
    #[error("another mount has its place in the container")]
    OtherMount,
    /// The current file has another type than the old one.
    #[error("the current file has another type than the old one")]
    OtherType,
    /// A step failed.
    #[error("{}", .0.words())]
    Failed(EnterStep, #[source] io::Error),
}

impl EnterError {
    /// The error of a kernel without `MOVE_MOUNT_BENEATH`.
    pub fn no_such_method() -> Self {
        Self::Failed(EnterStep::AttachBeneath, Errno::INVAL.into())
    }

    /// True if the kernel, or this mount, does not allow the step.
    pub fn is_not_possible(&self) -> bool {
        let Self::Failed(_, source) = self else {
            return false;
        };
        matches!(
            Errno::from_io_error(source),
            Some(Errno::INVAL | Errno::NOSYS | Errno::PERM | Errno::OPNOTSUPP)
        )
    }

    /// True if the child serves no further request.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Silent(_) | Self::Ended)
    }

    /// True if the new file was removed before it was attached: the volume changed again.
    pub fn is_target_gone(&self) -> bool {
        let Self::Failed(step, source) = self else {
            return false;
        };
        let attaches = matches!(step, EnterStep::AttachBeneath | EnterStep::AttachNew);
        attaches && Errno::from_io_error(source) == Some(Errno::NOENT)
    }
}

/// A child in a container's mount namespace. It ends with this value.
#[derive(Debug)]
pub struct Entered {
    /// Closed before the child is waited for: a child that is not killed ends by that.
    socket: OwnedFd,
    /// `None` once it is abandoned.
    child: Option<ChildProcess>,
    patience: Duration,
    /// No step is waited for after this time.
    until: Instant,
    /// It changed a propagation that it has yet to restore.
    is_tucking: Cell<bool>,
}

impl Entered {
    /// Starts a child that enters a container's mount namespace. Each later step may take as long
    /// as `patience`, and all of them until this time.
    ///
    /// # Errors
    /// If there is no child, or it may not enter.
    pub fn enter(
        namespace: &ContainerNamespace,
        replacements: Vec<Replacement<'_>>,
        patience: Duration,
        until: Instant,
    ) -> Result<Self, EnterError> {
        let jobs: Option<Vec<Job>> = replacements.into_iter().map(Job::of).collect();
        let jobs = jobs.filter(|jobs| jobs.len() <= AT_A_TIME);
        let jobs = jobs.ok_or_else(|| EnterError::NoChild(io::ErrorKind::InvalidInput.into()))?;
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| EnterError::NoChild(errno.into()))?;
        let mut opened: Vec<Opened> = jobs.iter().map(|_| Opened::default()).collect();
        let kept = kept(&theirs, namespace, &jobs);
        let child = ChildProcess::start(0, &kept, || {
            let (socket, namespace) = (theirs.as_fd(), namespace.as_fd());
            Child {
                socket,
                namespace,
                jobs: &jobs,
                opened: &mut opened,
            }
            .serve();
        })
        .map_err(EnterError::NoChild)?;
        drop(theirs);
        let entered = Self {
            socket: ours,
            child: Some(child),
            patience,
            until,
            is_tucking: Cell::new(false),
        };
        entered.reply()?;
        Ok(entered)
    }

    /// Opens the mount point of a replacement, and checks that the stale mount is there.
    ///
    /// # Errors
    /// [`EnterError::OtherMount`] if it is not.
    pub fn open(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::Open, index)
    }

    /// The same for several replacements, one result for each.
    pub fn open_all(&self, indices: &[usize]) -> Vec<Result<(), EnterError>> {
        self.call_all(Request::Open, indices)
    }

    /// Attaches the new mount beneath the stale one: `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach_beneath(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::AttachBeneath, index)
    }

    /// The same for several replacements, one result for each.
    pub fn attach_all_beneath(&self, indices: &[usize]) -> Vec<Result<(), EnterError>> {
        self.call_all(Request::AttachBeneath, indices)
    }

    /// Attaches the new mount beneath the stale one through propagation. Success does not mean that
    /// it arrived.
    ///
    /// # Errors
    /// If a step fails. The propagation of the parent mount is restored in any case.
    pub fn tuck(&self, index: usize) -> Result<(), EnterError> {
        self.is_tucking.set(true);
        let tucked = self.call(Request::Tuck, index);
        self.is_tucking
            .set(matches!(tucked, Err(EnterError::Silent(_))));
        tucked
    }

    /// Detaches the stale mount. It is no error if it was detached already.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::Detach, index)
    }

    /// The same for several replacements, one result for each.
    pub fn detach_all(&self, indices: &[usize]) -> Vec<Result<(), EnterError>> {
        self.call_all(Request::Detach, indices)
    }

    /// Gives a tucked mount the propagation of the mount that it replaced, after that one was
    /// detached.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_propagation(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::SetPropagation, index)
    }

    /// Gives an open mount itself the propagation of its line in the replacement.
    ///
    /// # Errors
    /// The kernel's.
    pub fn restore(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::Restore, index)
    }

    /// Sets the times of the file beneath the mount, so that programs that watch its folder get an
    /// event.
    ///
    /// # Errors
    /// If the folder is on a read-only filesystem, or is no longer the parent of the mount point.
    pub fn touch(&self, index: usize) -> Result<(), EnterError> {
        self.call(Request::Touch, index)
    }

    /// Gives it up. The value shows if the child still waits for something in the container.
    pub fn abandon(mut self) -> Abandoned {
        self.kill();
        Abandoned {
            child: self.child.take().and_then(|child| child.pidfd()),
        }
    }

    /// A child that waits for a server of the container ends by the signal, or when the server
    /// answers. A child that has yet to restore a propagation ends by itself: the socket closes.
    fn kill(&self) {
        if let Some(child) = self.child.as_ref().filter(|_| !self.is_tucking.get()) {
            child.kill();
        }
    }

    fn call(&self, request: impl Fn(u16) -> Request, index: usize) -> Result<(), EnterError> {
        self.send(request, index)?;
        self.reply()
    }

    /// Sends requests ahead of their replies: the child and the caller need not take turns on a
    /// busy processor.
    fn call_all(
        &self,
        request: impl Fn(u16) -> Request + Copy,
        indices: &[usize],
    ) -> Vec<Result<(), EnterError>> {
        let mut results = Vec::with_capacity(indices.len());
        let mut is_over = false;
        for some in indices.chunks(AHEAD) {
            let sent: Vec<_> = some
                .iter()
                .map(|index| self.send(request, *index))
                .collect();
            for sent in sent {
                // A child that gave one reply too late is not waited for a second time.
                let result = if is_over {
                    Err(EnterError::Ended)
                } else {
                    sent.and_then(|()| self.reply())
                };
                is_over |= result.as_ref().is_err_and(EnterError::is_over);
                results.push(result);
            }
        }
        results
    }

    fn send(&self, request: impl Fn(u16) -> Request, index: usize) -> Result<(), EnterError> {
        let index = u16::try_from(index).map_err(|_| EnterError::Ended)?;
        rustix::net::send(
            &self.socket,
            &request(index).to_bytes(),
            rustix::net::SendFlags::NOSIGNAL,
        )
        .map_err(|_| EnterError::Ended)?;
        Ok(())
    }

    fn reply(&self) -> Result<(), EnterError> {
        let patience = self
            .patience
            .min(self.until.saturating_duration_since(Instant::now()));
        let child = self.child.as_ref().ok_or(EnterError::Ended)?;
        if !is_answered(self.socket.as_fd(), child, patience, self.until) {
            return Err(EnterError::Silent(patience));
        }
        let mut bytes = [0; Reply::SIZE];
        let read = rustix::io::read(&self.socket, &mut bytes).map_err(|_| EnterError::Ended)?;
        match Reply::from_bytes(bytes)
            .filter(|_| read == Reply::SIZE)
            .ok_or(EnterError::Ended)?
        {
            Reply::Done => Ok(()),
            Reply::OtherMount => Err(EnterError::OtherMount),
            Reply::OtherType => Err(EnterError::OtherType),
            Reply::Failed(step, errno) => Err(EnterError::Failed(step, errno.into())),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A child that was given up.
#[derive(Debug)]
pub struct Abandoned {
    child: Option<OwnedFd>,
}

impl Abandoned {
    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        self.child
            .as_ref()
            .is_some_and(|child| !is_readable(child.as_fd(), Duration::ZERO))
    }
}

/// Polls until the child has answered. A child that waits for a processor is late, not silent: it
/// has until this time.
fn is_answered(
    socket: BorrowedFd<'_>,
    child: &ChildProcess,
    patience: Duration,
    until: Instant,
) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if is_readable(socket, patience.min(left)) {
            return true;
        }
        if patience >= left || !is_runnable(child.pid()) {
            return false;
        }
    }
}

/// Polls until something can be read; ignores signals of this process.
fn is_readable(socket: BorrowedFd<'_>, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// The descriptors that the child needs, sorted.
fn kept(socket: &OwnedFd, namespace: &ContainerNamespace, jobs: &[Job]) -> Vec<RawFd> {
    let new = jobs
        .iter()
        .filter_map(|job| job.new.as_ref())
        .map(|new| new.0.as_raw_fd());
    let mut kept: Vec<RawFd> = new
        .chain([socket.as_raw_fd(), namespace.as_fd().as_raw_fd()])
        .collect();
    kept.sort_unstable();
    kept
}
