//! Completes a tree of new mounts that is attached nowhere: attaches nested mounts, and sets the
//! attributes of single mounts below the top.
//!
//! move_mount(2) before Linux 6.15 and mount_setattr(2) refuse a place below the top of such a tree.
//! So a child attaches the tree in a mount namespace of its own, completes the tree there, and
//! passes a copy back. The walk to a place in the tree may wait for a server or a daemon, which is
//! why the child is a process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::helper_process::{HelperProcess, RemoteChild, Work};
use super::is_answered;
use super::namespace::ContainerNamespace;
use super::tree_message::{TreeReply, receive_reply, send_part};
use super::tree_part::TreePart;
use crate::replace::{NewMount, ReplaceError};

/// Why a tree was not completed.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// No child could be started.
    #[error("start a child for the new mounts")]
    NoChild(#[source] io::Error),
    /// The walk to a place did not end within this time.
    #[error("the new mount did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    /// The child ended.
    #[error("the child for the new mounts ended")]
    Ended,
    /// The tree could not be attached or copied.
    #[error("prepare the new mounts")]
    Prepare(#[source] ReplaceError),
    /// A change was refused.
    #[error("prepare the nested mount at {}", path.display())]
    Part {
        /// The path below the top.
        path: PathBuf,
        /// The reason.
        #[source]
        source: ReplaceError,
    },
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
) -> Result<NewMount, TreeError> {
    let Ok(count) = u16::try_from(parts.len()) else {
        return Err(TreeError::NoChild(io::ErrorKind::InvalidInput.into()));
    };
    if count == 0 {
        return Ok(top);
    }
    let child = helper
        .start_child(
            Work::Tree(count),
            (top.mount.as_fd(), namespace.pod()),
            until,
        )
        .map_err(TreeError::NoChild)?;
    completed_by(&child, parts, step_timeout, until).map(|mount| NewMount { mount })
}

fn completed_by(
    child: &RemoteChild,
    parts: &[TreePart],
    step_timeout: Duration,
    until: Instant,
) -> Result<OwnedFd, TreeError> {
    let socket = child.socket.as_fd();
    // A reply to a part comes before the next part is sent: the buffers cannot fill up.
    let reply = || {
        let timeout = step_timeout.min(until.saturating_duration_since(Instant::now()));
        match is_answered(socket, child.pid, timeout, until) {
            true => receive_reply(socket).ok_or(TreeError::Ended),
            false => Err(TreeError::Silent(timeout)),
        }
    };
    expect_done(reply()?)?;
    for part in parts {
        send_part(part, socket).map_err(|_| TreeError::Ended)?;
        if let TreeReply::Failed(source) = reply()? {
            let path = part.path.clone();
            return Err(TreeError::Part { path, source });
        }
    }
    match reply()? {
        TreeReply::Tree(tree) => Ok(tree),
        TreeReply::Failed(error) => Err(TreeError::Prepare(error)),
        TreeReply::Done => Err(TreeError::Ended),
    }
}

fn expect_done(reply: TreeReply) -> Result<(), TreeError> {
    match reply {
        TreeReply::Done => Ok(()),
        TreeReply::Failed(error) => Err(TreeError::Prepare(error)),
        TreeReply::Tree(_) => Err(TreeError::Ended),
    }
}
