//! Refreshes running containers. Each kind of bind has a module that finds the current files:
//!
//! * [`volumes`]: a `subPath` of a volume that the kubelet, or a CSI driver in the same way, writes
//! * [`mounts`]: a mount that the host mounted anew, with the nested binds
//! * [`files`]: a single file of the host that was replaced
//! * [`host_roots`]: a bind that keeps mounts of the host alive, and the release of its copies
//!
//! [`container`] replaces the stale mounts. In pods the host's subpaths are re-bound first: from
//! then on every restart finds the current file, whatever shim starts the container.

mod container;
mod files;
mod host_roots;
mod mounts;
mod round;
mod running;
mod volumes;

use std::error::Error;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{
    KeptMounts, NestedBind, Refused, RefusedReason, SpecBind, SubpathInContainer,
};
use bindguard_core::report::MountResult;
use bindguard_core::spec::Bind;
use bindguard_core::text::{below, climbs};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::{CloneSettings, NewMount};
use bindguard_sys::{Handle, Mounts};

use crate::SourceError;
use crate::probes::{Probes, in_real_folder};

pub use crate::rebind::{REPLACE_TIMEOUT, VolumeOfPod, rebind_volume};
pub(crate) use crate::refresh::running::refuse_sandbox;
pub use container::{MAX_MOUNTS_OF_FILE, RefreshAct, Refreshed, find_stale, refresh_container};
pub use files::{
    BoundFiles, FileBind, RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
pub use host_roots::{HostRoots, Release, Released, releasable_copies, release_copies};
pub use mounts::BoundMounts;
pub use running::{RefreshError, TuckRecords};
pub use volumes::{PodVolumes, payload_of_driver};

/// A container's init process, held against reuse of its pid; a child that hangs in a container;
/// and the process that starts the children.
pub use bindguard_sys::enter::{
    Abandoned, HeldProcess, HelperProcess, NamespaceError, ProcessError,
};

/// The result of a mount that is not replaced because of this error.
fn failed(error: impl Error) -> MountResult {
    let error = error_chain(&error);
    MountResult::Failed { error }
}

/// As [`failed`], with the step that failed.
fn failed_to(act: &str, error: impl Error) -> MountResult {
    let error = format!("{act}: {}", error_chain(&error));
    MountResult::Failed { error }
}

/// The same, if the current file cannot be opened.
fn not_opened(error: impl Error) -> MountResult {
    failed_to("open the current file", error)
}

/// The result of a mount whose container changed its mounts during the refresh.
fn changed() -> MountResult {
    let error = "the mount table of the container changed meanwhile".to_owned();
    MountResult::Failed { error }
}

/// The source of a bind that is nested in a volume.
#[derive(Debug)]
pub struct OpenedNested {
    pub file: Handle,
    /// The container's mount of the bind. If that mount is gone, the mount that a runtime would make.
    pub like: MountEntry,
    /// The settings of the new mount.
    pub settings: CloneSettings,
}

/// Files on the host, open while containers are refreshed.
pub trait CurrentFiles {
    /// The mounts of a container that show the files, judged at this moment.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer>;

    /// The binds of the container's spec that were mounted in one of the `shown` directories and are
    /// gone.
    fn missing_in(&self, _table: &MountTable, _shown: &[SubpathInContainer]) -> Vec<SpecBind> {
        Vec::new()
    }

    /// Probes the sources of these stale mounts together, for the next opens: each silent source
    /// takes time.
    fn probe_sources(&self, _stale: &[&SubpathInContainer]) {}

    /// Called before the new mount of this file is attached beneath the stale mount.
    ///
    /// # Errors
    /// If the stale mount must stay, because a later refresh would not know the new mount.
    fn note_replacement(
        &self,
        _stale: &SubpathInContainer,
        _file: &Handle,
        _new: &NewMount,
    ) -> Result<(), MountResult> {
        Ok(())
    }

    /// Called before the stale mount is detached, if the mount beneath is not the mount of
    /// [`Self::note_replacement`]: propagation attaches a copy.
    ///
    /// # Errors
    /// As there.
    fn note_arrived(
        &self,
        _stale: &SubpathInContainer,
        _beneath: &MountEntry,
    ) -> Result<(), MountResult> {
        Ok(())
    }

    /// Called after a new mount has replaced a stale mount, with the container's current table.
    fn note_attached(&self, _new: &SubpathInContainer, _table: &MountTable) {}

    /// The mounts below a stale mount that go with that mount, by the container's table; `None` if
    /// a mount is replaced only without mounts below.
    ///
    /// # Errors
    /// If a mount below must not be lost.
    fn mounts_below(
        &self,
        _stale: &SubpathInContainer,
        _table: &MountTable,
    ) -> Result<Option<KeptMounts>, MountResult> {
        Ok(None)
    }

    /// Opens the source of a bind that is nested in a stale mount, for a new mount, and records the
    /// place of that source.
    ///
    /// # Errors
    /// If the bind must stay as it is.
    fn open_nested(&self, _nested: &NestedBind) -> Result<OpenedNested, MountResult> {
        Err(changed())
    }

    /// Opens the file or directory that a stale mount should show now, with the settings of the new
    /// mount.
    ///
    /// # Errors
    /// [`MountResult::KeyGone`] if there is none, or if the mount must stay.
    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult>;
}

/// A bind of a spec.
#[derive(Debug)]
struct SpecifiedBind {
    index: usize,
    /// The source; the kernel's name of a source in the folder of the pod.
    source: PathBuf,
    destination: PathBuf,
    /// The settings of new mounts in place of the container's.
    settings: CloneSettings,
    /// True for a source in the folder of the pod: only root can change the way.
    is_in_pod: bool,
    /// True if the host may mount the source anew.
    is_volume: bool,
}

impl SpecifiedBind {
    fn of(bind: &Bind<'_>, is_volume: bool) -> Self {
        Self {
            index: bind.index,
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            settings: CloneSettings {
                below: bind.is_recursive.then_some(bind.denied_below),
                denied: bind.denied,
                leaves_flags: bind.leaves_flags,
                requested: bind.propagation,
            },
            is_in_pod: false,
            is_volume,
        }
    }

    /// True if the stale mount is that of the bind.
    fn is_of(&self, stale: &SubpathInContainer) -> bool {
        self.source == stale.volume && self.destination == stale.mount.mount_point
    }

    /// The source. `None` if a symlink leads elsewhere, or if a server would have to answer.
    fn open(&self) -> Option<(Handle, BindSource)> {
        let opened = BindSource::open_without_waiting(&self.source);
        opened.filter(|(_, source)| source.path == self.source)
    }
}

// The folder of a pod by any of its names.
//
// `/var/lib/kubelet` is a link to a larger disk on many nodes. containerd writes the kernel's name
// of a source into the spec, CRI-O the kubelet's name, and a config may have either.

/// The folder of a pod, `<root>/pods/<uid>`.
#[derive(Debug)]
struct PodFolder {
    named: PathBuf,
    real: PathBuf,
}

impl PodFolder {
    /// The folder with this name. Until the kernel's name is known, this name counts.
    fn of(named: &Path) -> Self {
        let real = in_real_folder(named, &Probes::for_create());
        Self {
            named: named.to_owned(),
            real: real.unwrap_or_else(|| named.to_owned()),
        }
    }

    /// The kernel's name of a path in the folder, given by any name of the folder. `None` for
    /// another path.
    fn path_in(&self, path: &Path) -> Option<PathBuf> {
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

fn mounts_of_host() -> Result<MountTable, SourceError> {
    let host = bindguard_sys::read_mount_table();
    host.map_err(SourceError::of("compare with the mounts of the host"))
}

/// Refuses a mount whose replacement would reach the host and other containers.
fn refuse_shared(stale: &SubpathInContainer) -> Result<(), Refused> {
    let reason = if stale.parent.as_ref().is_none_or(MountEntry::is_shared) {
        RefusedReason::ParentIsShared
    } else if stale.mount.is_shared() {
        RefusedReason::MountIsShared
    } else {
        return Ok(());
    };
    Err(Refused::new(reason, &stale.mount.mount_point))
}

/// The place of a source of the spec. `None` for a relative path, or if a server would have to
/// answer.
fn place_of_source(source: &Path) -> Option<FilePlace> {
    let found = BindSource::open_without_waiting(source).filter(|_| source.is_absolute());
    found?.1.place()
}

/// The place of a file in its filesystem.
fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, SourceError> {
    let path = file.path().display();
    let mount = mounts
        .mount_of(file)
        .map_err(SourceError::of(format!("find the mount of {path}")))?;
    let resolved = file
        .resolved_path()
        .map_err(SourceError::of(format!("resolve {path}")))?;
    let place = mount.entry.place_in_filesystem(&resolved);
    Ok(FilePlace {
        device: mount.entry.device,
        path: place.ok_or_else(|| SourceError::new(format!("{path} is not below its mount")))?,
    })
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
