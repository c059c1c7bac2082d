//! A bind of a container's spec, and its source on the host as it is now.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::FilePlace;
use bindguard_core::kubelet::{Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::{MountAttributes, MountEntry, Propagation};
use bindguard_core::paths::lies_in;
use bindguard_core::spec::{Bind, RequestedPropagation};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, Mounts};

use super::pod_folder::PodFolder;

/// A bind of a container's spec.
#[derive(Debug)]
pub(super) struct SpecifiedBind {
    pub(super) index: usize,
    /// The source; the kernel's name of a source in the folder of the pod.
    pub(super) source: PathBuf,
    pub(super) destination: PathBuf,
    pub(super) settings: CloneSettings,
    pub(super) denied: MountAttributes,
    pub(super) is_shared: bool,
    /// True for a source in the folder of the pod: only root can change the way.
    pub(super) is_in_pod: bool,
    /// True if the host may mount the source anew.
    pub(super) is_volume: bool,
}

impl SpecifiedBind {
    pub(super) fn of(bind: &Bind<'_>, is_volume: bool) -> Self {
        Self {
            index: bind.index(),
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            settings: settings_of(bind),
            denied: bind.denied(),
            is_shared: bind.propagation() == RequestedPropagation::Shared,
            is_in_pod: false,
            is_volume,
        }
    }

    pub(super) fn of_pod(bind: &Bind<'_>, pod: &PodFolder) -> Self {
        let in_pod = pod.path_in(bind.source());
        let Some(source) = in_pod.filter(|source| source != pod.path()) else {
            return Self::of(bind, false);
        };
        let is_volume = !is_of_kubelet_written_volume(&source, pod.path());
        Self {
            source,
            is_in_pod: true,
            ..Self::of(bind, is_volume)
        }
    }

    /// The source, if it is a mount point now and no server has to answer.
    pub(super) fn open_mount_point(&self) -> Option<(Handle, FilePlace)> {
        let (handle, source) = BindSource::open_without_waiting(&self.source)?;
        let place = self.place_of_mount_point(&source)?;
        Some((handle, place))
    }

    /// The source, the place of the source, and the mount that a runtime would make of the source.
    /// `None` if a symlink leads elsewhere.
    pub(super) fn open_source(&self) -> Option<(Handle, FilePlace, MountEntry)> {
        let (handle, source) = BindSource::open_without_waiting(&self.source)?;
        if source.path != self.source {
            return None;
        }
        let place = source.place()?;
        let mount = MountEntry {
            mount_point: self.destination.clone(),
            attributes: source.mount.attributes.with_denied_by(self.denied),
            propagation: Propagation::default(),
            ..MountEntry::clone(&source.mount)
        };
        Some((handle, place, mount))
    }

    /// The place of an opened file. `None` unless the source of the spec is a mount point, and the
    /// file is the root of that mount.
    pub(super) fn place_of(&self, file: &Handle, mounts: &Mounts) -> Option<FilePlace> {
        self.place_of_mount_point(&BindSource::of(file, mounts)?)
    }

    fn place_of_mount_point(&self, opened: &BindSource) -> Option<FilePlace> {
        let is_mount_point = opened.path == self.source && opened.mount.mount_point == self.source;
        opened.place().filter(|_| is_mount_point)
    }
}

/// The place of a source of the spec. `None` for a relative path, or if a server would have to
/// answer.
pub(super) fn place_of_source(source: &Path) -> Option<FilePlace> {
    let found = BindSource::open_without_waiting(source).filter(|_| source.is_absolute());
    found?.1.place()
}

fn settings_of(bind: &Bind<'_>) -> CloneSettings {
    CloneSettings {
        below: bind.is_recursive().then(|| bind.denied_below()),
        denied: Some(bind.denied()),
        leaves_flags: bind.leaves_flags(),
        requested: bind.propagation(),
    }
}

/// True for a volume that the kubelet updates through `..data`, and for the volume's subpaths,
/// which `refresh::volumes` refreshes.
fn is_of_kubelet_written_volume(source: &Path, pod: &Path) -> bool {
    let root = pod.parent().and_then(Path::parent);
    let subpath = root.and_then(|root| VolumeSubpath::from_path(source, [root]));
    let mut written = Plugin::all().filter(|plugin| plugin.writer() == Writer::Kubelet);
    written.any(|plugin| {
        let volumes = pod.join("volumes").join(plugin.folder());
        match &subpath {
            Some(subpath) => fs::symlink_metadata(volumes.join(subpath.volume())).is_ok(),
            None => lies_in(source, &volumes),
        }
    })
}
