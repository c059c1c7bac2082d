//! `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer: the kernel's own way, see move_mount(2).

use bindguard_core::mount_table::MountAttributes;
use rustix::mount::MoveMountFlags;

use crate::fault::{self, FaultPoint};
use crate::handle::Handle;

use super::SwapError;
use super::clone::clone_mount;

/// Attaches a bind of `target` directly below `stale`, the mount on top.
///
/// It has the attributes of the mount that `target` is opened on, or those to `keep`.
///
/// Until `stale` is detached, `target` is its mount point, and every unlink of it fails with EBUSY.
/// Detach at once.
///
/// # Errors
/// [`SwapError::TargetGone`] when the target was removed meanwhile, [`SwapError::NotPossible`] on
/// older kernels.
pub fn attach_beneath(
    target: &Handle,
    stale: &Handle,
    keep: Option<MountAttributes>,
) -> Result<(), SwapError> {
    let new = clone_mount(target, keep)?;
    fault::reach(FaultPoint::Cloned);
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_BENEATH;
    rustix::mount::move_mount(new, "", stale, "", flags)
        .map_err(|errno| SwapError::from_errno("mounting beneath the stale mount", errno))
}
