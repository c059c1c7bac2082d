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
mod helper_process;
mod namespace;
mod owner;
mod process;
mod program;
mod tree;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountEntry;

use crate::enter::child::Job;
use crate::enter::helper_process::{RemoteChild, Work};
use crate::fork::{is_readable, send};
use crate::replace::{NewMount, ReplaceError};

pub use self::child::Action;
pub use self::helper_process::HelperProcess;
pub use self::namespace::{
    ContainerNamespace, MountNamespace, MountsLock, NamespaceError, mounts_in,
};
pub use self::process::{HeldProcess, ProcessError, mount_namespaces, open_process_file};
pub use self::tree::{TreeChange, TreeError, TreePart, complete_tree};

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
        matches!(self, Self::Step(error) if error.is_busy())
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

/// A child in a container's mount namespace. It ends with this value.
#[derive(Debug)]
pub struct Entered {
    child: RemoteChild,
    step_timeout: Duration,
    /// No step is waited for after this time.
    until: Instant,
    /// A reply did not arrive in time, or the child ended. A late reply would be read as the answer
    /// to the next request.
    is_over: Cell<bool>,
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
        let child = helper
            .start_child(&work, namespace.as_fd(), &namespace.pod(), until)
            .map_err(EnterError::NoChild)?;
        // The child reads all of them before it enters.
        for replacement in &replacements {
            let new = replacement.new.as_ref().map(|new| new.mount.as_fd());
            send(&child.socket, &Job::of(replacement), new.as_slice())
                .map_err(|_| EnterError::Ended)?;
        }
        let entered = Self {
            child,
            step_timeout,
            until,
            is_over: Cell::new(false),
        };
        entered.reply()?;
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
            self.child.has_to_finish.set(true);
        }
        let done = self.send(action, index).and_then(|()| self.reply());
        if is_tuck {
            let is_silent = matches!(done, Err(EnterError::Silent(_)));
            self.child.has_to_finish.set(is_silent);
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
                results.push(sent.and_then(|()| self.reply()));
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
            pid: self.child.pid.unsigned_abs(),
            child: self.child.pidfd.try_clone().ok(),
        }
    }

    fn send(&self, action: Action, index: usize) -> Result<(), EnterError> {
        if self.is_over() {
            return Err(EnterError::Ended);
        }
        send(&self.child.socket, &(action, index), &[]).map_err(|_| EnterError::Ended)
    }

    /// The caller does not wait a second time for a child whose reply was late.
    fn reply(&self) -> Result<(), EnterError> {
        if self.is_over() {
            return Err(EnterError::Ended);
        }
        let reply = self.child.reply(self.step_timeout, self.until);
        self.is_over
            .set(reply.as_ref().is_err_and(EnterError::is_over));
        reply.map(drop)
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
