//! Where the host itself shows a filesystem that a subpath was bound from.
//!
//! A `hostPath` has no folder in the pod: which directory of the host it is stands in no file of the node. But the mount's
//! root is the whole path within its filesystem, and no symlink is in it: from the host's mount of that filesystem the
//! very same path leads to what the kubelet would bind today. So it is with what a sidecar mounts within a volume, and the
//! kubelet binds a sub path of.
//!
//! A filesystem may have many mounts, which show the same files and allow different things. A bind has the attributes of the
//! mount that it was made from: that mount is one of those with the attributes of the subpath's own.

use std::path::Path;

use bindguard_core::evidence::Volume;
use bindguard_core::kubelet::Plugin;
use bindguard_core::mount_table::{MountAttributes, MountEntry};

use crate::handle::Handle;
use crate::mounts::Mounts;

/// How many of the host's mounts are tried: all but the first few are binds of folders, or hidden by others.
const TRIED: usize = 8;

/// A mount of the host, held, in which the root of a subpath's mount lies.
#[derive(Debug)]
pub(super) struct Filesystem {
    /// What it shows.
    pub(super) handle: Handle,
    /// The same as the volume that it stands in for.
    pub(super) volume: Volume,
    /// The attributes that a bind from it needs, where it has others than the subpath's mount. Nobody can tell then what the
    /// kubelet binds from: what either of the two denies is denied.
    pub(super) keep: Option<MountAttributes>,
}

/// The mount of a subpath's filesystem that it was bound from, or one that stands in for that.
pub(super) fn find_filesystem(mount: &MountEntry, mounts: &Mounts) -> Option<Filesystem> {
    find_mount(mount, mounts, |host| host.root.path != mount.root.path)
}

/// The same of the mounts within a volume's directory, which is named as the kernel does. A sub path may be such a mount
/// itself.
pub(super) fn find_filesystem_in(volume: &Path, mount: &MountEntry, mounts: &Mounts) -> Option<Filesystem> {
    find_mount(mount, mounts, |host| host.mount_point != volume && host.mount_point.starts_with(volume))
}

fn find_mount(mount: &MountEntry, mounts: &Mounts, wanted: impl Fn(&MountEntry) -> bool) -> Option<Filesystem> {
    // One reading is for all subpaths of a look: what it says of a mount is asked for again once that mount is held.
    let table = mounts.table().ok()?;
    let mut holding: Vec<&MountEntry> =
        table.entries().iter().filter(|host| holds(host, mount) && wanted(host)).collect();
    holding.sort_by_key(|host| likeness(host, mount));
    holding.into_iter().take(TRIED).find_map(|host| {
        let handle = Handle::of(&host.mount_point).ok()?.wary();
        // By now the path may lead to another mount, one that covers it, say.
        let found = Mounts::default().mount_of(&handle).ok()?;
        let is_the_one = found.is_mount_point
            && found.entry.device == host.device
            && found.entry.root == host.root
            && found.entry.attributes == host.attributes;
        let keep = (host.attributes != mount.attributes).then(|| mount.attributes.with_denied_by(host.attributes));
        is_the_one.then(|| Filesystem { handle, volume: volume(host), keep })
    })
}

/// How far a mount is from being the one that another was bound from, the nearest first: whether it has other attributes, how
/// much it denies beside, whether it is in another peer group (a bind joins that of a shared source), and how little of the
/// filesystem it shows.
fn likeness(host: &MountEntry, mount: &MountEntry) -> (bool, u32, bool, usize) {
    let is_no_peer = host.propagation.peer_group.is_some_and(|group| mount.propagation.peer_group != Some(group));
    (
        host.attributes != mount.attributes,
        host.attributes.denied_beyond(mount.attributes),
        is_no_peer,
        host.root.path.as_os_str().len(),
    )
}

fn holds(host: &MountEntry, mount: &MountEntry) -> bool {
    host.device == mount.device
        && !host.root.deleted
        && mount.root.path.starts_with(&host.root.path)
        // What owners the files seem to have comes with a mount, and cannot be given to another.
        && host.attributes.is_idmapped() == mount.attributes.is_idmapped()
}

fn volume(host: &MountEntry) -> Volume {
    Volume {
        plugin: Plugin::host_path(),
        directory: host.mount_point.clone(),
        device: host.device,
        fs_type: host.fs_type.clone(),
        place: host.root.path.clone(),
        is_mount_point: true,
        is_newer: true,
        layout: Plugin::host_path().layout(),
    }
}
