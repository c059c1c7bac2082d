//! A volume-subpath, its volume, and the file that its sub path leads to today.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

use bindguard_core::error_chain;
use bindguard_core::evidence::{
    FileIdentity, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::judge::{Fit, PathInVolume};
use bindguard_core::kubelet::{DATA_LINK, Plugin, VolumeLayout, VolumeSubpath, Writer};
use bindguard_core::mount_table::{MountAttributes, MountEntry};

use crate::files::unless_absent;
use crate::handle::Handle;
use crate::mounts::{MountError, Mounts};
use crate::observe::{HeldVolumeDirectories, HeldVolumeDirectory, mount_at, unreadable};
use crate::target::{TargetError, current_payload, open_target};
use crate::{Failure, failed};

/// An open subpath and its open volume: the descriptors show the same files throughout the
/// inspection.
#[derive(Debug)]
pub struct HeldSubpath {
    pub subpath: VolumeSubpath,
    itself: Result<Handle, Failure>,
    directory: Option<Rc<HeldVolumeDirectory>>,
    seen: OnceCell<Seen>,
}

/// Evidence about a subpath and its volume that comes from the kernel alone.
#[derive(Debug)]
struct Seen {
    mount: Observed<SubpathMount>,
    origin: SubpathOrigin,
}

impl HeldSubpath {
    /// Opens a subpath and its volume.
    pub fn hold(subpath: VolumeSubpath) -> Self {
        Self::hold_among(subpath, &HeldVolumeDirectories::default())
    }

    /// Opens a subpath. `directories` shares each open volume with further subpaths.
    pub fn hold_among(subpath: VolumeSubpath, directories: &HeldVolumeDirectories) -> Self {
        let directory = directories.of(&subpath);
        let mut itself = Handle::as_written(&subpath.path());
        let writer = directory.as_ref().map(|directory| directory.plugin.writer);
        if writer != Some(Writer::Kubelet) {
            itself = itself.map(Handle::unqueried);
        }
        Self {
            subpath,
            itself,
            directory,
            seen: OnceCell::new(),
        }
    }

    /// The open subpath, for the repair.
    pub fn handle(&self) -> Option<&Handle> {
        self.itself.as_ref().ok()
    }

    /// The directory from which the sub path starts; `None` before the subpath was inspected.
    pub fn volume(&self) -> Option<&Handle> {
        self.seen.get()?.origin.handle()
    }

    /// The volume's directory, if the kubelet writes the volume: the names of such volumes are
    /// unique in a pod.
    pub fn volume_of_kubelet(&self) -> Option<&Handle> {
        let directory = self.directory.as_ref()?;
        let handle = directory.handle();
        handle.filter(|_| directory.plugin.writer == Writer::Kubelet)
    }

    /// The attributes that a bind of its target needs, if those of [its
    /// volume's](HeldSubpath::volume) mount do not suffice.
    pub fn attributes_to_keep(&self) -> Option<MountAttributes> {
        self.seen.get()?.origin.attributes_to_keep()
    }

    /// The paths to probe first, because a server or a daemon may have to answer: the subpath's
    /// path, then the target's path if known. Empty on a local filesystem.
    pub fn paths_to_probe(&self, mounts: &Mounts) -> Vec<PathBuf> {
        let Seen { mount, origin } = self.look(mounts);
        let mut paths = vec![self.subpath.path()];
        let mount = match mount {
            Observed::Seen(mount) => mount,
            Observed::Absent => return Vec::new(),
            // The NFS client does not open a file that it knows to be gone: the reason may be an
            // answer.
            Observed::Unreadable(_) => return paths,
        };
        let mut is_local = mount.fs_type.is_local();
        if let Observed::Seen(volume) = &origin.volume {
            is_local &= volume.fs_type.is_local();
            if let Ok(sub_path) = PathInVolume::from_mount(mount, volume) {
                let base = match volume.layout {
                    VolumeLayout::Payload => volume.directory.join(DATA_LINK),
                    VolumeLayout::Plain => volume.directory.clone(),
                };
                paths.push(base.join(&sub_path.path));
            }
        }
        if is_local { Vec::new() } else { paths }
    }

    /// Observes both. `answers` belong to the paths of [`HeldSubpath::paths_to_probe`], in its
    /// order.
    pub fn observe(&self, mounts: &Mounts, answers: &[Reach]) -> SubpathEvidence {
        let probed = self.paths_to_probe(mounts).len();
        let Seen { mount, origin } = self.look(mounts);
        let is_silent = probed > 0 && !answers.get(1).is_some_and(Reach::is_answer);
        let (volume, target) = match (mount, &origin.volume) {
            (Observed::Seen(_), Observed::Seen(_)) if is_silent => (
                origin.volume.clone(),
                Observed::Unreadable("its volume did not answer".to_owned()),
            ),
            (Observed::Seen(mount), Observed::Seen(volume)) => {
                let volume = Volume {
                    layout: origin.layout(mount, volume),
                    ..volume.clone()
                };
                let target = self.target(mount, &volume);
                (Observed::Seen(volume), target)
            }
            _ => (origin.volume.clone(), Observed::Absent),
        };
        let reach = answers.first().cloned().unwrap_or(Reach::NotNeeded);
        let mut mount = mount.clone();
        if let Observed::Seen(mount) = &mut mount
            && mount.fs_type.queries_server_for_attributes()
        {
            mount.identity = self.identity_after(&reach);
        }
        SubpathEvidence {
            mount,
            reach,
            volume,
            target,
        }
    }

    /// The identity of the subpath's file, on a filesystem that queries a server. The identity is
    /// read only if the server has just answered.
    fn identity_after(&self, reach: &Reach) -> Observed<FileIdentity> {
        match reach {
            Reach::Silent(_) | Reach::NotProbed | Reach::NotNeeded => {
                Observed::Unreadable("its server did not answer".to_owned())
            }
            Reach::Refused { .. }
                if reach.error_of_dead_source().is_some() || reach.is_not_found() =>
            {
                let of_kind = |file: &Handle| file.kind().map(FileIdentity::of_what_is_gone);
                observe(&self.itself, of_kind)
            }
            Reach::Refused { words, .. } => Observed::Unreadable(words.clone()),
            Reach::Alive => identity_of(&self.itself),
        }
    }

    fn look(&self, mounts: &Mounts) -> &Seen {
        self.seen.get_or_init(|| {
            let found = match mount_at(&self.itself, mounts) {
                Ok(found) => found,
                Err(mount) => {
                    let origin = match &self.directory {
                        Some(directory) => SubpathOrigin::of_directory(directory, mounts),
                        None => SubpathOrigin::without(Observed::Absent),
                    };
                    return Seen { mount, origin };
                }
            };
            let entry = &found.entry;
            let identity = if entry.fs_type.queries_server_for_attributes() {
                Observed::Unreadable("its server was not probed yet".to_owned())
            } else {
                identity_of(&self.itself)
            };
            let mount = SubpathMount {
                root: entry.root.clone(),
                device: entry.device,
                fs_type: entry.fs_type.clone(),
                identity,
                covers_its_equal: found.covers_its_equal(),
            };
            let bound = Bound {
                subpath: &self.subpath,
                entry,
                mount: &mount,
            };
            let origin = bound.origin(self.directory.as_ref(), mounts);
            Seen {
                mount: Observed::Seen(mount),
                origin,
            }
        })
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        // Without a sub path there is no target; the judge reports the reason.
        let (Ok(sub_path), Some(handle)) = (PathInVolume::from_mount(mount, volume), self.volume())
        else {
            return Observed::Absent;
        };
        if let Some(target) = self.key_in_payload(&sub_path) {
            return Observed::Seen(target);
        }
        let opened = match open_target(handle, &sub_path.path, volume.layout) {
            Ok(opened) => opened,
            Err(TargetError::NoPayload(_)) => return Observed::Absent,
            Err(error) => return Observed::Unreadable(error_chain(&error)),
        };
        let file = opened
            .file
            .map_or(Observed::Absent, |file| identity_of(&Ok(file)));
        Observed::Seen(Target {
            timestamp: opened.timestamp,
            file,
        })
    }

    /// The key of a kubelet-written volume, which nearly always exists.
    fn key_in_payload(&self, sub_path: &PathInVolume) -> Option<Target> {
        let directory = self.seen.get()?.origin.directory.as_ref()?;
        let payload = directory.payload()?;
        let key = payload.key(&sub_path.path, directory.handle()?)?;
        Some(Target {
            timestamp: Some(payload.timestamp.clone()),
            file: Observed::Seen(key),
        })
    }
}

fn identity_of(file: &Result<Handle, Failure>) -> Observed<FileIdentity> {
    observe(file, Handle::identity)
}

/// What is read from an open file.
fn observe<T>(
    file: &Result<Handle, Failure>,
    read: impl FnOnce(&Handle) -> Result<T, Failure>,
) -> Observed<T> {
    match file.as_ref().map(read) {
        Ok(Ok(seen)) => Observed::Seen(seen),
        Ok(Err(error)) => unreadable(&error),
        Err(error) => unreadable(error),
    }
}

// The origin of a subpath's bind: its volume's directory, a mount within that, or a mount of the
// host.
//
// Nearly always it is the first directory that has the volume's name, and the search ends there.
// Otherwise every directory of that name is compared with the subpath's mount, then the mounts
// within them.
//
// A `hostPath` has no directory in the pod, and no file of the node records which host directory
// it is. But the mount's root is the whole path within its filesystem, without symlinks. From the
// host's mount of that filesystem, the same path leads to the file that the kubelet would bind
// today. The same applies when a sidecar mounts a filesystem within a volume and the kubelet binds
// a sub path of that filesystem.
//
// A filesystem may have many mounts, which show the same files with different attributes. A bind
// has the attributes of the mount that it was made from. So the source mount has the attributes of
// the subpath's mount.

/// Limit of host mounts to try: all but the first few are binds of directories, or hidden by
/// others. One of these may be below the mount of a server that does not answer.
const TRIED: usize = 8;

/// The origin that a subpath is compared with.
#[derive(Debug)]
struct SubpathOrigin {
    /// The volume, or the host's mount in place of the volume.
    volume: Observed<Volume>,
    /// The folder of the volume, when the subpath was bound from that.
    directory: Option<Rc<HeldVolumeDirectory>>,
    /// The root of the host's mount in place of the volume, and the attributes that a bind from the
    /// mount needs, if its own differ from those of the subpath's mount. The mount that the kubelet
    /// binds from is unknown then, so everything that either of the two denies is denied.
    filesystem: Option<(Handle, Option<MountAttributes>)>,
}

/// A subpath's mount, as the kernel reports it and as the judge receives it.
struct Bound<'a> {
    subpath: &'a VolumeSubpath,
    entry: &'a MountEntry,
    mount: &'a SubpathMount,
}

impl SubpathOrigin {
    /// A volume's folder, whatever is mounted at the subpath.
    fn of_directory(directory: &Rc<HeldVolumeDirectory>, mounts: &Mounts) -> Self {
        Self {
            volume: directory.observe(mounts),
            directory: Some(Rc::clone(directory)),
            filesystem: None,
        }
    }

    /// No origin was found.
    fn without(volume: Observed<Volume>) -> Self {
        Self {
            volume,
            directory: None,
            filesystem: None,
        }
    }

    /// The directory that the sub path starts from.
    fn handle(&self) -> Option<&Handle> {
        match &self.filesystem {
            Some((handle, _)) => Some(handle),
            None => self.directory.as_ref()?.handle(),
        }
    }

    /// The attributes that a bind needs, if those of this mount do not suffice.
    fn attributes_to_keep(&self) -> Option<MountAttributes> {
        self.filesystem.as_ref()?.1
    }

    /// The layout of the volume's files. A container may use the kubelet's layout: then the mount
    /// shows something in a payload directory, and `..data` names a payload directory. Reads the
    /// link: a server must have answered first.
    fn layout(&self, mount: &SubpathMount, volume: &Volume) -> VolumeLayout {
        let is_payload = volume.layout == VolumeLayout::Plain
            && self.directory.is_some()
            && PathInVolume::from_mount(mount, volume)
                .is_ok_and(|sub_path| sub_path.begins_like_a_payload())
            && self
                .handle()
                .is_some_and(|volume| current_payload(volume).is_ok());
        if is_payload {
            VolumeLayout::Payload
        } else {
            volume.layout
        }
    }
}

impl Bound<'_> {
    /// Finds the origin. `first` is the first directory that has the volume's name.
    fn origin(&self, first: Option<&Rc<HeldVolumeDirectory>>, mounts: &Mounts) -> SubpathOrigin {
        if let Some(first) = first {
            return self.search(first, mounts).unwrap_or_else(|error| {
                SubpathOrigin::without(Observed::Unreadable(error_chain(&error)))
            });
        }
        // The volume may lie anywhere on the host: only a file that is gone can be detected.
        if self.mount.root.deleted || !self.mount.fs_type.is_local() {
            let other_root = |host: &MountEntry| host.root.path != self.entry.root.path;
            if let Some(found) = find_mount(self.entry, mounts, other_root) {
                return found;
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
                return Ok(within);
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
            && within.attributes_to_keep().is_none()
        {
            return Ok(within);
        }
        Ok(SubpathOrigin::of_directory(directory, mounts))
    }

    /// The mount that a sidecar made within the volume, if the subpath was bound from it. The sub path
    /// may be the place of such a mount.
    fn mounted_within(
        &self,
        directory: &HeldVolumeDirectory,
        mounts: &Mounts,
    ) -> Result<Option<SubpathOrigin>, MountError> {
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
        let Observed::Seen(volume) = volume else {
            return None;
        };
        Some(Fit::of(self.mount, volume))
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
) -> Option<SubpathOrigin> {
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
        let Ok(handle) = earlier.open_without_waiting(&host.mount_point) else {
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
            let keep = (host.attributes != mount.attributes)
                .then(|| mount.attributes.with_denied_by(host.attributes));
            return Some(SubpathOrigin {
                volume: Observed::Seen(Volume {
                    plugin: Plugin::HOST_PATH,
                    directory: host.mount_point.clone(),
                    device: host.device,
                    fs_type: host.fs_type.clone(),
                    place: host.root.path.clone(),
                    is_mount_point: true,
                    is_newer: true,
                    layout: Plugin::HOST_PATH.layout(),
                }),
                directory: None,
                filesystem: Some((handle, keep)),
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

// All volume-subpaths of a node, by the kubelet's folders.

/// Lists the volume-subpaths below a kubelet root, sorted. A missing root has no subpaths.
///
/// The folders above a subpath are the kubelet's own and on its disk; the subpaths themselves are
/// not touched.
///
/// # Errors
/// If a directory cannot be read. A directory that is removed meanwhile is no error: its pod goes
/// away.
pub fn list_subpaths(kubelet_root: &Path) -> Result<Vec<VolumeSubpath>, Failure> {
    let mut found = Vec::new();
    for pod in children(&kubelet_root.join("pods"))? {
        for volume in children(&pod.join("volume-subpaths"))? {
            for container in children(&volume)? {
                for path in children(&container)? {
                    found.extend(VolumeSubpath::from_path(&path, [kubelet_root]));
                }
            }
        }
    }
    found.sort_by_key(VolumeSubpath::path);
    Ok(found)
}

/// True if a subpath is still in its directory. The kubelet removes those of a pod that goes away.
///
/// It reads the directory, which is on the kubelet's disk: opening the subpath itself may wait for
/// a server.
pub fn is_listed(subpath: &VolumeSubpath) -> bool {
    let path = subpath.path();
    let siblings = path.parent().map(children);
    siblings.is_none_or(|siblings| siblings.is_ok_and(|siblings| siblings.contains(&path)))
}

/// The paths in a directory; none if it is missing or a plain file.
///
/// # Errors
/// If the directory cannot be read.
pub fn children(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let list = || {
        let mut paths = Vec::new();
        for entry in unless_absent(fs::read_dir(directory))?
            .into_iter()
            .flatten()
        {
            paths.push(entry?.path());
        }
        Ok(paths)
    };
    list().map_err(failed::<io::Error>("list", directory))
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
            let _ = found.send(filesystem.map(|it| match it.volume {
                Observed::Seen(volume) => volume.directory,
                other => panic!("{other:?}"),
            }));
        });
        let directory = received.recv_timeout(Duration::from_secs(20));
        // Ends a walk that waits.
        fuse.device = None;
        finding.join().unwrap();
        assert_eq!(directory, Ok(Some(visible)));
    }
}
