//! The volumes of a pod with AtomicWriter's layout, open while its containers are refreshed: those
//! that the kubelet writes, and those that a CSI driver writes in the same way.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bindguard_core::kubelet::{Plugin, VolumeLayout, Writer};
use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{
    PodVolume, Refused, RefusedReason, SpecBind, SubpathInContainer, missing_binds,
    subpaths_in_container,
};
use bindguard_core::report::MountResult;
use bindguard_core::text::{below, climbs, lies_in};
use bindguard_sys::observe::children;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, Mounts, current_payload, open_target};

use crate::SourceError;
use crate::probes::{Probes, csi_record_in, in_real_folder};
use crate::refresh::{CurrentFiles, not_opened, place_of};

/// The volumes of a pod that only the kubelet, or only a CSI driver, writes.
#[derive(Debug, Clone)]
pub struct PodVolumes {
    volumes: Vec<Arc<OpenVolume>>,
    /// The binds of the container's spec; empty if the spec is unknown.
    binds: Vec<SpecBind>,
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
    pub fn open(pod: &Path) -> Result<Self, SourceError> {
        let mut opened = Self {
            volumes: Vec::new(),
            binds: Vec::new(),
        };
        for plugin in Plugin::all().filter(|plugin| plugin.writer == Writer::Kubelet) {
            let folder = pod.join("volumes").join(plugin.folder);
            let volumes = children(&folder);
            for directory in volumes.map_err(|error| SourceError::of(error.to_string())(error))? {
                let handle =
                    Handle::of(&directory).map_err(SourceError::of("open a volume of the pod"))?;
                opened.add(handle, None)?;
            }
        }
        Ok(opened)
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
    ) -> Result<Self, SourceError> {
        let mut found = Vec::new();
        let folders = fs::read_dir(pod.join("volumes").join(Plugin::CSI.folder));
        for folder in folders.into_iter().flatten().flatten() {
            if let Some(handle) = payload_of_driver(&folder.path()) {
                found.push((folder.file_name(), handle));
            }
        }
        if found.is_empty() {
            return Ok(self);
        }
        let (folder, writable) = (PodFolder::of(pod), writable().ok());
        for (name, handle) in found {
            let refused = refusal(name.as_ref(), &folder, writable.as_deref());
            self.add(handle, refused)?;
        }
        Ok(self)
    }

    fn add(&mut self, handle: Handle, refused: Option<RefusedReason>) -> Result<(), SourceError> {
        if let Ok(current) = current_payload(&handle) {
            let seen = PodVolume {
                directory: handle.path().to_owned(),
                place: place_of(&handle, &Mounts::default())?,
                current,
            };
            self.volumes.push(Arc::new(OpenVolume {
                handle,
                seen,
                refused,
            }));
        }
        Ok(())
    }

    /// The same volumes, for the container whose spec has `binds`; `binds` is empty if the spec is
    /// unknown.
    #[must_use]
    pub fn for_container(&self, binds: Vec<SpecBind>) -> Self {
        Self {
            volumes: self.volumes.clone(),
            binds,
        }
    }
}

impl CurrentFiles for PodVolumes {
    /// `..data` of each volume is read again.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let mut volumes = Vec::with_capacity(self.volumes.len());
        for volume in &self.volumes {
            if let Ok(current) = current_payload(&volume.handle) {
                let seen = volume.seen.clone();
                volumes.push(PodVolume { current, ..seen });
            }
        }
        subpaths_in_container(table, &volumes)
    }

    fn missing_in(&self, table: &MountTable, shown: &[SubpathInContainer]) -> Vec<SpecBind> {
        let missing = missing_binds(table, shown, &self.binds);
        missing.into_iter().cloned().collect()
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        let mut volumes = self.volumes.iter();
        let volume = volumes.find(|known| known.seen.directory == stale.volume);
        let volume = volume.ok_or(MountResult::KeyGone)?;
        if let Some(reason) = volume.refused {
            return Err(Refused::new(reason, &volume.seen.directory).into());
        }
        let target = open_target(&volume.handle, &stale.sub_path, VolumeLayout::Payload)
            .map_err(not_opened)?;
        let file = target.file.ok_or(MountResult::KeyGone)?;
        Ok((file, CloneSettings::default()))
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

/// The directory of a driver's volume in this folder of the kubelet. `None` if the volume is not
/// inline, is not local, or lacks AtomicWriter's layout. Waits for no daemon and no server.
pub fn payload_of_driver(folder: &Path) -> Option<Handle> {
    // From here on the kernel has the whole path to the mount point in its cache.
    let _folder = Handle::of(folder).ok()?;
    let directory = folder.join(Plugin::CSI.below);
    let mounts = Mounts::default();
    let handle = mounts.open_without_waiting(&directory).ok()?;
    if !mounts.is_local(&handle) || current_payload(&handle).is_err() {
        return None;
    }
    csi_record_in(folder)?.is_inline().then_some(handle)
}

/// The reason not to refresh the files of a volume, by the sources of all writable binds of the
/// pod's containers. `None` for `writable`: the binds are not known.
fn refusal(name: &Path, pod: &PodFolder, writable: Option<&[PathBuf]>) -> Option<RefusedReason> {
    let Some(writable) = writable else {
        return Some(RefusedReason::MountsUnknown);
    };
    let volumes = pod.real.join("volumes").join(Plugin::CSI.folder);
    let volume = volumes.join(name);
    let subpaths = pod.real.join("volume-subpaths").join(name);
    for source in writable.iter().filter_map(|source| pod.path_in(source)) {
        if lies_in(&source, &volume) || lies_in(&source, &subpaths) || lies_in(&volume, &source) {
            return Some(RefusedReason::WritableVolume);
        }
    }
    None
}

// The folder of a pod by any of its names.
//
// `/var/lib/kubelet` is a link to a larger disk on many nodes. containerd writes the kernel's name
// of a source into the spec, CRI-O the kubelet's name, and a config may have either.

/// The folder of a pod, `<root>/pods/<uid>`.
#[derive(Debug)]
pub(super) struct PodFolder {
    named: PathBuf,
    pub(super) real: PathBuf,
}

impl PodFolder {
    /// The folder with this name. Until the kernel's name is known, this name counts.
    pub(super) fn of(named: &Path) -> Self {
        let real = in_real_folder(named, &Probes::for_create());
        Self {
            named: named.to_owned(),
            real: real.unwrap_or_else(|| named.to_owned()),
        }
    }

    /// The kernel's name of a path in the folder, given by any name of the folder. `None` for
    /// another path.
    pub(super) fn path_in(&self, path: &Path) -> Option<PathBuf> {
        if climbs(path) {
            return None;
        }
        let names = [self.real.as_path(), &self.named];
        if let Some(rest) = names.iter().find_map(|name| below(path, name)) {
            return Some(self.real.join(rest));
        }
        let folder = path.ancestors().find(|folder| self.ends_alike(folder))?;
        let real = in_real_folder(folder, &Probes::for_create())?;
        let rest = below(path, folder).filter(|_| real == self.real)?;
        Some(real.join(rest))
    }

    /// True if a folder ends with `pods/<uid>`.
    fn ends_alike(&self, folder: &Path) -> bool {
        folder.file_name() == self.real.file_name()
            && folder.parent().and_then(Path::file_name)
                == self.real.parent().and_then(Path::file_name)
    }
}

#[cfg(test)]
mod pod_folder_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_source_is_in_the_folder_by_any_name_of_the_kubelets_root() {
        let disk = tempfile::tempdir().unwrap();
        let disk = in_real_folder(disk.path(), &Probes::for_create()).unwrap();
        let [data, link, other] = ["data", "link", "other"].map(|name| disk.join(name));
        let volume = Path::new("pods/uid-1/volumes/kubernetes.io~csi/pv/mount");
        fs::create_dir_all(data.join(volume)).unwrap();
        fs::create_dir_all(other.join(volume)).unwrap();
        symlink("data", &link).unwrap();
        for root in [&data, &link] {
            let folder = PodFolder::of(&root.join("pods/uid-1"));
            assert_eq!(folder.real, data.join("pods/uid-1"));
            for source in [&data, &link] {
                let found = folder.path_in(&source.join(volume));
                assert_eq!(found, Some(data.join(volume)), "{root:?} {source:?}");
            }
            for source in [
                other.join(volume),
                data.join("pods/uid-2/volumes"),
                link.join("pods/uid-1/../uid-2/volumes"),
                "/".into(),
            ] {
                assert_eq!(folder.path_in(&source), None, "{source:?}");
            }
        }
    }
}
