//! The files on the host that the mounts of a container should show: those of a pod's volumes,
//! volumes that were mounted anew, host-root binds, or single files that a container engine bound.

use std::error::Error;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::paths::{below, climbs, lies_below};
use bindguard_core::refresh::{
    KeptMounts, NestedBind, Refused, RefusedReason, ReliedOn, SpecBind, SubpathInContainer, Way,
    WayFolder, can_lead,
};
use bindguard_core::report::MountResult;
use bindguard_core::spec::{MountMakers, RequestedPropagation, SpecView};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::{CloneSettings, NewMount};
use bindguard_sys::{Handle, Mounts, WalkedFolder, walk_host_path};

use crate::SourceError;
use crate::directories::in_real_folder;
use crate::probes::Probes;

/// The result of a mount that is not replaced because of this error.
pub(super) fn failed(error: &dyn Error) -> MountResult {
    let error = error_chain(error);
    MountResult::Failed { error }
}

/// As [`failed`], with the step that failed.
pub(super) fn failed_to(act: &str, error: &dyn Error) -> MountResult {
    let error = format!("{act}: {}", error_chain(error));
    MountResult::Failed { error }
}

/// The same, if the current file cannot be opened.
pub(super) fn not_opened(error: SourceError) -> MountResult {
    failed_to("open the current file", &error)
}

/// The result of a mount whose container changed its mounts during the refresh.
pub(super) fn changed() -> MountResult {
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

    /// The settings of the new mount in place of a stale mount.
    fn clone_settings(&self, _stale: &SubpathInContainer) -> CloneSettings {
        CloneSettings::default()
    }

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

    /// Opens the file or directory that a stale mount should show now.
    ///
    /// # Errors
    /// [`MountResult::KeyGone`] if there is none, or if the mount must stay.
    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, MountResult>;
}

// The folder of a pod by any of its names.
//
// `/var/lib/kubelet` is a link to a larger disk on many nodes. containerd writes the kernel's name
// of a source into the spec, CRI-O the kubelet's name, and a config may have either.

/// The folder of a pod, `<root>/pods/<uid>`.
#[derive(Debug)]
pub(super) struct PodFolder {
    named: PathBuf,
    real: PathBuf,
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

    pub(super) fn path(&self) -> &Path {
        &self.real
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

pub(super) fn mounts_of_host() -> Result<MountTable, SourceError> {
    let host = bindguard_sys::read_mount_table();
    host.map_err(|error| SourceError::of("compare with the mounts of the host", error))
}

/// Refuses a mount whose replacement would reach the host and other containers.
pub(super) fn refuse_shared(stale: &SubpathInContainer) -> Result<(), Refused> {
    let is_shared = |mount: &MountEntry| mount.propagation.peer_group.is_some();
    let reason = if stale.parent.as_ref().is_none_or(is_shared) {
        RefusedReason::ParentIsShared
    } else if is_shared(&stale.mount) {
        RefusedReason::MountIsShared
    } else {
        return Ok(());
    };
    Err(Refused::new(reason, &stale.mount.mount_point))
}

/// The place of a source of the spec. `None` for a relative path, or if a server would have to
/// answer.
pub(super) fn place_of_source(source: &Path) -> Option<FilePlace> {
    let found = BindSource::open_without_waiting(source).filter(|_| source.is_absolute());
    found?.1.place()
}

/// The place of a file in its filesystem.
pub(super) fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, SourceError> {
    let path = file.path().display();
    let mount = mounts.mount_of(file);
    let mount =
        mount.map_err(|error| SourceError::of(format!("find the mount of {path}"), error))?;
    let resolved = file.resolved_path();
    let resolved = resolved.map_err(|error| SourceError::of(format!("resolve {path}"), error))?;
    let place = mount.entry.place_in_filesystem(&resolved);
    Ok(FilePlace {
        device: mount.entry.device,
        path: place.ok_or_else(|| SourceError::new(format!("{path} is not below its mount")))?,
    })
}

// The ways to sources on the host. A container or a user that may write a folder of a way can lead
// the way to another file.

/// A mount namespace, or a container, that may be able to write folders of the host.
#[derive(Debug)]
pub struct Writer {
    /// The container or the process, for people.
    pub name: String,
    /// The folders that the writer may write.
    pub reach: WriterReach,
}

/// The folders of the host that a writer may write.
#[derive(Debug)]
pub enum WriterReach {
    /// Those that its mounts show.
    Mounts {
        table: MountTable,
        /// Places that `table` may lack.
        hidden: Vec<FilePlace>,
    },
    /// Its mounts are not known: those that its spec gives. A container can hide its mounts in a
    /// namespace of its own, and still write through an open directory.
    Spec(Vec<FilePlace>),
    /// Any folder: neither its mounts nor its spec are known.
    Unknown,
}

/// Finds the writers. A refresh needs them only if the way to a file has a symlink or another
/// folder than before.
pub trait RunningContainers: Debug {
    /// The writers at this moment. Each mount table may be large, so `next` reads a single table. A
    /// container that ended meanwhile is left out.
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>>;
}

/// The places that a container may write by the binds of its spec, also by read-only binds if the
/// container may remount them. `None` if a place is not known.
pub fn places_by_binds(spec: &SpecView<'_>, may_remount: bool) -> Option<Vec<FilePlace>> {
    if spec.overlooked().is_some() {
        return None;
    }
    let host = bindguard_sys::read_mount_table().ok()?;
    let mut places = Vec::new();
    for bind in spec.binds() {
        let source = bind.source();
        if may_remount || !bind.denied.is_read_only() {
            places.push(place_of_source(source)?);
        }
        // A read-only bind leaves the mounts below its source writable. crun binds recursively for
        // every word with an r.
        if may_remount || !bind.denied_below.is_read_only() {
            let mounts = host.entries().iter();
            let below = mounts.filter(|mount| lies_below(&mount.mount_point, source));
            places.extend(below.map(FilePlace::root_of));
        }
    }
    Some(places)
}

/// The reach of a container whose mounts are not known, by its spec.
pub fn reach_by_spec(spec: &[u8]) -> WriterReach {
    let makers = MountMakers::from_spec(spec).ok();
    let makers = makers.filter(MountMakers::has_binds_alone);
    let (Some(_), Ok(spec)) = (makers, SpecView::from_bytes(spec)) else {
        return WriterReach::Unknown;
    };
    // Slaves and peers receive later mounts of the host.
    let is_private = |requested| {
        use RequestedPropagation as Requested;
        matches!(requested, Requested::Private | Requested::Unbindable)
    };
    let are_private = spec.binds().iter().all(|bind| is_private(bind.propagation));
    match places_by_binds(&spec, false).filter(|_| are_private) {
        Some(places) => WriterReach::Spec(places),
        None => WriterReach::Unknown,
    }
}

/// Refuses a way to a file if a running container may write a folder that the way relies on, and
/// has no access to the file. With `to_write`, read access is no access.
pub(super) fn refuse_writable_way(
    way: &Way,
    relied_on: &[ReliedOn<'_>],
    (file, to_write): (&FilePlace, bool),
    others: &dyn RunningContainers,
) -> Result<(), Refused> {
    if relied_on.is_empty() {
        return Ok(());
    }
    let mut first: Option<(usize, RefusedReason, String)> = None;
    for Writer { name, reach } in others.writers() {
        let leads = |folder: &FilePlace| match &reach {
            WriterReach::Mounts { table, hidden } => {
                can_lead(table, hidden, folder, file, to_write)
            }
            WriterReach::Spec(places) => places.iter().any(|place| folder.lies_in(place)),
            WriterReach::Unknown => true,
        };
        let mut folders = relied_on.iter();
        let Some(led) = folders.position(|it| leads(&it.folder.place)) else {
            continue;
        };
        if first.as_ref().is_none_or(|(first, ..)| led < *first) {
            let reason = match reach {
                WriterReach::Mounts { .. } => relied_on[led].reason,
                WriterReach::Spec(_) | WriterReach::Unknown => RefusedReason::MountsUnknown,
            };
            first = Some((led, reason, name));
        }
        if led == 0 {
            break;
        }
    }
    match first {
        Some((led, reason, name)) => Err(way.refusal(&relied_on[led], reason).with_error(name)),
        None => Ok(()),
    }
}

/// Refuses the mount point of a stale mount's source if a container or a user may have led the way
/// to `root` elsewhere.
pub(super) fn refuse_unsafe_way(
    stale: &SubpathInContainer,
    root: &Handle,
    others: &dyn RunningContainers,
) -> Result<(), MountResult> {
    let source = &stale.volume;
    let (Some(directory), Some(name)) = (source.parent(), source.file_name()) else {
        return Err(changed());
    };
    let walk = walk_host_path(directory);
    let walk = walk.map_err(|error| not_opened(SourceError::of("walk to a bound file", error)))?;
    let mounts = Mounts::default();
    let way = Way {
        folders: folders_on_the_way(&walk.folders, &mounts).map_err(not_opened)?,
        look_ups: walk.look_ups,
    };
    let way = way.to_mount_point(name).ok_or_else(changed)?;
    let relied_on = way.all_relied_on()?;
    let place = place_of(root, &mounts).map_err(not_opened)?;
    let to_write = !stale.mount.is_read_only();
    Ok(refuse_writable_way(
        &way,
        &relied_on,
        (&place, to_write),
        others,
    )?)
}

pub(super) fn folders_on_the_way(
    folders: &[WalkedFolder],
    mounts: &Mounts,
) -> Result<Vec<WayFolder>, SourceError> {
    let mut on_the_way = Vec::with_capacity(folders.len());
    for folder in folders {
        on_the_way.push(WayFolder {
            path: folder.handle.path().to_owned(),
            place: place_of(&folder.handle, mounts)?,
            owner: folder.owner,
            mode: folder.mode,
            born: folder.born,
        });
    }
    Ok(on_the_way)
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
            assert_eq!(folder.path(), data.join("pods/uid-1"));
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
