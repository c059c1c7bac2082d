//! Unmounts a root filesystem, without reading the mount table.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::step::{StepError, failed};

/// The number of attempts to unmount a busy root filesystem before it is only detached.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Unmounts, and removes the mount point. If a bundle still has one, containerd 2 reads the node's
/// whole mount table before it removes the bundle, see `UnmountRecursive` in its `mount` package.
pub(super) fn unmount_and_remove(rootfs: &Path) -> Result<(), StepError> {
    unmount_all(rootfs)?;
    // A directory with files in it is not only a mount point, and stays.
    let _ = fs::remove_dir(rootfs);
    Ok(())
}

/// Unmounts until nothing is mounted there; a filesystem that stays busy is only detached.
pub(super) fn unmount_all(rootfs: &Path) -> Result<(), StepError> {
    let mut busy = 0;
    loop {
        let lazy = if busy > BUSY_TRIES {
            UnmountFlags::DETACH
        } else {
            UnmountFlags::empty()
        };
        match unmount(rootfs, lazy | UnmountFlags::NOFOLLOW) {
            // There may be a further mount underneath.
            Ok(()) => {}
            // EINVAL: nothing is mounted on the root filesystem's path.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(Errno::BUSY) if busy <= BUSY_TRIES => {
                busy += 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(errno) => return Err(failed(format!("unmount {}", rootfs.display()))(errno)),
        }
    }
}
