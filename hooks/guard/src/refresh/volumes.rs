//! The volumes of a pod with AtomicWriter's layout, open while its containers are refreshed: those
//! that the kubelet writes, and [those of CSI drivers](super::driver_volumes).

use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};

use bindguard_core::judge::{StaleCause, Verdict};
use bindguard_core::kubelet::{Plugin, VolumeLayout, Writer};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::refresh::{
    KeptMounts, NestedBind, PodVolume, Refused, RefusedReason, SpecBind, SubpathInContainer,
    missing_binds, subpaths_in_container,
};
use bindguard_sys::enter::{TreeChange, TreePart};
use bindguard_sys::observe::{SubpathsError, children};
use bindguard_sys::replace::{NewMount, clone_like};
use bindguard_sys::{
    Handle, HandleError, Mounts, current_payload, open_target, open_without_waiting,
};

use crate::expect::csi_record_in;
use crate::refresh::current_files::{CurrentFiles, OpenedNested, PodFolder};
use crate::refresh::outcome::NotReplaced;
use crate::refresh::round::{ContainerRefresh, PlaceError, place_of};

/// Why the volumes of a pod could not be read.
#[derive(Debug, thiserror::Error)]
pub enum VolumesError {
    /// A folder could not be listed.
    #[error(transparent)]
    List(#[from] SubpathsError),
    /// A volume could not be opened.
    #[error("open a volume of the pod")]
    Open(#[from] HandleError),
    /// The place of a volume is not known.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// The volumes of a pod that only the kubelet, or only a CSI driver, writes.
#[derive(Debug)]
pub struct PodVolumes {
    volumes: Vec<OpenVolume>,
}

#[derive(Debug)]
struct OpenVolume {
    handle: Handle,
    seen: PodVolume,
    /// Why its files are not refreshed.
    refused: Option<RefusedReason>,
}

impl PodVolumes {
    /// Opens the volumes of the pod with this folder, `<root>/pods/<uid>`. A volume without a
    /// payload is left out.
    ///
    /// # Errors
    /// If the folders cannot be listed, or a volume cannot be opened.
    pub fn open(pod: &Path) -> Result<Self, VolumesError> {
        let written = Plugin::all().filter(|plugin| plugin.writer() == Writer::Kubelet);
        let mut volumes = Vec::new();
        for plugin in written {
            for directory in children(&pod.join("volumes").join(plugin.folder()))? {
                volumes.extend(OpenVolume::open(Handle::of(&directory)?)?);
            }
        }
        Ok(Self { volumes })
    }

    /// Adds the inline CSI volumes that have AtomicWriter's layout. `writable` returns the sources of
    /// all writable binds of the pod's containers, also of containers that ended. It is called only
    /// if the pod has such a volume.
    ///
    /// # Errors
    /// If a volume cannot be opened.
    pub fn with_drivers<E>(
        mut self,
        pod: &Path,
        writable: impl FnOnce() -> Result<Vec<PathBuf>, E>,
    ) -> Result<Self, VolumesError> {
        let found = driver_volumes(pod);
        if found.is_empty() {
            return Ok(self);
        }
        let (folder, writable) = (PodFolder::of(pod), writable().ok());
        for volume in found {
            let refused = refusal(&volume.name, &folder, writable.as_deref());
            let opened = OpenVolume::open(volume.handle)?;
            let opened = opened.map(|opened| OpenVolume { refused, ..opened });
            self.volumes.extend(opened);
        }
        Ok(self)
    }
}

impl PodVolumes {
    fn volume_of(&self, stale: &SubpathInContainer) -> Option<&OpenVolume> {
        let mut volumes = self.volumes.iter();
        volumes.find(|known| known.seen.directory == stale.volume)
    }
}

impl CurrentFiles for PodVolumes {
    /// `..data` of each volume is read again.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let volumes: Vec<PodVolume> = self
            .volumes
            .iter()
            .filter_map(OpenVolume::observe)
            .collect();
        subpaths_in_container(table, &volumes)
    }

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.volume_of(stale).is_some()
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        let volume = self.volume_of(stale).ok_or(NotReplaced::KeyGone)?;
        if let Some(reason) = volume.refused {
            let path = volume.seen.directory.clone();
            return Err(Refused::new(reason, path).into());
        }
        let target = open_target(&volume.handle, &stale.sub_path, VolumeLayout::Payload)?;
        target.file.ok_or(NotReplaced::KeyGone)
    }
}

/// The volumes of a pod, for a container of the pod.
#[derive(Debug)]
pub struct ContainerVolumes<'a> {
    volumes: &'a PodVolumes,
    binds: Vec<SpecBind>,
}

impl PodVolumes {
    /// Returns the volumes for the container whose spec has `binds`; `binds` is empty if the spec
    /// is unknown.
    pub fn for_container(&self, binds: Vec<SpecBind>) -> ContainerVolumes<'_> {
        ContainerVolumes {
            volumes: self,
            binds,
        }
    }
}

impl CurrentFiles for ContainerVolumes<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.volumes.shown_in(table)
    }

    fn missing_in(&self, table: &MountTable) -> Vec<SpecBind> {
        missing_binds(table, &self.shown_in(table), &self.binds)
            .into_iter()
            .cloned()
            .collect()
    }

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.volumes.has(stale)
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        self.volumes.open_current(stale)
    }
}

impl OpenVolume {
    fn open(handle: Handle) -> Result<Option<Self>, VolumesError> {
        let Ok(current) = current_payload(&handle) else {
            return Ok(None);
        };
        let seen = PodVolume {
            directory: handle.path().to_owned(),
            place: place_of(&handle, &Mounts::default())?,
            current,
        };
        Ok(Some(Self {
            handle,
            seen,
            refused: None,
        }))
    }

    fn observe(&self) -> Option<PodVolume> {
        let current = current_payload(&self.handle).ok()?;
        Some(PodVolume {
            current,
            ..self.seen.clone()
        })
    }
}

// The CSI volumes that their drivers write as the kubelet writes a secret: secrets-store, cert-manager.
//
// A process that can write the directory of a volume can make `..data` and payloads of its own. So
// a volume counts only if
//
// * it is inline: a claim's volume can be writable for another pod;
// * no container of the pod has a writable bind of the volume or of a part, also no container that
//   ended: an init container may have left a `..data`;
// * its filesystem is local: a FUSE daemon could answer each look-up differently, or never.
//
// A container that has the kubelet's root, or may remount, is not looked for: such a container
// reaches every file of the node.

/// A volume of a driver.
#[derive(Debug)]
pub(super) struct DriverVolume {
    pub(super) name: PathBuf,
    pub(super) handle: Handle,
}

/// The volumes of the pod with this folder.
pub(super) fn driver_volumes(pod: &Path) -> Vec<DriverVolume> {
    let folders = fs::read_dir(pod.join("volumes").join(Plugin::csi().folder()));
    let folders = folders.into_iter().flatten().flatten();
    let volumes = folders.filter_map(|entry| {
        Some(DriverVolume {
            handle: payload_of_driver(&entry.path())?,
            name: entry.file_name().into(),
        })
    });
    volumes.collect()
}

/// The directory of a driver's volume in this folder of the kubelet. `None` if the volume is not
/// inline, is not local, or lacks AtomicWriter's layout. Waits for no daemon and no server.
pub fn payload_of_driver(folder: &Path) -> Option<Handle> {
    // From here on the kernel has the whole path to the mount point in its cache.
    let _folder = Handle::of(folder).ok()?;
    let directory = folder.join(Plugin::csi().below());
    let mounts = Mounts::default();
    let is_local = |handle: &Handle| mounts.is_local(handle);
    let handle = open_without_waiting(&directory, is_local).ok()?;
    if !is_local(&handle) || current_payload(&handle).is_err() {
        return None;
    }
    csi_record_in(folder)?.is_inline().then_some(handle)
}

/// The reason not to refresh the files of a volume, by the sources of all writable binds of the
/// pod's containers. `None` for `writable`: the binds are not known.
pub(super) fn refusal(
    name: &Path,
    pod: &PodFolder,
    writable: Option<&[PathBuf]>,
) -> Option<RefusedReason> {
    let Some(writable) = writable else {
        return Some(RefusedReason::MountsUnknown);
    };
    let volume = pod
        .path()
        .join("volumes")
        .join(Plugin::csi().folder())
        .join(name);
    let subpaths = pod.path().join("volume-subpaths").join(name);
    let mut writable = writable.iter().filter_map(|source| pod.path_in(source));
    writable
        .any(|source| {
            let is_part = [&volume, &subpaths].iter().any(|of| lies_in(&source, of));
            is_part || lies_in(&volume, &source)
        })
        .then_some(RefusedReason::WritableVolume)
}

// The parts below the top of a new tree of mounts: the restrictions of the old mounts, and the
// binds of the spec that are nested in a volume.

/// Limit of binds in a volume: the new mount of each is a descriptor of this process until the tree
/// is complete.
const MAX_NESTED_BINDS: usize = 256;

impl ContainerRefresh<'_> {
    /// The parts of the new tree in place of a stale mount, outer parts first.
    pub(super) fn tree_parts(
        &self,
        stale: &SubpathInContainer,
        below: &KeptMounts,
    ) -> Result<Vec<TreePart>, NotReplaced> {
        let (count, limit) = (below.nested.len(), MAX_NESTED_BINDS);
        if count > limit {
            let refused = Refused::new(RefusedReason::ManyNestedBinds, &stale.mount.mount_point);
            return Err(refused
                .with_error(format!("{count} instead of {limit}"))
                .into());
        }
        let restricted = below.restrictions.iter().map(|it| TreePart {
            path: it.path.clone(),
            change: TreeChange::Restrict(it.attributes),
        });
        let mut parts: Vec<TreePart> = restricted.collect();
        let mut refused = None;
        let mut has_gone_bind = false;
        for nested in &below.nested {
            let is_gone = nested.shown.is_none();
            let new = match self.nested_mount(stale, nested) {
                Ok(new) => new,
                Err(why) if is_gone => {
                    refused.get_or_insert(why);
                    continue;
                }
                Err(why) => return Err(why),
            };
            // A bind that is gone is no reason to leave the volume dead.
            let change = match is_gone && !is_stale_without(stale) {
                true => TreeChange::TryAttach(new),
                false => TreeChange::Attach(new),
            };
            has_gone_bind |= is_gone;
            let path = nested.path.clone();
            parts.push(TreePart { path, change });
        }
        match refused {
            Some(why) if is_stale_without(stale) && !has_gone_bind => Err(why),
            _ => Ok(parts),
        }
    }

    /// A new mount of a nested bind.
    fn nested_mount(
        &self,
        stale: &SubpathInContainer,
        nested: &NestedBind,
    ) -> Result<NewMount, NotReplaced> {
        let OpenedNested {
            file,
            like,
            settings,
        } = self.volumes.open_nested(stale, nested)?;
        let place = &like.mount_point;
        if nested.shown.is_none() && self.spec.is_idmapped_at(place) {
            let error = "it is gone, and only the runtime can make it again".to_owned();
            let refused = Refused::new(RefusedReason::OtherIds, place);
            return Err(refused.with_error(error).into());
        }
        self.refuse_unreadable(&file)?;
        let users = self.users_of(&like)?;
        Ok(clone_like(&file, &like, users, settings)?)
    }

    /// The user namespace for a new mount like `stale`; `None` if `stale` is not idmapped. It is the
    /// namespace that the spec gives the container, never a namespace that a process entered: that
    /// one may show files of the host's root as files of the process.
    pub(super) fn users_of(&self, stale: &MountEntry) -> Result<Option<&File>, Refused> {
        if !stale.attributes.is_idmapped() {
            return Ok(None);
        }
        let place = &stale.mount_point;
        match self.namespace.has_own_users() && self.spec.has_ids_of_container_at(place) {
            true => Ok(Some(self.namespace.users())),
            false => Err(Refused::new(RefusedReason::OtherIds, place)),
        }
    }
}

/// True if the volume is current and lacks a bind of the spec: then that bind is the reason of the
/// refresh.
fn is_stale_without(stale: &SubpathInContainer) -> bool {
    let Verdict::Stale { cause, .. } = &stale.verdict else {
        return false;
    };
    matches!(cause, StaleCause::LacksBind(_))
}
