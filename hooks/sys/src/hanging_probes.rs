//! Remembers probes that hang: no filesystem is probed again while its last probe hangs.
//!
//! A process whose request a FUSE daemon took ends only with the answer. Each further probe of the
//! filesystem would add such a process, for as long as the daemon is silent. So the process of a
//! silent probe is remembered until its end, and until then the filesystem counts as silent.
//!
//! The device names the filesystem: a volume that is mounted anew has a new device and is probed at
//! once. A hanging process keeps the device's number in use. Local filesystems do not count.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bindguard_core::mount_table::Device;
use bindguard_core::paths::{below, lies_in};

use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::poll::is_readable;
use crate::separate_process::SeparateProcess;

/// The filesystems with a hanging probe, and the pidfd of the probe.
static HANGING: Mutex<Vec<(Device, OwnedFd)>> = Mutex::new(Vec::new());

/// The filesystem of a path that is on a server or a daemon, by the part of the path that the
/// kernel has in its cache: the root of a mount always is. `None` before Linux 5.12, and if another
/// mount is in the rest of the path: either filesystem may be the hanging filesystem.
pub(crate) fn filesystem_of(path: &Path, mounts: &Mounts) -> Option<Device> {
    let cached = |known| Some((known, Handle::cached(known)?));
    let (known, handle) = path.ancestors().find_map(cached)?;
    let handle = handle.unqueried();
    let mount = mounts.mount_of(&handle).ok()?.entry;
    let is_served = !mount.fs_type.is_local();
    (is_served && !has_mount_between(path, known, &handle, mounts)).then_some(mount.device)
}

fn has_mount_between(path: &Path, known: &Path, handle: &Handle, mounts: &Mounts) -> bool {
    if path == known {
        return false;
    }
    let (Some(rest), Ok(from), Ok(table)) =
        (below(path, known), handle.resolved_path(), mounts.table())
    else {
        return true;
    };
    let end = from.join(rest);
    let mut entries = table.entries().iter().map(|mount| &mount.mount_point);
    entries.any(|place| *place != from && lies_in(place, &from) && lies_in(&end, place))
}

/// True if no probe hangs: then nothing need be known of a path.
pub(crate) fn is_empty() -> bool {
    hanging().is_empty()
}

/// True if a probe of the filesystem hangs.
pub(crate) fn contains(filesystem: Option<Device>) -> bool {
    filesystem.is_some_and(|device| hanging().iter().any(|(known, _)| *known == device))
}

/// Ends the process of a silent probe, and remembers that process until its end.
pub(crate) fn add(filesystem: Option<Device>, process: SeparateProcess) {
    let process = process.kill();
    if let Some(hanging_process) = filesystem.zip(process) {
        hanging().push(hanging_process);
    }
}

fn hanging() -> MutexGuard<'static, Vec<(Device, OwnedFd)>> {
    let mut hanging = HANGING.lock().unwrap_or_else(PoisonError::into_inner);
    hanging.retain(|(_, process)| !is_readable(process.as_fd(), Duration::ZERO));
    hanging
}
