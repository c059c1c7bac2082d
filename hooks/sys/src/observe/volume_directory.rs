//! The directory of a subpath's volume: the folder with the volume's name below a plugin's folder
//! of the pod.

use std::cell::{OnceCell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, Volume, VolumeMount};
use bindguard_core::kubelet::{MountedVolume, Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::paths::join;

use crate::failure::Failure;
use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::observe::subpath::children;
use crate::observe::unreadable;
use crate::target::Payload;

/// A volume's open directory, and the evidence about it.
#[derive(Debug)]
pub(super) struct HeldVolumeDirectory {
    plugin: Plugin,
    directory: Result<Handle, Failure>,
    seen: OnceCell<Observed<Volume>>,
    payload: OnceCell<Option<Payload>>,
}

/// The open volumes of some subpaths: several subpaths of a volume are usual. The volumes are few
/// enough for a linear search.
#[derive(Debug, Default)]
pub struct HeldVolumeDirectories(RefCell<Vec<(VolumeSubpath, Option<Rc<HeldVolumeDirectory>>)>>);

impl HeldVolumeDirectories {
    pub(super) fn of(&self, subpath: &VolumeSubpath) -> Option<Rc<HeldVolumeDirectory>> {
        let mut held = self.0.borrow_mut();
        if let Some((_, directory)) = held
            .iter()
            .find(|(other, _)| other.is_of_the_same_volume(subpath))
        {
            return directory.clone();
        }
        let directory = HeldVolumeDirectory::hold(subpath).map(Rc::new);
        held.push((subpath.clone(), directory.clone()));
        directory
    }
}

impl HeldVolumeDirectory {
    /// Opens the volume of a subpath, below the first plugin folder that contains the volume's
    /// name. Nearly always only a single plugin folder contains that name.
    fn hold(subpath: &VolumeSubpath) -> Option<Self> {
        let usual = |plugin: Plugin| Self::in_folder(plugin, &subpath.volume_directory(plugin));
        Plugin::usual()
            .find_map(usual)
            .or_else(|| Self::all(subpath).ok()?.into_iter().next())
    }

    /// Every folder of the pod that has the name of a subpath's volume.
    ///
    /// # Errors
    /// When the pod's volumes cannot be listed.
    pub(super) fn all(subpath: &VolumeSubpath) -> Result<Vec<Self>, Failure> {
        let mut folders = children(&subpath.pod_directory().join("volumes"))?;
        folders.sort();
        let held = folders.iter().filter_map(|folder| {
            let plugin = Plugin::from_folder(folder.file_name()?)?;
            let directory = join(folder.join(subpath.volume()), plugin.below);
            Self::in_folder(plugin, &directory)
        });
        Ok(held.collect())
    }

    /// A CSI driver that unmounts removes the directory `mount`; its parent directory is the
    /// kubelet's.
    fn in_folder(plugin: Plugin, directory: &Path) -> Option<Self> {
        let above = || directory.parent().filter(|_| !plugin.below.is_empty());
        Self::try_hold(plugin, directory).or_else(|| Self::try_hold(plugin, above()?))
    }

    fn try_hold(plugin: Plugin, directory: &Path) -> Option<Self> {
        let hold = || match plugin.writer {
            Writer::Kubelet => Handle::as_written(directory),
            // Anything may be mounted there.
            Writer::Containers => Handle::as_written(directory).map(Handle::unqueried),
        };
        match hold() {
            Err(error) if error.is_not_found() => None,
            directory => Some(Self {
                plugin,
                directory,
                seen: OnceCell::new(),
                payload: OnceCell::new(),
            }),
        }
    }

    pub(super) fn writer(&self) -> Writer {
        self.plugin.writer
    }

    pub(super) fn handle(&self) -> Option<&Handle> {
        self.directory.as_ref().ok()
    }

    /// The payload of a kubelet-written volume; `..data` is read once for all its subpaths.
    pub(super) fn payload(&self) -> Option<&Payload> {
        let held = || {
            self.handle()
                .filter(|_| self.plugin.writer == Writer::Kubelet)
                .and_then(Payload::hold)
        };
        self.payload.get_or_init(held).as_ref()
    }

    pub(super) fn observe(&self, mounts: &Mounts) -> Observed<Volume> {
        self.seen.get_or_init(|| self.look(mounts)).clone()
    }

    /// The mount in which the volume's directory lies.
    pub(super) fn mount(&self, mounts: &Mounts) -> Option<Rc<MountEntry>> {
        mounts
            .mount_of(self.handle()?)
            .ok()
            .map(|mount| mount.entry)
    }

    fn look(&self, mounts: &Mounts) -> Observed<Volume> {
        let handle = match &self.directory {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        let (mount, resolved) = match (mounts.mount_of(handle), handle.resolved_path()) {
            (Ok(mount), Ok(resolved)) => (mount, resolved),
            (Err(error), _) => return Observed::Unreadable(error_chain(&error)),
            (_, Err(error)) => {
                return Observed::Unreadable(format!(
                    "resolve {}: {error}",
                    handle.path().display()
                ));
            }
        };
        let Some(place) = mount.entry.place_in_filesystem(&resolved) else {
            let (path, mount_point) = (resolved.display(), mount.entry.mount_point.display());
            return Observed::Unreadable(format!(
                "{path} is not below {mount_point}, where its mount is"
            ));
        };
        Observed::Seen(Volume {
            plugin: self.plugin,
            directory: handle.path().to_owned(),
            device: mount.entry.device,
            fs_type: mount.entry.fs_type.clone(),
            place,
            is_mount_point: mount.is_mount_point,
            is_newer: true,
            layout: self.plugin.layout(),
        })
    }
}

// A volume and its mount.

/// The open directory of a volume, or the volume's mount point. An `O_PATH` open of a mount's root
/// sends no request to the server.
#[derive(Debug)]
pub struct HeldVolume(Result<Handle, Failure>);

impl HeldVolume {
    /// Opens the directory. Anything may be mounted there.
    pub fn hold(directory: &Path) -> Self {
        Self(Handle::of(directory).map(Handle::unqueried))
    }

    /// Opens a volume whose writer is known: a kubelet-written volume is on this node.
    pub fn hold_of(volume: &MountedVolume) -> Self {
        match volume.plugin.writer {
            Writer::Kubelet => Self(Handle::of(volume.mount_point())),
            Writer::Containers => Self::hold(volume.mount_point()),
        }
    }

    /// True if a call on its own mount may wait for a server or a daemon: the kernel alone cannot
    /// detect that it is alive.
    pub fn is_on_a_server(&self, mounts: &Mounts) -> bool {
        let mount = self
            .handle()
            .and_then(|handle| mounts.mount_of(handle).ok());
        mount.is_some_and(|mount| mount.is_mount_point && !mount.entry.fs_type.is_local())
    }

    pub fn handle(&self) -> Option<&Handle> {
        self.0.as_ref().ok()
    }

    pub fn observe(&self, mounts: &Mounts) -> Observed<VolumeMount> {
        let handle = match &self.0 {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        match mounts.mount_of(handle) {
            Ok(mount) if mount.is_mount_point => Observed::Seen(VolumeMount {
                fs_type: mount.entry.fs_type.clone(),
                deleted: mount.entry.root.deleted,
            }),
            Ok(_) => Observed::Absent,
            Err(error) => Observed::Unreadable(error_chain(&error)),
        }
    }
}

// All volumes of a node, by the kubelet's folders.

/// The volumes below a kubelet root, sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Volumes {
    /// The volumes that need a mount.
    pub mounted: Vec<MountedVolume>,
    /// The directories of volumes that need no mount: the content of the directory, on any
    /// filesystem, is the volume.
    pub plain: Vec<PathBuf>,
}

/// Lists the volumes below a kubelet root. A missing root has no volumes.
///
/// The folders above a volume are the kubelet's own and on its disk; the volumes themselves are not
/// touched.
///
/// # Errors
/// When a folder cannot be read.
pub fn list_volumes(kubelet_root: &Path) -> Result<Volumes, Failure> {
    let mut found = Volumes::default();
    for pod in children(&kubelet_root.join("pods"))? {
        for plugin in children(&pod.join("volumes"))? {
            for volume in children(&plugin)? {
                match mounted(&volume, kubelet_root) {
                    Some(mounted) => found.mounted.push(mounted),
                    None => found.plain.push(volume),
                }
            }
        }
    }
    found
        .mounted
        .sort_by(|one, other| one.mount_point().cmp(other.mount_point()));
    found.plain.sort();
    Ok(found)
}

/// CSI mounts a volume one folder deeper than the in-tree plugins.
fn mounted(volume: &Path, kubelet_root: &Path) -> Option<MountedVolume> {
    let places: [PathBuf; 2] = [volume.to_owned(), volume.join("mount")];
    places
        .iter()
        .find_map(|place| MountedVolume::from_path(place, [kubelet_root]))
}
