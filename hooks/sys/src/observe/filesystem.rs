//! Where the host itself shows a filesystem that a subpath was bound from.
//!
//! A `hostPath` has no folder in the pod: which directory of the host it is stands in no file of the node. But the mount's
//! root is the whole path within its filesystem, and no symlink is in it: from the host's mount of that filesystem the
//! very same path leads to what the kubelet would bind today. So it is with what a sidecar mounts within a volume, and the
//! kubelet binds a sub path of.

use std::path::Path;

use bindguard_core::evidence::Volume;
use bindguard_core::kubelet::Plugin;
use bindguard_core::mount_table::MountEntry;

use crate::handle::Handle;
use crate::mounts::Mounts;

/// How many of the host's mounts are tried: all but the first few are binds of folders, or hidden by others.
const TRIED: usize = 8;

/// The host's mount of the most of this filesystem in which the mount's root lies, held, and as the volume that it stands
/// in for.
pub(super) fn find_filesystem(mount: &MountEntry, mounts: &Mounts) -> Option<(Handle, Volume)> {
    find_mount(mount, mounts, |host| host.root.path != mount.root.path)
}

/// The same of the mounts within a volume's directory, which is named as the kernel does. A sub path may be such a mount
/// itself.
pub(super) fn find_filesystem_in(volume: &Path, mount: &MountEntry, mounts: &Mounts) -> Option<(Handle, Volume)> {
    find_mount(mount, mounts, |host| host.mount_point != volume && host.mount_point.starts_with(volume))
}

fn find_mount(mount: &MountEntry, mounts: &Mounts, wanted: impl Fn(&MountEntry) -> bool) -> Option<(Handle, Volume)> {
    // One reading is for all subpaths of a look: what it says of a mount is asked for again once that mount is held.
    let table = mounts.table().ok()?;
    let mut holding: Vec<&MountEntry> =
        table.entries().iter().filter(|host| holds(host, mount) && wanted(host)).collect();
    holding.sort_by_key(|host| host.root.path.as_os_str().len());
    holding.into_iter().take(TRIED).find_map(|host| {
        let handle = Handle::of(&host.mount_point).ok()?.wary();
        // By now the path may lead to another mount, one that covers it, say.
        let found = Mounts::default().mount_of(&handle).ok()?;
        let is_the_one = found.is_mount_point && found.entry.device == host.device && found.entry.root == host.root;
        is_the_one.then(|| (handle, volume(host)))
    })
}

fn holds(host: &MountEntry, mount: &MountEntry) -> bool {
    host.device == mount.device && !host.root.deleted && mount.root.path.starts_with(&host.root.path)
}

fn volume(host: &MountEntry) -> Volume {
    Volume {
        plugin: Plugin::host_path(),
        directory: host.mount_point.clone(),
        device: host.device,
        fs_type: host.fs_type.clone(),
        place: host.root.path.clone(),
        is_mount_point: true,
    }
}
