//! Detaches one mount, and only that mount.

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::handle::Handle;

use super::SwapError;

/// Detaches the very mount that `mount` was opened on, wherever in a stack it lies. Processes that
/// have it open keep it: umount2(2) with `MNT_DETACH`, because a plain umount of a stale mount in
/// use is EBUSY.
///
/// The path given to the kernel is the descriptor's own link in `/proc`, which leads to that mount
/// and no other.
///
/// # Errors
/// The kernel's errors, except that it was detached already.
pub fn detach(mount: &Handle) -> Result<(), SwapError> {
    match rustix::mount::unmount(mount.magic_path(), UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(SwapError::Failed {
            what: "detaching the stale mount",
            source: errno.into(),
        }),
    }
}
