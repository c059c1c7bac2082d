//! The child that completes a tree of new mounts in a mount namespace of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use bindguard_core::mount_table::MountAttributes;
use rustix::fs::{CWD, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use super::child::type_of;
use super::tree_message::{TreeReply, receive_part, send_reply};
use super::tree_part::{TreeChange, TreePart};
use crate::mount_setattr::mount_setattr;
use crate::replace::{NewMount, ReplaceError, Step, at, enter_private_mounts, tree_of};
use crate::target::open_resolved;

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
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    open_resolved(tree, path, flags, resolve).map_err(at(Step::OpenMountPoint))
}
