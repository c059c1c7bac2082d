//! Detaches a mount by an open descriptor.

use std::path::Path;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::handle::Handle;

use super::step::{ReplaceError, Step};

/// Detaches the very mount that `mount` was opened on, at any position in a stack. `MNT_DETACH` of
/// umount2(2) keeps the mount for processes with open files; a plain umount of a stale mount in use
/// is EBUSY.
///
/// # Errors
/// The kernel's errors, except for a mount that is already detached.
pub fn detach(mount: &Handle) -> Result<(), ReplaceError> {
    detach_link(&mount.magic_path())
}

/// Detaches exactly the mount to which the link of a descriptor in `/proc` leads.
pub(crate) fn detach_link(link: &Path) -> Result<(), ReplaceError> {
    match rustix::mount::unmount(link, UnmountFlags::DETACH) {
        // EINVAL: the kubelet removed the file beneath, and the kernel detached the mount for that.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(ReplaceError::Failed(Step::Detach, errno)),
    }
}
