//! The origin of a subpath's bind: its volume's directory, a mount within that, or a mount of the
//! host.
//!
//! Nearly always it is the first directory that has the volume's name, and the search ends there.
//! Otherwise every directory of that name is compared with the subpath's mount, then the mounts
//! within them.
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

use std::rc::Rc;

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, SubpathMount, Volume};
use bindguard_core::judge::{Fit, PathInVolume};
use bindguard_core::kubelet::{Plugin, VolumeLayout, VolumeSubpath};
use bindguard_core::mount_table::{MountAttributes, MountEntry};

use crate::handle::Handle;
use crate::mounts::{MountError, Mounts};
use crate::observe::volume_directory::HeldVolumeDirectory;
use crate::read_file::open_without_waiting;
use crate::target::current_payload;

/// Limit of host mounts to try: all but the first few are binds of directories, or hidden by
/// others. One of these may be below the mount of a server that does not answer.
const TRIED: usize = 8;

/// The origin that a subpath is compared with.
#[derive(Debug)]
pub(super) struct SubpathOrigin {
    /// The volume, or the host's mount in place of the volume.
    pub(super) volume: Observed<Volume>,
    /// The folder of the volume, when the subpath was bound from that.
    pub(super) directory: Option<Rc<HeldVolumeDirectory>>,
    filesystem: Option<Filesystem>,
}

/// An open mount of the host that contains the root of a subpath's mount.
#[derive(Debug)]
struct Filesystem {
    /// The root of this mount.
    handle: Handle,
    /// This mount in the form of a volume.
    volume: Volume,
    /// The attributes that a bind from it needs, if its own differ from those of the subpath's
    /// mount. The mount that the kubelet binds from is unknown then, so everything that either of
    /// the two denies is denied.
    keep: Option<MountAttributes>,
}

/// A subpath's mount, as the kernel reports it and as the judge receives it.
pub(super) struct Bound<'a> {
    pub(super) subpath: &'a VolumeSubpath,
    pub(super) entry: &'a MountEntry,
    pub(super) mount: &'a SubpathMount,
}

impl SubpathOrigin {
    /// A volume's folder, whatever is mounted at the subpath.
    pub(super) fn of_directory(directory: &Rc<HeldVolumeDirectory>, mounts: &Mounts) -> Self {
        Self {
            volume: directory.observe(mounts),
            directory: Some(Rc::clone(directory)),
            filesystem: None,
        }
    }

    /// No origin was found.
    pub(super) fn without(volume: Observed<Volume>) -> Self {
        Self {
            volume,
            directory: None,
            filesystem: None,
        }
    }

    fn of_filesystem(found: Filesystem) -> Self {
        Self {
            volume: Observed::Seen(found.volume.clone()),
            directory: None,
            filesystem: Some(found),
        }
    }

    /// The directory that the sub path starts from.
    pub(super) fn handle(&self) -> Option<&Handle> {
        match &self.filesystem {
            Some(filesystem) => Some(&filesystem.handle),
            None => self.directory.as_ref()?.handle(),
        }
    }

    /// The attributes that a bind needs, if those of this mount do not suffice.
    pub(super) fn attributes_to_keep(&self) -> Option<MountAttributes> {
        self.filesystem.as_ref()?.keep
    }

    /// The layout of the volume's files. A container may use the kubelet's layout: then the mount
    /// shows something in a payload directory, and `..data` names a payload directory. Reads the
    /// link: a server must have answered first.
    pub(super) fn layout(&self, mount: &SubpathMount, volume: &Volume) -> VolumeLayout {
        let is_payload = volume.layout == VolumeLayout::Plain
            && self.directory.is_some()
            && PathInVolume::from_mount(mount, volume)
                .is_ok_and(|sub_path| sub_path.begins_like_a_payload())
            && self
                .handle()
                .is_some_and(|volume| current_payload(volume).is_ok());
        match is_payload {
            true => VolumeLayout::Payload,
            false => volume.layout,
        }
    }
}

impl Bound<'_> {
    /// Finds the origin. `first` is the first directory that has the volume's name.
    pub(super) fn origin(
        &self,
        first: Option<&Rc<HeldVolumeDirectory>>,
        mounts: &Mounts,
    ) -> SubpathOrigin {
        if let Some(first) = first {
            return self.search(first, mounts).unwrap_or_else(|error| {
                SubpathOrigin::without(Observed::Unreadable(error_chain(&error)))
            });
        }
        // The volume may lie anywhere on the host: only a file that is gone can be detected.
        if self.mount.root.deleted || !self.mount.fs_type.is_local() {
            let other_root = |host: &MountEntry| host.root.path != self.entry.root.path;
            if let Some(found) = find_mount(self.entry, mounts, other_root) {
                return SubpathOrigin::of_filesystem(found);
            }
        }
        SubpathOrigin::without(Observed::Absent)
    }

    fn search(
        &self,
        first: &Rc<HeldVolumeDirectory>,
        mounts: &Mounts,
    ) -> Result<SubpathOrigin, MountError> {
        if self.fit(&first.observe(mounts)) == Some(Fit::Holds) {
            return self.held_by(first, mounts);
        }
        let directories = match HeldVolumeDirectory::all(self.subpath) {
            Ok(all) if all.len() > 1 => all,
            // It is open and observed already.
            Ok(_) => vec![Rc::clone(first)],
            Err(error) => {
                let why = Observed::Unreadable(error.to_string());
                return Ok(SubpathOrigin::without(why));
            }
        };
        // Some were opened after the last reading of the mount table.
        let mounts = &mounts.for_newly_opened();
        for directory in &directories {
            if self.fit(&directory.observe(mounts)) == Some(Fit::Holds) {
                return self.held_by(directory, mounts);
            }
        }
        for directory in &directories {
            if let Some(within) = self.mounted_within(directory, mounts)? {
                return Ok(SubpathOrigin::of_filesystem(within));
            }
        }
        Ok(self.likeliest(&directories, mounts))
    }

    /// The directory that contains the mount's root, or a mount of the same filesystem within it,
    /// recognized by its attributes. If none has the same attributes, those of the volume's mount
    /// changed since, and the kubelet binds from that mount.
    fn held_by(
        &self,
        directory: &Rc<HeldVolumeDirectory>,
        mounts: &Mounts,
    ) -> Result<SubpathOrigin, MountError> {
        let has_other_attributes = directory
            .mount(mounts)
            .is_some_and(|mount| mount.attributes != self.entry.attributes);
        if has_other_attributes
            && let Some(within) = self.mounted_within(directory, mounts)?
            && within.keep.is_none()
        {
            return Ok(SubpathOrigin::of_filesystem(within));
        }
        Ok(SubpathOrigin::of_directory(directory, mounts))
    }

    /// The mount that a sidecar made within the volume, if the subpath was bound from it. The sub path
    /// may be the place of such a mount.
    fn mounted_within(
        &self,
        directory: &HeldVolumeDirectory,
        mounts: &Mounts,
    ) -> Result<Option<Filesystem>, MountError> {
        if let Some(handle) = directory.handle()
            && let Ok(volume) = handle.resolved_path()
        {
            let found = find_mount(self.entry, mounts, |host| {
                host.mount_point != volume && host.mount_point.starts_with(&volume)
            });
            if found.is_some() {
                return Ok(found);
            }
        }
        mounts.complete_table().map(|_| None)
    }

    /// The directory that fits best, if none contains the mount's root: the volume is not mounted,
    /// or was mounted again.
    fn likeliest(&self, directories: &[Rc<HeldVolumeDirectory>], mounts: &Mounts) -> SubpathOrigin {
        let mut origins: Vec<(Option<Fit>, SubpathOrigin)> = Vec::new();
        for directory in directories {
            let mut origin = SubpathOrigin::of_directory(directory, mounts);
            origin.volume = self.with_age(origin.volume, directory, mounts);
            origins.push((self.fit(&origin.volume), origin));
        }
        // A directory that could not be read has no fit and sorts first: it may be the origin.
        origins.sort_by_key(|(fit, _)| *fit);
        let mut origins = origins.into_iter();
        let Some((fit, mut likeliest)) = origins.next() else {
            return SubpathOrigin::without(Observed::Absent);
        };
        if matches!(fit, Some(Fit::MountedAnew | Fit::NotMounted))
            && origins.any(|(other, _)| other == fit)
        {
            let why = "several volumes of its name may be its own";
            likeliest.volume = Observed::Unreadable(why.to_owned());
        }
        likeliest
    }

    fn fit(&self, volume: &Observed<Volume>) -> Option<Fit> {
        match volume {
            Observed::Seen(volume) => Some(Fit::of(self.mount, volume)),
            Observed::Absent | Observed::Unreadable(_) => None,
        }
    }

    /// Adds the order of the volume's mount and the subpath's, if it makes a difference.
    fn with_age(
        &self,
        volume: Observed<Volume>,
        directory: &HeldVolumeDirectory,
        mounts: &Mounts,
    ) -> Observed<Volume> {
        let volume = match volume {
            Observed::Seen(volume) if Fit::of(self.mount, &volume) == Fit::MountedAnew => volume,
            other => return other,
        };
        let Some(mount) = directory.mount(mounts) else {
            return Observed::Unreadable("the mount of its volume could not be found".to_owned());
        };
        match mounts.is_newer(&mount, self.entry) {
            Ok(is_newer) => Observed::Seen(Volume { is_newer, ..volume }),
            Err(error) => Observed::Unreadable(error_chain(&error)),
        }
    }
}

/// The mount that a subpath was bound from, or another mount of the same filesystem.
fn find_mount(
    mount: &MountEntry,
    mounts: &Mounts,
    wanted: impl Fn(&MountEntry) -> bool,
) -> Option<Filesystem> {
    // A single read of the table serves all subpaths: the entry of a mount is checked again once
    // the mount is open.
    let mut holding = Vec::new();
    for host in mounts.table().ok()?.entries() {
        if host.device == mount.device
            && !host.root.deleted
            && mount.root.path.starts_with(&host.root.path)
            // An id mapping belongs to its mount, and cannot be given to another mount.
            && host.attributes.is_idmapped() == mount.attributes.is_idmapped()
            && wanted(host)
        {
            holding.push(host);
        }
    }
    holding.sort_by_key(|host| likeness(host, mount));
    let earlier = Mounts::default();
    for host in holding.into_iter().take(TRIED) {
        let is_local = |handle: &Handle| earlier.is_local(handle);
        let Ok(handle) = open_without_waiting(&host.mount_point, is_local) else {
            continue;
        };
        let handle = handle.unqueried();
        // By now the path may lead to a different mount, such as a mount that covers the path.
        let is_the_one = Mounts::default().mount_of(&handle).is_ok_and(|found| {
            found.is_mount_point
                && found.entry.device == host.device
                && found.entry.root == host.root
                && found.entry.attributes == host.attributes
        });
        if is_the_one {
            return Some(Filesystem {
                handle,
                volume: Volume {
                    plugin: Plugin::host_path(),
                    directory: host.mount_point.clone(),
                    device: host.device,
                    fs_type: host.fs_type.clone(),
                    place: host.root.path.clone(),
                    is_mount_point: true,
                    is_newer: true,
                    layout: Plugin::host_path().layout(),
                },
                keep: (host.attributes != mount.attributes)
                    .then(|| mount.attributes.with_denied_by(host.attributes)),
            });
        }
    }
    None
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
            let filesystem = find_mount(mount, &Mounts::default(), |host| {
                host.root.path != mount.root.path
            });
            let _ = found.send(filesystem.map(|it| it.volume.directory));
        });
        let directory = received.recv_timeout(Duration::from_secs(20));
        // Ends a walk that waits.
        fuse.device = None;
        finding.join().unwrap();
        assert_eq!(directory, Ok(Some(visible)));
    }
}
