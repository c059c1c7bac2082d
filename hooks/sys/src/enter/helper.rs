//! The helper namespace of kernels before 6.5: the new mount is attached to a copy of the
//! container's parent mount there, and propagation puts it beneath the stale one.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::CWD;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags};

use super::clone::NewMount;
use super::message::{EnterStep, Failure, at};

const FROM_DESCRIPTOR: MoveMountFlags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;

/// The mounts of the helper namespace, cloned in the container's: a copy of the folder is a peer of
/// the container's parent mount.
pub(super) struct Helper<'a> {
    name: &'a CStr,
    new: &'a NewMount,
    copy: OwnedFd,
}

impl<'a> Helper<'a> {
    pub(super) fn of(folder: &OwnedFd, name: &'a CStr, new: &'a NewMount) -> Result<Self, Failure> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let copy =
            rustix::mount::open_tree(folder, c"", flags).map_err(at(EnterStep::CopyFolder))?;
        Ok(Self { name, new, copy })
    }

    /// Attaches the copy in the helper namespace, and the new mount to the copy. No path is walked.
    pub(super) fn attach(&self) -> Result<(), Failure> {
        // Otherwise the next steps would themselves propagate to the container.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change(c"/", private).map_err(at(EnterStep::MakePrivate))?;
        rustix::mount::move_mount(&self.copy, c"", CWD, c"/", FROM_DESCRIPTOR)
            .map_err(at(EnterStep::AttachCopy))?;
        rustix::mount::move_mount(&self.new.0, c"", &self.copy, self.name, FROM_DESCRIPTOR)
            .map_err(at(EnterStep::AttachNew))
    }
}
