//! The volumes of a pod with AtomicWriter's layout, open while its containers are refreshed: those
//! that the kubelet writes, and [those of CSI drivers](super::driver_volumes).

use std::path::{Path, PathBuf};

use bindguard_core::kubelet::{Plugin, VolumeLayout, Writer};
use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{
    PodVolume, Refused, RefusedReason, SpecBind, SubpathInContainer, missing_binds,
    subpaths_in_container,
};
use bindguard_sys::observe::{SubpathsError, children};
use bindguard_sys::{Handle, HandleError, Mounts, current_payload, open_target};

use super::current_files::CurrentFiles;
use super::driver_volumes::{driver_volumes, refusal};
use super::outcome::NotReplaced;
use super::place::{PlaceError, place_of};
use super::pod_folder::PodFolder;

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
