//! The helper namespace of kernels before 6.5: the new mount is attached to a copy of the
//! container's parent mount there, and propagation puts it beneath the stale one.
//!
//! Linux 5.10 and 5.11 give attributes only to an attached mount. There the new mount is attached
//! to a second, private copy first, remounted, and cloned.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::CWD;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};

use super::clone::NewMount;
use super::message::{EnterStep, Failure, at};

const FROM_DESCRIPTOR: MoveMountFlags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;

/// The mounts of the helper namespace, cloned in the container's: a copy of the folder is a peer of
/// the container's parent mount.
pub(super) struct Helper<'a> {
    name: &'a CStr,
    new: &'a NewMount,
    copy: OwnedFd,
    /// A second copy, if the new mount lacks attributes.
    scratch: Option<OwnedFd>,
}

impl<'a> Helper<'a> {
    pub(super) fn of(folder: &OwnedFd, name: &'a CStr, new: &'a NewMount) -> Result<Self, Failure> {
        let copied =
            || clone(folder, c"", OpenTreeFlags::AT_EMPTY_PATH).map_err(at(EnterStep::CopyFolder));
        let scratch = new.lacks.map(|_| copied()).transpose()?;
        Ok(Self {
            name,
            new,
            copy: copied()?,
            scratch,
        })
    }

    /// Attaches the copy in the helper namespace, and the new mount to the copy. No path is walked.
    pub(super) fn attach(&self) -> Result<(), Failure> {
        // Otherwise the next steps would themselves propagate to the container.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change(c"/", private).map_err(at(EnterStep::MakePrivate))?;
        let remounted = match self.scratch.as_ref().zip(self.new.lacks) {
            Some((scratch, lacks)) => Some(self.remounted(scratch, lacks)?),
            None => None,
        };
        attach_at_root(&self.copy)?;
        let new = remounted.as_ref().unwrap_or(&self.new.mount);
        rustix::mount::move_mount(new, c"", &self.copy, self.name, FROM_DESCRIPTOR)
            .map_err(at(EnterStep::AttachNew))
    }

    /// A clone of the new mount with its attributes.
    fn remounted(&self, scratch: &OwnedFd, lacks: MountFlags) -> Result<OwnedFd, Failure> {
        attach_at_root(scratch)?;
        rustix::process::fchdir(scratch).map_err(at(EnterStep::MakePrivate))?;
        rustix::mount::mount_change(c".", MountPropagationFlags::PRIVATE)
            .map_err(at(EnterStep::MakePrivate))?;
        rustix::mount::move_mount(&self.new.mount, c"", scratch, self.name, FROM_DESCRIPTOR)
            .map_err(at(EnterStep::AttachNew))?;
        rustix::mount::mount_remount(self.name, MountFlags::BIND | lacks, c"")
            .map_err(at(EnterStep::Remount))?;
        // Otherwise it stays a peer of the host's mount until its propagation is set.
        rustix::mount::mount_change(self.name, MountPropagationFlags::PRIVATE)
            .map_err(at(EnterStep::Remount))?;
        clone(CWD, self.name, OpenTreeFlags::empty()).map_err(at(EnterStep::Remount))
    }
}

fn attach_at_root(copy: &OwnedFd) -> Result<(), Failure> {
    rustix::mount::move_mount(copy, c"", CWD, c"/", FROM_DESCRIPTOR)
        .map_err(at(EnterStep::AttachCopy))
}

fn clone(
    directory: impl AsFd,
    path: &CStr,
    more: OpenTreeFlags,
) -> Result<OwnedFd, rustix::io::Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | more;
    rustix::mount::open_tree(directory, path, flags)
}
