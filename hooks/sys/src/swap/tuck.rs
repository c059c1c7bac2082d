//! The way for kernels before 6.5: let propagation put the new mount below the stale one.
//!
//! A mount that arrives by propagation at a mount point that is taken goes *below* what is there
//! (`attach_recursive_mnt` in the kernel's `fs/namespace.c`). So the new mount is attached to a copy of the parent mount
//! in which the place is free. The copy is a peer of the parent only if the parent is shared; with a private parent
//! nothing arrives, and the caller has to look before it detaches anything.
//!
//! The copy lives in a mount namespace of a thread's own, which ends with the thread and takes the copy along.

use std::io;
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{MountPropagationFlags, MoveMountFlags};

use crate::fault::{self, FaultPoint};
use crate::handle::Handle;

use super::{SwapError, clone_mount};

const STEP: &str = "running a thread in a mount namespace of its own";

/// Attaches a bind of `target` so that it arrives below the mount at `subpath`. `folder` is the folder that holds the
/// subpath's mount point, on the stale mount's parent.
///
/// Returning without an error does not say that it arrived.
///
/// # Errors
/// When the namespace, the copy or the new mount cannot be made.
pub fn attach_tucked(target: &Handle, folder: &Handle, subpath: &Path) -> Result<(), SwapError> {
    let new = clone_mount(target)?;
    let copy = clone_mount(folder)?;
    fault::reach(FaultPoint::Cloned);
    let attach = || {
        unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed("unsharing the mount namespace", errno as i32))?;
        // Otherwise the next step would itself propagate to the host.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).map_err(|e| SwapError::from_errno("making the copy private", e))?;
        fault::reach(FaultPoint::NamespaceUnshared);
        let from_fd = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&copy, "", CWD, folder.path(), from_fd)
            .map_err(|e| SwapError::from_errno("attaching a copy of the parent mount", e))?;
        fault::reach(FaultPoint::CopyAttached);
        rustix::mount::move_mount(&new, "", CWD, subpath, from_fd)
            .map_err(|e| SwapError::from_errno("attaching the new mount to the copy", e))?;
        fault::reach(FaultPoint::Tucked);
        Ok(())
    };
    thread::scope(|scope| {
        let namespace = thread::Builder::new().name("tuck".to_owned()).spawn_scoped(scope, attach);
        let namespace = namespace.map_err(|source| SwapError::Failed { what: STEP, source })?;
        namespace
            .join()
            .unwrap_or_else(|_| Err(SwapError::Failed { what: STEP, source: io::Error::other("it panicked") }))
    })
}

fn failed(what: &'static str, errno: i32) -> SwapError {
    SwapError::from_errno(what, rustix::io::Errno::from_raw_os_error(errno))
}
