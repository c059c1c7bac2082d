//! `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer: the kernel's own way, see move_mount(2).

use std::os::fd::AsFd;

use rustix::mount::MoveMountFlags;

use super::new_mount::NewMount;
use super::step::{ReplaceError, Step, at};

/// Attaches a new mount directly below `stale`, the mount on top.
///
/// Until `stale` is detached, the new file is its mount point, and every unlink of it fails with
/// EBUSY. Detach at once.
///
/// # Errors
/// [`ReplaceError::is_target_gone`] when the file was removed meanwhile,
/// [`ReplaceError::is_not_possible`] on older kernels.
pub fn attach_beneath(new: &NewMount, stale: impl AsFd) -> Result<(), ReplaceError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_BENEATH;
    rustix::mount::move_mount(&new.mount, c"", stale, c"", flags).map_err(at(Step::AttachBeneath))
}
