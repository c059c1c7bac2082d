//! The binds of a container whose source the host has mounted anew, such as a volume of a CSI driver
//! that was restarted, and the binds of the spec that are nested in these binds.
//!
//! In a pod, only sources in the pod's folder are volumes: the kubelet made the way to these
//! sources, for root alone. The way to a source of a container of Docker or Podman is checked: a user
//! of the host or a container may be able to rename a folder of the path, which then leads to another
//! mount. No symlink is followed. The record of the create has the places that the container's mounts
//! showed before; without that record, refreshes keep a record of their own mounts. A refresh writes
//! the record before it replaces a mount.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use bindguard_core::evidence::{FileKind, FilePlace, Reach};
use bindguard_core::judge::{Verdict, judge_reach};
use bindguard_core::kubelet::{Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::{MountEntry, MountTable, Propagation};
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{
    BoundMount, InnerBind, KeptMounts, MountsBelow, NestedBind, RefreshedMounts, Refused,
    RefusedReason, SubpathInContainer, mounts_in_container, mounts_in_volume,
};
use bindguard_core::report::MountResult;
use bindguard_core::spec::{Bind, MountMakers, RequestedPropagation, SpecView};
use bindguard_core::text::lies_in;
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::{CloneSettings, NewMount};
use bindguard_sys::{Handle, Mounts, files};

use crate::inspect::OpenError;
use crate::probes::{Probes, dead_volume};
use crate::refresh::files::{RunningContainers, refuse_unsafe_way};
use crate::refresh::host_roots::HostRoots;
use crate::refresh::volumes::PodFolder;
use crate::refresh::{
    CurrentFiles, OpenedNested, SpecifiedBind, changed, failed, failed_to, mounts_of_host,
    place_of_source, refuse_shared,
};

impl SpecifiedBind {
    fn of_pod(bind: &Bind<'_>, pod: &PodFolder) -> Self {
        let in_pod = pod.path_in(bind.source());
        let Some(source) = in_pod.filter(|source| *source != pod.real) else {
            return Self::of(bind, false);
        };
        let is_volume = !is_of_kubelet_written_volume(&source, &pod.real);
        Self {
            source,
            is_in_pod: true,
            ..Self::of(bind, is_volume)
        }
    }

    /// The source, if it is a mount point now and no server has to answer.
    fn open_mount_point(&self) -> Option<(Handle, FilePlace)> {
        let (handle, source) = self.open()?;
        let place = self.place_of_mount_point(&source)?;
        Some((handle, place))
    }

    /// The place of an opened source. `None` unless the source of the spec is a mount point, and the
    /// opened file is the root of that mount.
    fn place_of_mount_point(&self, opened: &BindSource) -> Option<FilePlace> {
        let is_mount_point = opened.path == self.source && opened.mount.mount_point == self.source;
        opened.place().filter(|_| is_mount_point)
    }
}

/// True for a volume that the kubelet updates through `..data`, and for the volume's subpaths,
/// which [`super::volumes`] refreshes.
fn is_of_kubelet_written_volume(source: &Path, pod: &Path) -> bool {
    let root = pod.parent().and_then(Path::parent);
    let subpath = root.and_then(|root| VolumeSubpath::from_path(source, [root]));
    let mut written = Plugin::all().filter(|plugin| plugin.writer == Writer::Kubelet);
    written.any(|plugin| {
        let volumes = pod.join("volumes").join(plugin.folder);
        match &subpath {
            Some(subpath) => fs::symlink_metadata(volumes.join(subpath.volume())).is_ok(),
            None => lies_in(source, &volumes),
        }
    })
}

/// True for a single file that can be reached without waiting: [`super::files`] follows these.
fn is_of_file(source: &Path) -> bool {
    let mounts = Mounts::default();
    let local = mounts
        .open_without_waiting(source)
        .ok()
        .filter(|handle| mounts.is_local(handle));
    let identity = local.and_then(|handle| handle.identity().ok());
    identity.is_some_and(|identity| identity.kind != FileKind::Directory)
}

/// All binds of a container. The source of a bind with `is_volume` may be mounted anew.
#[derive(Debug)]
pub struct BoundMounts<'a> {
    bundle: PathBuf,
    binds: Vec<SpecifiedBind>,
    /// None if a part of the spec was not understood.
    makers: Option<MountMakers>,
    record: RefCell<ExpectedBinds>,
    /// The mounts of refreshes, for binds that the record of the create lacks.
    refreshed: RefCell<RefreshedMounts>,
    /// The last answers of sources that were probed together, by source.
    probed: RefCell<HashMap<PathBuf, Reach>>,
    /// The running containers, which may be able to write a folder on the way to a source. `None` for
    /// the container of a pod: root alone made the way.
    others: Option<&'a dyn RunningContainers>,
}

impl<'a> BoundMounts<'a> {
    /// The binds of the container with this bundle, of the pod with this folder
    /// (`<root>/pods/<uid>`).
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn open(bundle: &Path, pod: &Path) -> Result<Self, OpenError> {
        let pod = PodFolder::of(pod);
        Self::with_binds(bundle, |bind| SpecifiedBind::of_pod(bind, &pod), None)
    }

    /// The binds of directories of an engine's container with this bundle. Left out are the host-root
    /// binds: the binds of `roots`, and of directories in or above which a kubelet or a runtime
    /// mounts (`places`). `others` are the running containers.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn of_engine(
        bundle: &Path,
        others: &'a dyn RunningContainers,
        places: &Places,
        roots: Option<&HostRoots>,
    ) -> Result<Self, OpenError> {
        let specified = |bind: &Bind<'_>| {
            let source = bind.source();
            let is_root = places.holds_runtime_mounts(source, Scope::RuntimeDirectories)
                || roots.is_some_and(|roots| roots.has(source));
            let is_volume = source.is_absolute() && !is_root && !is_of_file(source);
            SpecifiedBind::of(bind, is_volume)
        };
        Self::with_binds(bundle, specified, Some(others))
    }

    fn with_binds(
        bundle: &Path,
        specified: impl Fn(&Bind<'_>) -> SpecifiedBind,
        others: Option<&'a dyn RunningContainers>,
    ) -> Result<Self, OpenError> {
        let bytes = files::read_spec(bundle)?;
        let spec = SpecView::from_bytes(&bytes)?;
        Ok(Self {
            bundle: bundle.to_owned(),
            binds: spec.binds().iter().map(specified).collect(),
            makers: MountMakers::from_spec(spec.bytes()).ok(),
            record: RefCell::new(files::read_record(bundle).unwrap_or_default()),
            refreshed: RefCell::default(),
            probed: RefCell::default(),
            others,
        })
    }

    fn bind_of(&self, stale: &SubpathInContainer) -> Option<&SpecifiedBind> {
        let mut volumes = self.binds.iter().filter(|bind| bind.is_volume);
        volumes.find(|bind| bind.is_of(stale))
    }

    /// Refuses a source that does not answer: a FUSE mount is in the mount table before its daemon
    /// answers.
    fn refuse_dead(&self, source: &Path) -> Result<(), Refused> {
        let known = self.probed.borrow().get(source).cloned();
        let reach = known.unwrap_or_else(|| {
            let mut reaches = Probes::for_create().reaches(&[source.to_owned()]);
            reaches.pop().unwrap_or(Reach::NotProbed)
        });
        let error = match judge_reach(&reach) {
            Some(Verdict::Dead(words)) => Some(dead_volume(source, words, &Probes::for_create())),
            verdict => verdict.and_then(|verdict| verdict.reason()),
        };
        match error {
            Some(error) => Err(Refused::new(RefusedReason::SourceIsDead, source).with_error(error)),
            None => Ok(()),
        }
    }

    /// All binds, each with the places that the container's mount may show.
    fn inner(&self) -> Vec<InnerBind> {
        let mut inner = Vec::with_capacity(self.binds.len());
        for bind in &self.binds {
            inner.push(InnerBind {
                index: bind.index,
                destination: bind.destination.clone(),
                places: self.recorded(bind),
            });
        }
        inner
    }

    fn recorded(&self, bind: &SpecifiedBind) -> Vec<FilePlace> {
        let record = self.record.borrow();
        let mut known = record.binds.iter();
        let expected = known.find(|it| it.bind == bind.index && it.destination == bind.destination);
        expected.map(|it| it.places()).unwrap_or_default()
    }

    /// Refuses a nested mount that shows neither a recorded place nor the source of now: the container
    /// may have made that mount.
    fn refuse_nested(&self, nested: &NestedBind) -> Result<(), MountResult> {
        let bind = self.binds.iter().find(|it| it.index == nested.bind);
        let (Some(bind), Some(mount)) = (bind, &nested.shown) else {
            return Ok(());
        };
        let is_recorded = self.recorded(bind).iter().any(|place| shows(mount, place));
        if !is_recorded && open_source(bind).is_none_or(|(_, place, _)| !shows(mount, &place)) {
            return Err(Refused::new(RefusedReason::NestedMount, &bind.destination).into());
        }
        Ok(())
    }

    /// Records the place that the new mount will show, and the place that the old mount shows.
    ///
    /// # Errors
    /// If the record cannot be written. Later refreshes would take the new mount for the container's
    /// own.
    fn add_place(
        &self,
        bind: &SpecifiedBind,
        old: Option<&MountEntry>,
        new: &FilePlace,
    ) -> Result<(), MountResult> {
        let mut record = self.record.borrow_mut();
        let mut known = record.binds.iter_mut();
        let Some(expected) = known.find(|it| it.bind == bind.index) else {
            return Ok(());
        };
        let shown = old.map_or_else(|| new.clone(), FilePlace::root_of);
        if expected.add_refreshed(shown, new.clone()) {
            files::replace_record(&self.bundle, &record).map_err(not_recorded)?;
        }
        Ok(())
    }

    /// Records mounts of a bind that the record of the create lacks.
    ///
    /// # Errors
    /// As for [`Self::add_place`].
    fn add_mounts(
        &self,
        bind: &SpecifiedBind,
        mounts: &[(Option<u64>, FilePlace)],
    ) -> Result<(), MountResult> {
        if !self.recorded(bind).is_empty() {
            return Ok(());
        }
        let mut refreshed = self.refreshed.borrow_mut();
        for (id, place) in mounts {
            refreshed.add(bind.index, *id, place.clone());
        }
        files::replace_refreshed(&self.bundle, &refreshed).map_err(not_recorded)
    }
}

fn not_recorded(error: io::Error) -> MountResult {
    failed_to("record the new mount beside the container's bundle", error)
}

impl CurrentFiles for BoundMounts<'_> {
    /// Reads the records again: the agent and the command line may refresh the same container.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        if let Ok(now) = files::read_record(&self.bundle) {
            self.record.replace(now);
        }
        let refreshed = files::read_refreshed(&self.bundle).unwrap_or_default();
        self.refreshed.replace(refreshed.of_container(table));
        let mut bound = Vec::new();
        for bind in self.binds.iter().filter(|bind| bind.is_volume) {
            if let Some((_, current)) = bind.open_mount_point() {
                bound.push(BoundMount {
                    source: bind.source.clone(),
                    destination: bind.destination.clone(),
                    recorded: self.recorded(bind),
                    refreshed: self.refreshed.borrow().bind(bind.index).cloned(),
                    current,
                    is_recursive: bind.settings.is_recursive(),
                });
            }
        }
        mounts_in_container(table, &bound, &self.inner())
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        let bind = self.bind_of(stale).ok_or(MountResult::KeyGone)?;
        refuse_shared(stale)?;
        let Some((root, _)) = bind.open_mount_point() else {
            return Err(Refused::new(RefusedReason::NoSource, &bind.source).into());
        };
        self.refuse_dead(&bind.source)?;
        if let Some(others) = self.others {
            refuse_unsafe_way(stale, &root, others)?;
        }
        Ok((root, bind.settings))
    }

    fn probe_sources(&self, stale: &[&SubpathInContainer]) {
        let mut sources = Vec::new();
        for bind in &self.binds {
            let is_affected = |stale: &&SubpathInContainer| {
                lies_in(&bind.destination, &stale.mount.mount_point)
                    && self.bind_of(stale).is_some()
            };
            if stale.iter().any(is_affected) {
                sources.push(bind.source.clone());
            }
        }
        let reaches = Probes::for_create().reaches(&sources);
        self.probed
            .replace(sources.into_iter().zip(reaches).collect());
    }

    fn note_replacement(
        &self,
        stale: &SubpathInContainer,
        file: &Handle,
        new: &NewMount,
    ) -> Result<(), MountResult> {
        let bind = self.bind_of(stale).ok_or_else(changed)?;
        let opened = BindSource::of(file, &Mounts::default());
        let place = opened
            .and_then(|opened| bind.place_of_mount_point(&opened))
            .ok_or_else(changed)?;
        self.add_place(bind, Some(&stale.mount), &place)?;
        let old = (stale.mount.unique_id, FilePlace::root_of(&stale.mount));
        self.add_mounts(bind, &[old, (new.unique_id(), place)])
    }

    fn note_arrived(
        &self,
        stale: &SubpathInContainer,
        beneath: &MountEntry,
    ) -> Result<(), MountResult> {
        let bind = self.bind_of(stale).ok_or_else(changed)?;
        self.add_mounts(bind, &[(beneath.unique_id, FilePlace::root_of(beneath))])
    }

    /// Records the copies of the host's mounts below the new mount. The next refresh must know that
    /// the container did not make these copies.
    fn note_attached(&self, new: &SubpathInContainer, table: &MountTable) {
        let bind = self.bind_of(new).filter(|it| it.settings.is_recursive());
        let (Some(bind), Some(below)) = (bind, MountsBelow::of(table, new.mount.id)) else {
            return;
        };
        let mut record = self.record.borrow_mut();
        // Without the limit of the create's mounts, nothing is known of the container's own mounts.
        if below.is_empty() || record.mounts_before.is_none() {
            return;
        }
        let Ok(host) = bindguard_sys::read_mount_table() else {
            return;
        };
        record.add_refreshed_mounts(below.ids_of_copies((&bind.source, &bind.destination), &host));
        // Best effort: without the ids, the next refresh refuses if the host unmounted a copy.
        let _ = files::replace_record(&self.bundle, &record);
    }

    /// The mounts in a volume, if those that are no binds of the spec may go with the volume: they
    /// are copies of mounts of the host.
    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, MountResult> {
        let bind = self.bind_of(stale).ok_or_else(changed)?;
        let volume = table.mount(stale.mount.id).ok_or_else(changed)?;
        let found = mounts_in_volume(table, volume, &self.inner());
        if found.nested.is_empty() && found.others.is_empty() {
            return Ok(None);
        }
        for nested in &found.nested {
            self.refuse_nested(nested)?;
        }
        // The new mounts are copied as a tree, and a copy of a tree lacks the unbindable mounts.
        let nested = found.nested.iter().filter_map(|bind| bind.shown.as_ref());
        if let Some(mount) = nested.chain([volume]).find(|it| it.propagation.unbindable) {
            return Err(Refused::new(RefusedReason::Unbindable, &mount.mount_point).into());
        }
        let Some(other) = found.others.first() else {
            let nested = found.nested;
            return Ok(Some(KeptMounts {
                nested,
                ..KeptMounts::default()
            }));
        };
        let refused = |path: &Path| Refused::new(RefusedReason::NestedMount, path);
        let below = MountsBelow::of(table, volume.id).ok_or_else(changed)?;
        let (true, Some(makers)) = (bind.settings.is_recursive(), &self.makers) else {
            return Err(refused(&other.mount_point).into());
        };
        let host = mounts_of_host().map_err(failed)?;
        let record = self.record.borrow();
        let places = (&*bind.source, &*bind.destination);
        let kept = below.compared(found, places, &host, makers, &record, &place_of_source);
        Ok(Some(kept.map_err(|why| refused(&why.path))?))
    }

    /// A source in the pod's folder may have been replaced. A source outside the folder must still
    /// be the container's file: a user may have changed the way to the source.
    fn open_nested(&self, nested: &NestedBind) -> Result<OpenedNested, MountResult> {
        let bind = self.binds.iter().find(|it| it.index == nested.bind);
        let bind = bind.ok_or_else(changed)?;
        let refused = |reason| Refused::new(reason, &bind.destination);
        if bind.settings.requested == RequestedPropagation::Shared
            || nested.shown.as_ref().is_some_and(MountEntry::is_shared)
        {
            return Err(refused(RefusedReason::MountIsShared).into());
        }
        let source = open_source(bind);
        let (file, place, made) = source.ok_or_else(|| refused(RefusedReason::NestedSource))?;
        if !bind.is_in_pod {
            let is_as_before = match &nested.shown {
                Some(shown) => certainly_shows(shown, &place, || {
                    let opened = BindSource::of(&file, &Mounts::default());
                    opened.is_some_and(|it| bind.place_of_mount_point(&it).is_some())
                }),
                // Two filesystems may have the same inode number.
                None => {
                    let record = self.record.borrow();
                    let mut known = record.binds.iter().filter(|it| it.bind == bind.index);
                    let recorded = known.find_map(|it| it.inode);
                    let identity = file.identity().ok();
                    recorded.is_some()
                        && recorded == identity.map(|identity| identity.inode)
                        && self.recorded(bind).contains(&place)
                }
            };
            if !is_as_before {
                return Err(refused(RefusedReason::NestedSource).into());
            }
        }
        self.refuse_dead(&bind.source)?;
        self.add_place(bind, nested.shown.as_ref(), &place)?;
        Ok(OpenedNested {
            file,
            like: nested.shown.clone().unwrap_or(made),
            settings: bind.settings,
        })
    }
}

/// The source of a bind, the place of the source, and the mount that a runtime would make of the
/// source. `None` if a symlink leads elsewhere, or if a server would have to answer.
fn open_source(bind: &SpecifiedBind) -> Option<(Handle, FilePlace, MountEntry)> {
    let (handle, source) = bind.open()?;
    let place = source.place()?;
    let mount = MountEntry {
        mount_point: bind.destination.clone(),
        attributes: source.mount.attributes.with_denied_by(bind.settings.denied),
        propagation: Propagation::default(),
        ..MountEntry::clone(&source.mount)
    };
    Some((handle, place, mount))
}

/// As [`shows`], but without the root of an NFS mount only a mount point is certain: any user of the
/// share may have replaced a directory in it.
fn certainly_shows(
    mount: &MountEntry,
    place: &FilePlace,
    is_mount_point: impl FnOnce() -> bool,
) -> bool {
    shows(mount, place)
        && !mount.root.deleted
        && (!mount.fs_type.has_root_in_source() || is_mount_point())
}

fn shows(mount: &MountEntry, place: &FilePlace) -> bool {
    // The root of an NFS mount is a part of the source, and tables of containers have no sources: the
    // device decides.
    place.is_root_of(mount) || mount.fs_type.has_root_in_source() && mount.device == place.device
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_core::mount_table::Device;

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test says what it expects")]
    fn a_directory_of_an_nfs_share_is_not_certain() {
        let place = FilePlace {
            device: Device { major: 0, minor: 7 },
            path: "/share/a".into(),
        };
        for (line, is_mount_point, expected) in [
            ("5 1 0:7 / /data/a rw - nfs4 none rw", false, false),
            ("5 1 0:7 / /data/a rw - nfs4 none rw", true, true),
            ("5 1 0:8 / /data/a rw - nfs4 none rw", true, false),
            ("5 1 0:7 /share/a /data/a rw - ext4 d rw", false, true),
            (
                "5 1 0:7 /share/a//deleted /data/a rw - ext4 d rw",
                true,
                false,
            ),
            ("5 1 0:7 /share/b /data/a rw - ext4 d rw", true, false),
        ] {
            let table = MountTable::from_mountinfo(format!("{line}\n").as_bytes()).unwrap();
            let mount = &table.entries()[0];
            let is_certain = certainly_shows(mount, &place, || is_mount_point);
            assert_eq!(is_certain, expected, "{line} {is_mount_point}");
        }
    }
}
