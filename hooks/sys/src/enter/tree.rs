//! Completes a tree of new mounts that is attached nowhere: attaches nested mounts, and sets the
//! attributes of single mounts below the top.
//!
//! move_mount(2) before Linux 6.15 and mount_setattr(2) refuse a place below the top of such a tree.
//! So a child attaches the tree in a mount namespace of its own, completes the tree there, and
//! passes a copy back. The walk to a place in the tree may wait for a server or a daemon, which is
//! why the child is a process.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountAttributes;
use rustix::fs::{CWD, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use crate::enter::child::type_of;
use crate::enter::helper_process::{
    HelperProcess, RemoteChild, Reply, Work, receive_message, send_message,
};
use crate::enter::is_answered;
use crate::enter::namespace::ContainerNamespace;
use crate::mount_setattr::mount_setattr;
use crate::replace::{NewMount, ReplaceError, Step, at, enter_private_mounts, tree_of};
use crate::target::open_without_links;

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

// The messages between the agent and the child that completes a tree of new mounts.

const RESTRICT: u8 = 0;
const ATTACH: u8 = 1;
const TRY_ATTACH: u8 = 2;

/// Bytes before the path: the kind and the attributes.
const HEAD: usize = 1 + 8;

/// The longest path of the kernel.
const MAX_PATH: usize = 4096;

/// Sends a part.
///
/// # Errors
/// If the child is gone.
pub(super) fn send_part(part: &TreePart, socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let none = MountAttributes::from_bits(0);
    let (kind, attributes, mount) = match &part.change {
        TreeChange::Restrict(attributes) => (RESTRICT, *attributes, None),
        TreeChange::Attach(new) => (ATTACH, none, Some(new.mount.as_fd())),
        TreeChange::TryAttach(new) => (TRY_ATTACH, none, Some(new.mount.as_fd())),
    };
    let mut bytes = vec![kind];
    bytes.extend(attributes.bits().to_le_bytes());
    bytes.extend_from_slice(part.path.as_os_str().as_bytes());
    send_message(socket, &bytes, mount.as_slice())
}

/// Receives a part; `None` if the agent is gone.
pub(super) fn receive_part(socket: BorrowedFd<'_>) -> Option<TreePart> {
    let mut bytes = [0; HEAD + MAX_PATH];
    let (size, mut descriptors) = receive_message(socket, &mut bytes).ok()?;
    part_of(bytes.get(..size)?, descriptors.pop())
}

fn part_of(bytes: &[u8], mount: Option<OwnedFd>) -> Option<TreePart> {
    let (head, path) = bytes.split_at_checked(HEAD)?;
    let (kind, attributes) = head.split_first()?;
    let bits = u64::from_le_bytes(attributes.try_into().ok()?);
    let new = mount.map(|mount| NewMount { mount });
    Some(TreePart {
        path: PathBuf::from(OsStr::from_bytes(path)),
        change: match *kind {
            RESTRICT => TreeChange::Restrict(MountAttributes::from_bits(bits)),
            ATTACH => TreeChange::Attach(new?),
            TRY_ATTACH => TreeChange::TryAttach(new?),
            _ => return None,
        },
    })
}

#[derive(Debug)]
pub(super) enum TreeReply {
    Done,
    Tree(OwnedFd),
    /// A step failed: nothing follows.
    Failed(ReplaceError),
}

/// Sends an answer. If the agent is gone, the answer is not needed.
pub(super) fn send_reply(socket: BorrowedFd<'_>, reply: &TreeReply) {
    let (done, tree) = match reply {
        TreeReply::Done => (Ok(()), None),
        TreeReply::Tree(tree) => (Ok(()), Some(tree.as_fd())),
        TreeReply::Failed(error) => (Err(*error), None),
    };
    let _ = send_message(socket, &Reply(done).to_bytes(), tree.as_slice());
}

/// Receives an answer; `None` if the child ended.
pub(super) fn receive_reply(socket: BorrowedFd<'_>) -> Option<TreeReply> {
    let mut bytes = [0; Reply::SIZE];
    let (size, mut descriptors) = receive_message(socket, &mut bytes).ok()?;
    let reply = Reply::from_bytes(bytes).filter(|_| size == Reply::SIZE)?;
    Some(match (reply.0, descriptors.pop()) {
        (Ok(()), Some(tree)) => TreeReply::Tree(tree),
        (Ok(()), None) => TreeReply::Done,
        (Err(error), _) => TreeReply::Failed(error),
    })
}

// The changes that complete a tree of new mounts.

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

// The child that completes a tree of new mounts in a mount namespace of its own.

type Done = Result<(), ReplaceError>;

/// Attaches the tree, makes this number of changes, and passes a copy of the tree back. The
/// namespace ends with the child.
pub(super) fn serve_tree(socket: &OwnedFd, tree: &OwnedFd, parts: u16) {
    let completed = attach(tree).and_then(|()| {
        send_reply(socket.as_fd(), &TreeReply::Done);
        for _ in 0..parts {
            let Some(part) = receive_part(socket.as_fd()) else {
                return Ok(None);
            };
            change(tree, part)?;
            send_reply(socket.as_fd(), &TreeReply::Done);
        }
        tree_of(tree).map(Some).map_err(at(Step::CopyTree))
    });
    match completed {
        Ok(Some(tree)) => send_reply(socket.as_fd(), &TreeReply::Tree(tree)),
        // The agent is gone.
        Ok(None) => {}
        Err(error) => send_reply(socket.as_fd(), &TreeReply::Failed(error)),
    }
    // The agent kills this child. If the agent is gone, the read ends.
    let _ = rustix::io::read(socket, &mut [0; 1]);
}

fn attach(tree: &OwnedFd) -> Done {
    enter_private_mounts()?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, c"", CWD, c"/", flags).map_err(at(Step::AttachTree))
}

fn change(tree: &OwnedFd, part: TreePart) -> Done {
    match part.change {
        TreeChange::Restrict(attributes) => restrict(tree, &part.path, attributes),
        TreeChange::Attach(new) => attach_below(tree, &part.path, &new),
        TreeChange::TryAttach(new) => match attach_below(tree, &part.path, &new) {
            Err(ReplaceError::OtherType | ReplaceError::Failed(Step::OpenMountPoint, _)) => Ok(()),
            attached => attached,
        },
    }
}

fn restrict(tree: &OwnedFd, path: &Path, attributes: MountAttributes) -> Done {
    let mount = place(tree, path)?;
    mount_setattr(&mount, attributes).map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        at(Step::SetAttributes)(errno)
    })
}

/// Compares the types of the place and the mount: the kernel itself distinguishes only directories.
fn attach_below(tree: &OwnedFd, path: &Path, new: &NewMount) -> Done {
    let place = place(tree, path)?;
    let types = type_of(&place).and_then(|there| Ok((there, type_of(&new.mount)?)));
    let (there, ours) = types.map_err(at(Step::CompareTypes))?;
    if there != ours {
        return Err(ReplaceError::OtherType);
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(&new.mount, c"", &place, c"", flags).map_err(at(Step::AttachNested))
}

/// Opens a place in the tree. No symlink is followed: a container may have written the volume.
fn place(tree: &OwnedFd, path: &Path) -> Result<OwnedFd, ReplaceError> {
    open_without_links(tree, path, OFlags::empty(), ResolveFlags::BENEATH)
        .map_err(at(Step::OpenMountPoint))
}

#[cfg(test)]
mod tree_message_tests {
    use std::fs::File;

    use super::*;
    use crate::enter::helper_process::sockets;
    use crate::replace::{NewMount, Step};

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let (ours, theirs) = sockets().unwrap();
        let mount = || NewMount {
            mount: File::open("/").unwrap().into(),
        };
        let read_only = MountAttributes::from_options("ro".as_ref());
        for (change, kind) in [
            (TreeChange::Restrict(read_only), "Restrict"),
            (TreeChange::Attach(mount()), "Attach"),
            (TreeChange::TryAttach(mount()), "TryAttach"),
        ] {
            let path = "a b/c".into();
            send_part(&TreePart { path, change }, ours.as_fd()).unwrap();
            let received = receive_part(theirs.as_fd()).unwrap();
            assert_eq!(received.path, PathBuf::from("a b/c"));
            assert!(
                format!("{:?}", received.change).starts_with(kind),
                "{kind}: {received:?}"
            );
        }
        let error = ReplaceError::Failed(Step::OpenMountPoint, Errno::LOOP);
        send_reply(ours.as_fd(), &TreeReply::Failed(error));
        let failed = receive_reply(theirs.as_fd());
        assert!(matches!(failed, Some(TreeReply::Failed(it)) if it == error));
        send_reply(
            ours.as_fd(),
            &TreeReply::Tree(File::open("/").unwrap().into()),
        );
        let tree = receive_reply(theirs.as_fd());
        assert!(matches!(tree, Some(TreeReply::Tree(_))));
        assert!(part_of(&[ATTACH; HEAD], None).is_none());
        drop(ours);
        assert!(receive_part(theirs.as_fd()).is_none());
    }
}
