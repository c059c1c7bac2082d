//! Observes bind sources: the kernel's facts about them, as the plain data that `bindguard-core`
//! judges.
//!
//! First every source is opened: an open descriptor keeps the kernel from reusing the mount id.
//! Then the kernel reports each handle's mount.

mod subpath;

use std::cell::{OnceCell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::error_chain;
use bindguard_core::evidence::{FilePlace, HostMount, Observed, Volume, VolumeMount};
use bindguard_core::kubelet::{MountedVolume, Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::text::join;

use crate::Failure;
use crate::handle::Handle;
use crate::mounts::{MountOf, Mounts};
use crate::target::Payload;

pub use crate::observe::subpath::{HeldSubpath, children, is_listed, list_subpaths};

/// The evidence from an error to open something.
fn unreadable<T>(error: &Failure) -> Observed<T> {
    if error.is_not_found() {
        Observed::Absent
    } else {
        Observed::Unreadable(error_chain(&error))
    }
}

/// The mount that a file is on, or the evidence that there is none.
fn mount_of<T>(file: &Result<Handle, Failure>, mounts: &Mounts) -> Result<MountOf, Observed<T>> {
    let handle = file.as_ref().map_err(unreadable)?;
    mounts
        .mount_of(handle)
        .map_err(|error| Observed::Unreadable(error_chain(&error)))
}

/// The mount at a path, or the evidence that there is none.
fn mount_at<T>(file: &Result<Handle, Failure>, mounts: &Mounts) -> Result<MountOf, Observed<T>> {
    match mount_of(file, mounts)? {
        mount if mount.is_mount_point => Ok(mount),
        _ => Err(Observed::Absent),
    }
}

// The source of a bind, as mountinfo will show it in the container.

/// The mount that a bind source lies on, and the kernel's own path of the source.
#[derive(Debug)]
pub struct BindSource {
    pub mount: Rc<MountEntry>,
    pub path: PathBuf,
}

impl BindSource {
    /// The source behind an open handle. `None` if the kernel reports neither mount nor path, or if
    /// the file is deleted.
    pub fn of(handle: &Handle, mounts: &Mounts) -> Option<Self> {
        let mount = mounts.mount_of(handle).ok()?.entry;
        let path = handle.resolved_path().ok()?;
        let is_deleted = path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)");
        (path.is_absolute() && !is_deleted).then_some(Self { mount, path })
    }

    /// Opens the source at a path. `None` as for [`Self::of`], or if a server would have to answer.
    pub fn open_without_waiting(path: &Path) -> Option<(Handle, Self)> {
        let earlier = Mounts::default();
        let handle = earlier.open_without_waiting(path).ok()?.unqueried();
        let source = Self::of(&handle, &earlier.for_newly_opened())?;
        Some((handle, source))
    }

    /// The place of the source in its filesystem.
    pub fn place(&self) -> Option<FilePlace> {
        Some(FilePlace {
            device: self.mount.device,
            path: self.mount.place_in_filesystem(&self.path)?,
        })
    }
}

// The mount that a host-root bind would be made from.

/// Observes the mount of an open source.
pub fn observe_host_mount(
    source: &Result<Handle, Failure>,
    mounts: &Mounts,
) -> Observed<HostMount> {
    match mount_of(source, mounts) {
        Ok(mount) => Observed::Seen(HostMount {
            passes_umounts_on: mount.entry.propagation.passes_umounts_on(),
            mount_point: mount.entry.mount_point.clone(),
        }),
        Err(unseen) => unseen,
    }
}

// The directory of a subpath's volume: the folder with the volume's name below a plugin's folder of
// the pod.

/// A volume's open directory, and the evidence about it.
#[derive(Debug)]
struct HeldVolumeDirectory {
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
    fn of(&self, subpath: &VolumeSubpath) -> Option<Rc<HeldVolumeDirectory>> {
        let mut held = self.0.borrow_mut();
        for (other, directory) in held.iter() {
            if other.is_of_the_same_volume(subpath) {
                return directory.clone();
            }
        }
        let directory = HeldVolumeDirectory::hold(subpath);
        held.push((subpath.clone(), directory.clone()));
        directory
    }
}

impl HeldVolumeDirectory {
    /// Opens the volume of a subpath, below the first plugin folder that contains the volume's
    /// name. Nearly always only a single plugin folder contains that name.
    fn hold(subpath: &VolumeSubpath) -> Option<Rc<Self>> {
        for plugin in Plugin::usual() {
            if let Some(held) = Self::in_folder(plugin, &subpath.volume_directory(plugin)) {
                return Some(held);
            }
        }
        Self::all(subpath).ok()?.into_iter().next()
    }

    /// Every folder of the pod that has the name of a subpath's volume.
    ///
    /// # Errors
    /// When the pod's volumes cannot be listed.
    fn all(subpath: &VolumeSubpath) -> Result<Vec<Rc<Self>>, Failure> {
        let mut folders = children(&subpath.pod_directory().join("volumes"))?;
        folders.sort();
        let mut held = Vec::new();
        for folder in folders {
            if let Some(plugin) = folder.file_name().and_then(Plugin::from_folder) {
                let directory = join(folder.join(subpath.volume()), plugin.below);
                held.extend(Self::in_folder(plugin, &directory));
            }
        }
        Ok(held)
    }

    /// A CSI driver that unmounts removes the directory `mount`; its parent directory is the
    /// kubelet's.
    fn in_folder(plugin: Plugin, directory: &Path) -> Option<Rc<Self>> {
        let above = directory.parent().filter(|_| !plugin.below.is_empty());
        for path in [Some(directory), above].into_iter().flatten() {
            let opened = match plugin.writer {
                Writer::Kubelet => Handle::as_written(path),
                // Anything may be mounted there.
                Writer::Containers => Handle::as_written(path).map(Handle::unqueried),
            };
            if !opened.as_ref().is_err_and(Failure::is_not_found) {
                return Some(Rc::new(Self {
                    plugin,
                    directory: opened,
                    seen: OnceCell::new(),
                    payload: OnceCell::new(),
                }));
            }
        }
        None
    }

    fn handle(&self) -> Option<&Handle> {
        self.directory.as_ref().ok()
    }

    /// The payload of a kubelet-written volume; `..data` is read once for all its subpaths.
    fn payload(&self) -> Option<&Payload> {
        let hold = || match self.plugin.writer {
            Writer::Kubelet => Payload::hold(self.handle()?),
            Writer::Containers => None,
        };
        self.payload.get_or_init(hold).as_ref()
    }

    fn observe(&self, mounts: &Mounts) -> Observed<Volume> {
        let look = || match self.look(mounts) {
            Ok(volume) => Observed::Seen(volume),
            Err(Observed::Unreadable(why)) => Observed::Unreadable(why),
            Err(Observed::Absent | Observed::Seen(())) => Observed::Absent,
        };
        self.seen.get_or_init(look).clone()
    }

    /// The mount in which the volume's directory lies.
    fn mount(&self, mounts: &Mounts) -> Option<Rc<MountEntry>> {
        Some(mounts.mount_of(self.handle()?).ok()?.entry)
    }

    fn look(&self, mounts: &Mounts) -> Result<Volume, Observed<()>> {
        let mount = mount_of(&self.directory, mounts)?;
        let handle = self.directory.as_ref().map_err(unreadable)?;
        let resolved = handle.resolved_path().map_err(|error| {
            let path = handle.path().display();
            Observed::Unreadable(format!("resolve {path}: {error}"))
        })?;
        let entry = &mount.entry;
        let place = entry.place_in_filesystem(&resolved).ok_or_else(|| {
            Observed::Unreadable(format!(
                "{} is not below {}, where its mount is",
                resolved.display(),
                entry.mount_point.display()
            ))
        })?;
        Ok(Volume {
            plugin: self.plugin,
            directory: handle.path().to_owned(),
            device: entry.device,
            fs_type: entry.fs_type.clone(),
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
        mount_at::<()>(&self.0, mounts).is_ok_and(|mount| !mount.entry.fs_type.is_local())
    }

    pub fn handle(&self) -> Option<&Handle> {
        self.0.as_ref().ok()
    }

    pub fn observe(&self, mounts: &Mounts) -> Observed<VolumeMount> {
        match mount_at(&self.0, mounts) {
            Ok(mount) => Observed::Seen(VolumeMount {
                fs_type: mount.entry.fs_type.clone(),
                deleted: mount.entry.root.deleted,
            }),
            Err(unseen) => unseen,
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
                // CSI mounts a volume one folder deeper than the in-tree plugins.
                let mounted = MountedVolume::from_path(&volume, [kubelet_root])
                    .or_else(|| MountedVolume::from_path(&volume.join("mount"), [kubelet_root]));
                match mounted {
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
