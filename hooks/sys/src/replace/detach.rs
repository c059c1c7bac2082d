//! Detaches one mount, and only that mount.

use std::path::Path;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::handle::Handle;

use super::step::{ReplaceError, Step};

/// Detaches the very mount that `mount` was opened on, wherever in a stack it lies. Processes that
/// have it open keep it: umount2(2) with `MNT_DETACH`, because a plain umount of a stale mount in
/// use is EBUSY.
///
/// # Errors
/// The kernel's errors, except that it was detached already.
pub fn detach(mount: &Handle) -> Result<(), ReplaceError> {
    detach_link(&mount.magic_path())
}

/// The same by the link of a descriptor in `/proc`, which leads to that mount and no other.
pub(crate) fn detach_link(link: &Path) -> Result<(), ReplaceError> {
    match rustix::mount::unmount(link, UnmountFlags::DETACH) {
        // EINVAL: the kubelet removed the file beneath, and the kernel detached the mount for that.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(ReplaceError::Failed(Step::Detach, errno)),
    }
}
