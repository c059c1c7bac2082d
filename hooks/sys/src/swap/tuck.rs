//! The way for kernels before 6.5: let propagation put the new mount below the stale one.
//!
//! A mount that propagates to an occupied mount point goes *below* the mount there
//! (`attach_recursive_mnt` in the kernel's `fs/namespace.c`). So the new mount is attached to a
//! copy of the parent mount in which the place is free. The copy is a peer of the parent only if
//! the parent is shared. With a private parent nothing arrives, and the caller must check before it
//! detaches anything.
//!
//! The copy lives in a mount namespace of a thread's own, which ends with the thread and takes the
//! copy along.
//!
//! As a peer, the copy also receives the mount of another repairer. A mount that is attached on top
//! of that one would propagate into the volume, whose file both show: it is detached at once, with
//! all that it propagated to.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;

use bindguard_core::mount_table::{MountAttributes, MountId};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{MountPropagationFlags, MoveMountFlags};

use crate::fault::{self, FaultPoint};
use crate::handle::Handle;
use crate::mounts::Mounts;

use super::SwapError;
use super::clone::{clone_mount, clone_remounted};
use super::detach::detach;

const STEP: &str = "running a thread in a mount namespace of its own";

/// A new mount, and the attributes that it has yet to get.
struct New {
    mount: OwnedFd,
    lacks: Option<Lacking>,
}

/// Attributes that this kernel gives only to an attached mount, and a copy of the parent mount to
/// attach it to.
struct Lacking {
    attributes: MountAttributes,
    scratch: OwnedFd,
}

/// Attaches a bind of `target` so that it arrives below the mount at `subpath`. `folder` is the
/// folder that holds the subpath's mount point, on the stale mount's parent. The bind has the
/// attributes of the mount that `target` is opened on, or those to `keep`.
///
/// Success does not mean that it arrived.
///
/// # Errors
/// When the namespace, the copy or the new mount cannot be made.
pub fn attach_tucked(
    target: &Handle,
    folder: &Handle,
    subpath: &Path,
    keep: Option<MountAttributes>,
) -> Result<(), SwapError> {
    let new = New::of(target, folder, keep)?;
    let copy = clone_mount(folder, None)?;
    fault::reach(FaultPoint::Cloned);
    let attach = || {
        unshare(CloneFlags::CLONE_NEWNS)
            .map_err(|errno| failed("unsharing the mount namespace", errno as i32))?;
        // Otherwise the next step would itself propagate to the host.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)
            .map_err(|e| SwapError::from_errno("making the copy private", e))?;
        fault::reach(FaultPoint::NamespaceUnshared);
        let new = new.whole(folder.path(), subpath)?;
        attach_at(&copy, folder.path(), "attaching a copy of the parent mount")?;
        fault::reach(FaultPoint::CopyAttached);
        attach_directly(&new, subpath, folder.path())?;
        fault::reach(FaultPoint::Tucked);
        Ok(())
    };
    thread::scope(|scope| {
        let namespace = thread::Builder::new()
            .name("tuck".to_owned())
            .spawn_scoped(scope, attach);
        let namespace = namespace.map_err(|source| SwapError::Failed { what: STEP, source })?;
        namespace.join().unwrap_or_else(|_| {
            Err(SwapError::Failed {
                what: STEP,
                source: io::Error::other("it panicked"),
            })
        })
    })
}

impl New {
    fn of(
        target: &Handle,
        folder: &Handle,
        keep: Option<MountAttributes>,
    ) -> Result<Self, SwapError> {
        match (clone_mount(target, keep), keep) {
            (Err(SwapError::NotPossible { .. }), Some(attributes)) => {
                let lacks = Some(Lacking {
                    attributes,
                    scratch: clone_mount(folder, None)?,
                });
                Ok(Self {
                    mount: clone_mount(target, None)?,
                    lacks,
                })
            }
            (mount, _) => Ok(Self {
                mount: mount?,
                lacks: None,
            }),
        }
    }

    /// The mount with its attributes. It gets them on a private copy: only the copy that is
    /// attached afterwards propagates.
    fn whole(&self, folder: &Path, subpath: &Path) -> Result<OwnedFd, SwapError> {
        let Some(Lacking {
            attributes,
            scratch,
        }) = &self.lacks
        else {
            return self
                .mount
                .try_clone()
                .map_err(|error| SwapError::from_io(STEP, error));
        };
        attach_at(
            scratch,
            folder,
            "attaching a second copy of the parent mount",
        )?;
        rustix::mount::mount_change(folder, MountPropagationFlags::PRIVATE)
            .map_err(|errno| SwapError::from_errno("making the second copy private", errno))?;
        attach_at(
            &self.mount,
            subpath,
            "attaching the new mount to the second copy",
        )?;
        clone_remounted(subpath, *attributes)
    }
}

/// Attaches a mount at `subpath`, on the mount at `folder` and on no other.
fn attach_directly(new: &OwnedFd, subpath: &Path, folder: &Path) -> Result<(), SwapError> {
    let copy = mount_id(&open(folder)?)?;
    if mount_id(&open(subpath)?)? != copy {
        return Err(SwapError::Overtaken);
    }
    attach_at(new, subpath, "attaching the new mount to the copy")?;
    let attached = open(subpath)?;
    let parent = Mounts::from_mountinfo()
        .mount_of(&attached)
        .ok()
        .and_then(|mount| mount.parent);
    if parent.is_some_and(|parent| parent.id == copy) {
        return Ok(());
    }
    detach(&attached)?;
    Err(SwapError::Overtaken)
}

fn open(path: &Path) -> Result<Handle, SwapError> {
    Handle::of(path).map_err(|error| SwapError::Failed {
        what: STEP,
        source: io::Error::other(error),
    })
}

fn mount_id(handle: &Handle) -> Result<MountId, SwapError> {
    handle.mount_id().map_err(|error| SwapError::Failed {
        what: STEP,
        source: io::Error::other(error),
    })
}

fn attach_at(mount: &OwnedFd, path: &Path, step: &'static str) -> Result<(), SwapError> {
    rustix::mount::move_mount(
        mount,
        "",
        CWD,
        path,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(|errno| SwapError::from_errno(step, errno))
}

fn failed(what: &'static str, errno: i32) -> SwapError {
    SwapError::from_errno(what, rustix::io::Errno::from_raw_os_error(errno))
}
