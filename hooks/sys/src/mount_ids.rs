//! The order in which mounts were made, by their unique ids.

use crate::handle::Handle;
use crate::replace::copy_of;

/// A unique id that is greater than the id of every mount of this moment, and less than the id of
/// every later mount. `None` before Linux 6.8, and without the right to mount.
pub fn next_mount_id() -> Option<u64> {
    // A new mount that is attached nowhere.
    let proc = Handle::of("/proc".as_ref()).ok()?;
    let copy = Handle::from_fd(copy_of(&proc).ok()?, "/proc".into());
    copy.unique_mount_id().ok()?
}
