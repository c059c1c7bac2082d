//! The host's own mount of the filesystem that a subpath was bound from.
//!
//! A `hostPath` has no directory in the pod, and no file of the node records which host directory
//! it is. But the mount's root is the whole path within its filesystem, without symlinks. From the
//! host's mount of that filesystem, the same path leads to the file that the kubelet would bind
//! today. The same applies when a sidecar mounts a filesystem within a volume and the kubelet binds
//! a sub path of that filesystem.
//!
//! A filesystem may have many mounts, which show the same files with different attributes. A bind
//! has the attributes of the mount that it was made from. So the source mount has the attributes of
//! the subpath's mount.

use std::path::Path;

use bindguard_core::evidence::Volume;
use bindguard_core::kubelet::Plugin;
use bindguard_core::mount_table::{MountAttributes, MountEntry};

use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::read_file::open_without_waiting;

/// Limit of host mounts to try: all but the first few are binds of directories, or hidden by
/// others. One of these may be below the mount of a server that does not answer.
const TRIED: usize = 8;

/// An open mount of the host that contains the root of a subpath's mount.
#[derive(Debug)]
pub(super) struct Filesystem {
    /// The root of this mount.
    pub(super) handle: Handle,
    /// This mount in the form of a volume.
    pub(super) volume: Volume,
    /// The attributes that a bind from it needs, if its own differ from those of the subpath's
    /// mount. The mount that the kubelet binds from is unknown then, so everything that either of
    /// the two denies is denied.
    pub(super) keep: Option<MountAttributes>,
}

/// The mount that the subpath was bound from, or another mount of the same filesystem.
pub(super) fn find_filesystem(mount: &MountEntry, mounts: &Mounts) -> Option<Filesystem> {
    find_mount(mount, mounts, |host| host.root.path != mount.root.path)
}

/// The same for the mounts within a volume's directory, which is given by the kernel's path. A sub
/// path may be such a mount itself.
pub(super) fn find_filesystem_in(
    volume: &Path,
    mount: &MountEntry,
    mounts: &Mounts,
) -> Option<Filesystem> {
    find_mount(mount, mounts, |host| {
        host.mount_point != volume && host.mount_point.starts_with(volume)
    })
}

fn find_mount(
    mount: &MountEntry,
    mounts: &Mounts,
    wanted: impl Fn(&MountEntry) -> bool,
) -> Option<Filesystem> {
    // A single read of the table serves all subpaths: the entry of a mount is checked again once
    // the mount is open.
    let table = mounts.table().ok()?;
    let mut holding: Vec<&MountEntry> = table
        .entries()
        .iter()
        .filter(|host| holds(host, mount) && wanted(host))
        .collect();
    holding.sort_by_key(|host| likeness(host, mount));
    let earlier = Mounts::default();
    holding.into_iter().take(TRIED).find_map(|host| {
        let is_local = |handle: &Handle| earlier.is_local(handle);
        let handle = open_without_waiting(&host.mount_point, is_local).ok()?;
        let handle = handle.unqueried();
        // By now the path may lead to a different mount, such as a mount that covers the path.
        let found = Mounts::default().mount_of(&handle).ok()?;
        let is_the_one = found.is_mount_point
            && found.entry.device == host.device
            && found.entry.root == host.root
            && found.entry.attributes == host.attributes;
        let keep = (host.attributes != mount.attributes)
            .then(|| mount.attributes.with_denied_by(host.attributes));
        is_the_one.then(|| Filesystem {
            handle,
            volume: volume(host),
            keep,
        })
    })
}

/// The distance of the mount `host` from the source of the bind `mount`. The criteria, in this
/// order:
/// * different attributes
/// * the number of attributes that only `host` denies
/// * a different peer group: a bind joins the peer group of a shared source
/// * the length of the root: a longer root shows less of the filesystem
fn likeness(host: &MountEntry, mount: &MountEntry) -> (bool, u32, bool, usize) {
    let is_no_peer = host
        .propagation
        .peer_group
        .is_some_and(|group| mount.propagation.peer_group != Some(group));
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
        // An id mapping belongs to its mount, and cannot be given to another mount.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use bindguard_testing::{Folder, Fuse, bind, mount_tmpfs, own_namespace};

    use super::*;
    use crate::mounts::read_mount_table;

    /// The first mount of the filesystem is below a FUSE mount whose daemon does not answer.
    #[test]
    fn a_mount_below_a_silent_daemon_is_left_out() {
        if !own_namespace() {
            return;
        }
        let Some(mut fuse) = Fuse::mounted() else {
            return;
        };
        let folder = Folder::new();
        let [hidden, visible, subpath] =
            ["silent/hidden", "visible", "subpath"].map(|name| folder.path().join(name));
        fs::create_dir_all(&hidden).unwrap();
        fs::create_dir(&visible).unwrap();
        fs::write(&subpath, "").unwrap();
        mount_tmpfs(&hidden);
        fs::write(hidden.join("file"), "").unwrap();
        bind(&hidden, &visible);
        bind(&hidden.join("file"), &subpath);
        bind(&fuse.path(), hidden.parent().unwrap());
        let (found, received) = channel();
        let finding = thread::spawn(move || {
            let table = read_mount_table().unwrap();
            let mount = table.stack_at(&subpath).next().unwrap();
            let filesystem = find_filesystem(mount, &Mounts::default());
            let _ = found.send(filesystem.map(|it| it.volume.directory));
        });
        let directory = received.recv_timeout(Duration::from_secs(20));
        // Ends a walk that waits.
        fuse.device = None;
        finding.join().unwrap();
        assert_eq!(directory, Ok(Some(visible)));
    }
}
