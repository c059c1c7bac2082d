//! The way for kernels before 6.5: let propagation put the new mount below the stale mount.
//!
//! A mount that propagates to an occupied mount point goes *below* the mount there
//! (`attach_recursive_mnt` in the kernel's `fs/namespace.c`). So the new mount is attached to a
//! copy of the parent mount in which the place is free. The copy is a peer of the parent only if
//! the parent is shared. With a private parent nothing arrives, and the caller must check before it
//! detaches anything.
//!
//! The copy lives in a mount namespace of its own, which takes the copy along when it ends: that
//! umount does not propagate. On the host a thread has that namespace.
//!
//! As a peer, the copy also receives the mount of another repairer. A new mount on top would
//! propagate into the volume, because both mounts show the volume's file. Then the new mount is
//! detached at once, with its propagated copies. In a container a lock keeps other repairers away.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::{panic, thread};

use bindguard_core::mount_table::MountId;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags};

use crate::failure::errno_of;
use crate::fault::{self, FaultPoint};
use crate::handle::Handle;
use crate::mounts::Mounts;

use super::new_mount::{NewMount, copy_of};
use crate::replace::detach;
use crate::replace::{ReplaceError, Step, at};

/// A copy of the mount of a folder: a peer, if that mount is shared.
#[derive(Debug)]
pub(crate) struct FolderCopy(OwnedFd);

impl FolderCopy {
    /// A copy that is attached nowhere.
    pub(crate) fn of(folder: impl AsFd) -> Result<Self, ReplaceError> {
        copy_of(folder).map(Self).map_err(at(Step::CopyFolder))
    }

    /// Attaches it in the private mount namespace of the calling thread, without a walk along a
    /// path.
    pub(crate) fn attach(&self) -> Result<(), ReplaceError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&self.0, c"", CWD, c"/", flags).map_err(at(Step::AttachCopy))
    }

    /// Attaches a new mount at a name in the folder, from where it propagates.
    pub(crate) fn attach_new(&self, new: &NewMount, name: &OsStr) -> Result<(), ReplaceError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&new.mount, c"", &self.0, name, flags)
            .map_err(at(Step::AttachNew))
    }

    /// Attaches by the ordinary move_mount(2): sound only if the place has no mount before and
    /// during the call.
    fn attach_directly(&self, new: &NewMount, name: &OsStr) -> Result<(), ReplaceError> {
        let copy = self.mount_of(OsStr::new("."))?.1;
        if self.mount_of(name)?.1 != copy {
            return Err(ReplaceError::Overtaken);
        }
        self.attach_new(new, name)?;
        let (attached, _) = self.mount_of(name)?;
        let parent = Mounts::from_mountinfo()
            .mount_of(&attached)
            .ok()
            .and_then(|mount| mount.parent);
        if parent.is_some_and(|parent| parent.id == copy) {
            return Ok(());
        }
        detach(&attached)?;
        Err(ReplaceError::Overtaken)
    }

    /// The top of the mounts at a name in the folder.
    fn mount_of(&self, name: &OsStr) -> Result<(Handle, MountId), ReplaceError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened =
            rustix::fs::openat(&self.0, name, flags, Mode::empty()).map_err(at(Step::AttachNew))?;
        let handle = Handle::from_fd(opened, PathBuf::from(name));
        let id = handle.mount_id();
        let id = id.map_err(|error| at(Step::CompareCopy)(errno_of(&error.source)))?;
        Ok((handle, id))
    }
}

/// Attaches a new mount of the host so that it arrives below the mount at `name`. `folder` is the
/// folder of that mount point, on the stale mount's parent.
///
/// The call can succeed although the mount did not arrive: check the table.
///
/// # Errors
/// When the namespace or the copy cannot be made, or another repairer is at work.
pub fn attach_tucked(new: &NewMount, folder: &Handle, name: &OsStr) -> Result<(), ReplaceError> {
    let copy = FolderCopy::of(folder)?;
    let attach = || {
        enter_private_mounts()?;
        fault::reach(FaultPoint::NamespaceUnshared);
        copy.attach()?;
        fault::reach(FaultPoint::CopyAttached);
        copy.attach_directly(new, name)?;
        fault::reach(FaultPoint::Tucked);
        Ok(())
    };
    thread::scope(|scope| {
        let namespace = thread::Builder::new()
            .name("tuck".to_owned())
            .spawn_scoped(scope, attach)
            .map_err(|error| at(Step::Unshare)(errno_of(&error)))?;
        namespace
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
}

/// Moves the calling thread into a mount namespace of its own, whose mounts are private: otherwise a
/// mount on one of them would propagate to the namespace before.
pub(crate) fn enter_private_mounts() -> Result<(), ReplaceError> {
    unshare(CloneFlags::CLONE_NEWNS)
        .map_err(|errno| at(Step::Unshare)(Errno::from_raw_os_error(errno as i32)))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change(c"/", private).map_err(at(Step::MakePrivate))
}
