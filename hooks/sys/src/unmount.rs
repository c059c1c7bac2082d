//! Unmounts one mount within a time limit.
//!
//! A umount may wait for a silent server, so a separate process calls umount(2). A plain umount(2)
//! fails with EBUSY while a process uses the mount. The mount's id is compared before: another mount
//! may have its place by then.

use std::io;
use std::path::Path;
use std::time::Duration;

use bindguard_core::mount_table::MountId;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use crate::probe::answer_within;

pub use rustix::mount::UnmountFlags;

/// Why a mount was not unmounted.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    #[error("a process uses the mount (EBUSY)")]
    Busy,
    /// The mount point shows a different mount, or is no longer a mount point.
    #[error("another mount is there now")]
    Changed,
    /// A server did not answer.
    #[error("umount(2) did not return in time")]
    Silent,
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Unmounts the mount with this id within a time limit. `mount_point` is the kernel's name of its
/// place: no symlink is followed. `how`: empty, so that a mount in use stays; or `DETACH`, so that
/// the mount goes with all mounts on it, and programs that use the mount keep it.
///
/// # Errors
/// If the mount is in use, is not there any more, or does not answer.
pub fn unmount_within(
    limit: Duration,
    mount_point: &Path,
    id: MountId,
    how: UnmountFlags,
) -> Result<(), UnmountError> {
    let unmounted = answer_within(limit, mount_point, || {
        unmount(mount_point, id, UnmountFlags::NOFOLLOW | how)?;
        Ok(Vec::new())
    });
    let Err(error) = unmounted else { return Ok(()) };
    Err(match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => UnmountError::Busy,
        Some(Errno::STALE | Errno::NOENT) => UnmountError::Changed,
        None if error.kind() == io::ErrorKind::TimedOut => UnmountError::Silent,
        _ => UnmountError::Failed(error),
    })
}

/// An open descriptor of the mount would make the mount busy. So the process goes into the
/// directory above, and names the mount point by its last component. `ESTALE`: the mount's id
/// differs.
fn unmount(mount_point: &Path, id: MountId, how: UnmountFlags) -> Result<(), Errno> {
    let (Some(above), Some(name)) = (mount_point.parent(), mount_point.file_name()) else {
        return Err(Errno::INVAL);
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let above = rustix::fs::openat2(CWD, above, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let at = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(&above, name, at, StatxFlags::MNT_ID)?;
    if found.stx_mnt_id != u64::from(id.0) {
        return Err(Errno::STALE);
    }
    rustix::process::fchdir(&above)?;
    let unmounted = rustix::mount::unmount(name, how);
    // An exiting process closes its pipe before it leaves its directory, whose mount may be the next
    // one to unmount.
    rustix::process::chdir("/")?;
    unmounted
}
