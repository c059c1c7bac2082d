//! Completes a tree of new mounts that is attached nowhere: attaches nested mounts, and sets the
//! attributes of single mounts below the top.
//!
//! move_mount(2) before Linux 6.15 and mount_setattr(2) refuse a place below the top of such a tree.
//! So a child attaches the tree in a mount namespace of its own, completes the tree there, and
//! passes a copy back. The walk to a place in the tree may wait for a server or a daemon, which is
//! why the child is a process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountAttributes;
use rustix::fs::{CWD, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;
use serde::{Deserialize, Serialize};

use crate::enter::EnterError;
use crate::enter::child::require_same_type;
use crate::enter::helper_process::{Done, HelperProcess, Work};
use crate::enter::namespace::ContainerNamespace;
use crate::failure::errno_of;
use crate::fork::{receive, send};
use crate::mount_setattr::{adding, mount_setattr};
use crate::replace::{NewMount, ReplaceError, Step, at, enter_private_mounts, tree_of};
use crate::target::open_without_links;

/// A change of a tree of new mounts, at a path below its top.
#[derive(Debug)]
pub struct TreePart {
    /// The path below the top.
    pub path: PathBuf,
    pub change: TreeChange,
}

/// A change at a place of a tree.
#[derive(Debug)]
pub enum TreeChange {
    /// Adds attributes to the mount at this place.
    Restrict(MountAttributes),
    Attach(NewMount),
    /// Attaches a new mount, if the tree has a place of the same type.
    TryAttach(NewMount),
}

/// Why a tree was not completed.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// No child could be started.
    #[error("start a child for the new mounts")]
    NoChild(#[source] io::Error),
    /// The walk to a place did not end within this time.
    #[error("the new mount did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    #[error("the child for the new mounts ended")]
    Ended,
    /// The tree could not be attached or copied.
    #[error("prepare the new mounts")]
    Prepare(#[source] ReplaceError),
    #[error("prepare the nested mount at {}", path.display())]
    Part {
        /// The path below the top.
        path: PathBuf,
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
    if parts.is_empty() {
        return Ok(top);
    }
    let work = Work::Tree(parts.len());
    let child = helper
        .start_child(&work, top.mount.as_fd(), &namespace.pod(), until)
        .map_err(TreeError::NoChild)?;
    // The reply to a part comes before the next part is sent: the buffers cannot fill up.
    let reply = |failed: &dyn Fn(ReplaceError) -> TreeError| {
        child
            .reply(step_timeout, until)
            .map_err(|error| match error {
                EnterError::Silent(time) => TreeError::Silent(time),
                EnterError::Step(source) => failed(source),
                EnterError::NoChild(_) | EnterError::Ended => TreeError::Ended,
            })
    };
    reply(&TreeError::Prepare)?;
    for part in parts {
        let (change, mount) = match &part.change {
            TreeChange::Restrict(attributes) => (Change::Restrict(attributes.bits()), None),
            TreeChange::Attach(new) => (Change::Attach, Some(new.mount.as_fd())),
            TreeChange::TryAttach(new) => (Change::TryAttach, Some(new.mount.as_fd())),
        };
        let path = part.path.clone().into_os_string();
        send(&child.socket, &(path, change), mount.as_slice()).map_err(|_| TreeError::Ended)?;
        reply(&|source| TreeError::Part {
            path: part.path.clone(),
            source,
        })?;
    }
    let mount = reply(&TreeError::Prepare)?.ok_or(TreeError::Ended)?;
    Ok(NewMount { mount })
}

/// A change as the child receives it; a new mount comes as a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Change {
    Restrict(u64),
    Attach,
    TryAttach,
}

/// Attaches the tree in a mount namespace of its own, makes this number of changes, and passes a
/// copy of the tree back. The namespace ends with the child.
///
/// # Errors
/// If the agent is gone.
pub(super) fn serve_tree(socket: &OwnedFd, tree: &OwnedFd, parts: usize) -> io::Result<()> {
    let mut done = attach(tree);
    for _ in 0..parts {
        if done.is_err() {
            break;
        }
        send(socket, &done, &[])?;
        let ((path, to), mut descriptors) = receive(socket)?;
        done = change(tree, path, to, descriptors.pop());
    }
    // The result of the last part, and then of the copy.
    if done.is_ok() {
        send(socket, &done, &[])?;
    }
    let copy = done.and_then(|()| tree_of(tree).map_err(at(Step::CopyTree)));
    let mount = copy.as_ref().ok().map(AsFd::as_fd);
    send(socket, &copy.as_ref().map(drop), mount.as_slice())?;
    // The agent kills this child. If the agent is gone, the read ends.
    let _ = rustix::io::read(socket, &mut [0; 1]);
    Ok(())
}

fn attach(tree: &OwnedFd) -> Done {
    enter_private_mounts()?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, c"", CWD, c"/", flags).map_err(at(Step::AttachTree))
}

fn change(tree: &OwnedFd, path: OsString, change: Change, mount: Option<OwnedFd>) -> Done {
    // No symlink is followed: a container may have written the volume.
    let place = open_without_links(tree, path.as_ref(), OFlags::empty(), ResolveFlags::BENEATH);
    let place = match place.map_err(at(Step::OpenMountPoint)) {
        Err(_) if change == Change::TryAttach => return Ok(()),
        place => place?,
    };
    if let Change::Restrict(bits) = change {
        let attributes = MountAttributes::from_bits(bits);
        return mount_setattr(&place, 0, &adding(attributes))
            .map_err(|error| at(Step::SetAttributes)(errno_of(&error)));
    }
    let mount = mount.ok_or(ReplaceError::Failed(Step::AttachNested, Errno::BADF))?;
    match require_same_type(&place, &mount) {
        Err(ReplaceError::OtherType) if change == Change::TryAttach => return Ok(()),
        compared => compared?,
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(&mount, c"", &place, c"", flags).map_err(at(Step::AttachNested))
}
