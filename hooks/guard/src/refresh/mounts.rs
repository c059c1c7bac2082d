//! The binds of a container whose source the host has mounted anew, such as a volume of a CSI driver
//! that was restarted, and the binds of the spec that are nested in these binds.
//!
//! In a pod, only sources in the pod's folder are volumes: the kubelet made the way to these
//! sources, for root alone. [`super::running`] checks the way to sources of containers
//! without a pod. No symlink is followed. The record of the create has the places that the
//! container's mounts showed before; without that record, refreshes keep a record of their own
//! mounts. A refresh writes the record before it replaces a mount.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use bindguard_core::evidence::{FilePlace, Reach};
use bindguard_core::judge::{Verdict, judge_reach};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{
    BoundMount, InnerBind, KeptMounts, MountsBelow, MountsInVolume, NestedBind, RefreshedMounts,
    Refused, RefusedReason, SubpathInContainer, mounts_in_container, mounts_in_volume,
};
use bindguard_core::spec::{Bind, MountMakers, SpecView};
use bindguard_sys::bundle::{read_spec, record};
use bindguard_sys::replace::{CloneSettings, NewMount};
use bindguard_sys::{Handle, Mounts};

use super::current_files::{CurrentFiles, OpenedNested};
use super::outcome::NotReplaced;
use super::running::RunningContainers;
use crate::expect::dead_volume;
use crate::inspect::OpenError;
use crate::probes::Probes;
use crate::refresh::current_files::PodFolder;
use crate::refresh::current_files::refuse_unsafe_way;
use crate::refresh::files::{SpecifiedBind, place_of_source};

/// All binds of a container. The source of a bind with `is_volume` may be mounted anew.
#[derive(Debug)]
pub struct BoundMounts<'a> {
    bundle: PathBuf,
    binds: Vec<SpecifiedBind>,
    /// None if a part of the spec was not understood.
    makers: Option<MountMakers>,
    record: Mutex<ExpectedBinds>,
    /// The mounts of refreshes, for binds that the record of the create lacks.
    refreshed: Mutex<RefreshedMounts>,
    /// The last answers of sources that were probed together, by source.
    probed: Mutex<HashMap<PathBuf, Reach>>,
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

    /// The binds of the container with this bundle; `specified` classifies each bind of the spec.
    pub(super) fn with_binds(
        bundle: &Path,
        specified: impl Fn(&Bind<'_>) -> SpecifiedBind,
        others: Option<&'a dyn RunningContainers>,
    ) -> Result<Self, OpenError> {
        let bytes = read_spec(bundle)?;
        let spec = SpecView::from_bytes(&bytes)?;
        let binds = spec.binds().iter().map(specified);
        let record = record::read(bundle).unwrap_or_default();
        Ok(Self {
            bundle: bundle.to_owned(),
            binds: binds.collect(),
            makers: MountMakers::from_spec(spec.bytes()).ok(),
            record: Mutex::new(record),
            refreshed: Mutex::default(),
            probed: Mutex::default(),
            others,
        })
    }

    fn record(&self) -> MutexGuard<'_, ExpectedBinds> {
        self.record.lock().unwrap_or_else(|it| it.into_inner())
    }

    fn refreshed(&self) -> MutexGuard<'_, RefreshedMounts> {
        self.refreshed.lock().unwrap_or_else(|it| it.into_inner())
    }

    /// Reads the records again: the agent and the command line may refresh the same container.
    fn read_records(&self, table: &MountTable) {
        if let Ok(now) = record::read(&self.bundle) {
            *self.record() = now;
        }
        let refreshed = record::read_refreshed(&self.bundle).unwrap_or_default();
        *self.refreshed() = refreshed.of_container(table);
    }

    fn bind_of(&self, stale: &SubpathInContainer) -> Option<&SpecifiedBind> {
        let is_of = |bind: &&SpecifiedBind| {
            bind.source == stale.volume && bind.destination == stale.mount.mount_point
        };
        self.volumes().find(is_of)
    }

    /// The refusal of a source that does not answer: a FUSE mount is in the mount table before its
    /// daemon answers.
    fn refusal_of_dead(&self, source: &Path) -> Option<Refused> {
        let probed = self.probed.lock().unwrap_or_else(|it| it.into_inner());
        let known = probed.get(source).cloned();
        drop(probed);
        let reach = known.unwrap_or_else(|| {
            let reaches = Probes::for_create().reaches(&[source.to_owned()]);
            reaches.into_iter().next().unwrap_or(Reach::NotProbed)
        });
        let error = match judge_reach(&reach)? {
            Verdict::Dead(words) => dead_volume(source, words, &Probes::for_create()),
            verdict => verdict.reason()?,
        };
        Some(Refused::new(RefusedReason::SourceIsDead, source).with_error(error))
    }

    fn volumes(&self) -> impl Iterator<Item = &SpecifiedBind> {
        self.binds.iter().filter(|bind| bind.is_volume)
    }

    /// All binds, each with the places that the container's mount may show.
    fn inner(&self) -> Vec<InnerBind> {
        let inner = self.binds.iter().map(|bind| InnerBind {
            index: bind.index,
            destination: bind.destination.clone(),
            places: self.recorded(bind),
        });
        inner.collect()
    }

    /// Refuses a nested mount that shows neither a recorded place nor the source of now: the container
    /// may have made that mount.
    fn refuse_mount_of_container(&self, nested: &NestedBind) -> Result<(), NotReplaced> {
        let bind = self.binds.iter().find(|it| it.index == nested.bind);
        let (Some(bind), Some(shown)) = (bind, &nested.shown) else {
            return Ok(());
        };
        let is_recorded = || self.recorded(bind).iter().any(|place| shows(shown, place));
        let is_current = || {
            let opened = bind.open_source();
            opened.is_some_and(|(_, place, _)| shows(shown, &place))
        };
        match is_recorded() || is_current() {
            true => Ok(()),
            false => Err(Refused::new(RefusedReason::NestedMount, &bind.destination).into()),
        }
    }

    /// The mounts in a volume, if those that are no binds of the spec may go with the volume: they
    /// are copies of mounts of the host.
    fn kept_mounts(
        &self,
        bind: &SpecifiedBind,
        found: MountsInVolume<'_>,
        table: &MountTable,
        volume: &MountEntry,
    ) -> Result<KeptMounts, NotReplaced> {
        let Some(other) = found.others.first() else {
            let nested = found.nested;
            return Ok(KeptMounts {
                nested,
                ..KeptMounts::default()
            });
        };
        let refused = Refused::new(RefusedReason::NestedMount, &other.mount_point);
        let below = MountsBelow::of(table, volume.id).ok_or(NotReplaced::Changed)?;
        let (true, Some(makers)) = (bind.settings.is_recursive(), &self.makers) else {
            return Err(refused.into());
        };
        let host = bindguard_sys::read_mount_table().map_err(NotReplaced::HostMounts)?;
        let places = (&*bind.source, &*bind.destination);
        let record = self.record().clone();
        let kept = below.compared(found, places, &host, makers, &record, &place_of_source);
        kept.map_err(|why| Refused::new(RefusedReason::NestedMount, why.path).into())
    }

    fn recorded(&self, bind: &SpecifiedBind) -> Vec<FilePlace> {
        let record = self.record();
        let mut known = record.binds.iter();
        let expected = known.find(|it| it.bind == bind.index && it.destination == bind.destination);
        expected.map(|it| it.places()).unwrap_or_default()
    }

    /// True if the record of the create has the inode of this file.
    fn is_recorded_file(&self, bind: &SpecifiedBind, file: &Handle) -> bool {
        let record = self.record();
        let mut known = record.binds.iter().filter(|it| it.bind == bind.index);
        let identity = file.identity().ok();
        let recorded = known.find_map(|it| it.inode);
        recorded.is_some() && recorded == identity.map(|identity| identity.inode)
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
    ) -> Result<(), NotReplaced> {
        let mut record = self.record();
        let mut known = record.binds.iter_mut();
        let Some(expected) = known.find(|it| it.bind == bind.index) else {
            return Ok(());
        };
        let shown = old.map_or_else(|| new.clone(), FilePlace::root_of);
        match expected.add_refreshed(shown, new.clone()) {
            true => record::replace(&self.bundle, &record).map_err(NotReplaced::PlaceNotRecorded),
            false => Ok(()),
        }
    }

    /// Records mounts of a bind that the record of the create lacks.
    ///
    /// # Errors
    /// As for [`Self::add_place`].
    fn add_mounts(
        &self,
        bind: &SpecifiedBind,
        mounts: &[(Option<u64>, FilePlace)],
    ) -> Result<(), NotReplaced> {
        if !self.recorded(bind).is_empty() {
            return Ok(());
        }
        let mut refreshed = self.refreshed();
        for (id, place) in mounts {
            refreshed.add(bind.index, *id, place.clone());
        }
        record::replace_refreshed(&self.bundle, &refreshed).map_err(NotReplaced::PlaceNotRecorded)
    }
}

impl CurrentFiles for BoundMounts<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.read_records(table);
        let bound = self.volumes().filter_map(|bind| {
            Some(BoundMount {
                source: bind.source.clone(),
                destination: bind.destination.clone(),
                recorded: self.recorded(bind),
                refreshed: self.refreshed().bind(bind.index).cloned(),
                current: bind.open_mount_point()?.1,
                is_recursive: bind.settings.is_recursive(),
            })
        });
        mounts_in_container(table, &bound.collect::<Vec<_>>(), &self.inner())
    }

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.bind_of(stale).is_some()
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        let bind = self.bind_of(stale).ok_or(NotReplaced::KeyGone)?;
        let refused = |reason| Err(Refused::new(reason, &stale.mount.mount_point).into());
        let is_shared = |mount: &MountEntry| mount.propagation.peer_group.is_some();
        if stale.parent.as_ref().is_some_and(is_shared) {
            return refused(RefusedReason::ParentIsShared);
        }
        if is_shared(&stale.mount) {
            return refused(RefusedReason::MountIsShared);
        }
        let Some((root, _)) = bind.open_mount_point() else {
            return Err(Refused::new(RefusedReason::NoSource, &bind.source).into());
        };
        if let Some(refused) = self.refusal_of_dead(&bind.source) {
            return Err(refused.into());
        }
        if let Some(others) = self.others {
            refuse_unsafe_way(stale, &root, others)?;
        }
        Ok(root)
    }

    fn probe_sources(&self, stale: &[&SubpathInContainer]) {
        let stale = stale.iter().filter(|stale| self.bind_of(stale).is_some());
        let places: Vec<_> = stale.map(|stale| &stale.mount.mount_point).collect();
        let is_affected = |bind: &&SpecifiedBind| {
            let mut places = places.iter();
            places.any(|place| lies_in(&bind.destination, place))
        };
        let affected = self.binds.iter().filter(is_affected);
        let sources: Vec<_> = affected.map(|bind| bind.source.clone()).collect();
        let reaches = Probes::for_create().reaches(&sources);
        let mut probed = self.probed.lock().unwrap_or_else(|it| it.into_inner());
        *probed = sources.into_iter().zip(reaches).collect();
    }

    fn note_replacement(
        &self,
        stale: &SubpathInContainer,
        file: &Handle,
        new: &NewMount,
    ) -> Result<(), NotReplaced> {
        let Some(bind) = self.bind_of(stale) else {
            return Ok(());
        };
        let place = bind.place_of(file, &Mounts::default());
        let place = place.ok_or(NotReplaced::Changed)?;
        self.add_place(bind, Some(&stale.mount), &place)?;
        let old = (stale.mount.unique_id, FilePlace::root_of(&stale.mount));
        self.add_mounts(bind, &[old, (new.unique_id(), place)])
    }

    fn note_arrived(
        &self,
        stale: &SubpathInContainer,
        beneath: &MountEntry,
    ) -> Result<(), NotReplaced> {
        let Some(bind) = self.bind_of(stale) else {
            return Ok(());
        };
        let arrived = (beneath.unique_id, FilePlace::root_of(beneath));
        self.add_mounts(bind, &[arrived])
    }

    /// Records the copies of the host's mounts below the new mount. The next refresh must know that
    /// the container did not make these copies.
    fn note_attached(&self, new: &SubpathInContainer, table: &MountTable) {
        let bind = self.bind_of(new).filter(|it| it.settings.is_recursive());
        let (Some(bind), Some(below)) = (bind, MountsBelow::of(table, new.mount.id)) else {
            return;
        };
        // Without the limit of the create's mounts, nothing is known of the container's own mounts.
        if below.is_empty() || self.record().mounts_before.is_none() {
            return;
        }
        let Ok(host) = bindguard_sys::read_mount_table() else {
            return;
        };
        let copies = below.ids_of_copies((&bind.source, &bind.destination), &host);
        let mut record = self.record();
        record.add_refreshed_mounts(copies);
        // Best effort: without the ids, the next refresh refuses if the host unmounted a copy.
        let _ = record::replace(&self.bundle, &record);
    }

    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        let Some(bind) = self.bind_of(stale) else {
            return Ok(None);
        };
        let volume = table.mount(stale.mount.id).ok_or(NotReplaced::Changed)?;
        let found = mounts_in_volume(table, volume, &self.inner());
        if found.nested.is_empty() && found.others.is_empty() {
            return Ok(None);
        }
        for bind in &found.nested {
            self.refuse_mount_of_container(bind)?;
        }
        let shown = found.nested.iter().filter_map(|bind| bind.shown.as_ref());
        refuse_unbindable(shown.chain([volume]))?;
        self.kept_mounts(bind, found, table, volume).map(Some)
    }

    /// A source in the pod's folder may have been replaced. A source outside the folder must still
    /// be the container's file: a user may have changed the way to the source.
    fn open_nested(
        &self,
        _stale: &SubpathInContainer,
        nested: &NestedBind,
    ) -> Result<OpenedNested, NotReplaced> {
        let bind = self.binds.iter().find(|it| it.index == nested.bind);
        let bind = bind.ok_or(NotReplaced::Changed)?;
        let refused = |reason| NotReplaced::from(Refused::new(reason, &bind.destination));
        let is_peer = |shown: &MountEntry| shown.propagation.peer_group.is_some();
        if bind.is_shared || nested.shown.as_ref().is_some_and(is_peer) {
            return Err(refused(RefusedReason::MountIsShared));
        }
        let (file, place, made) = bind
            .open_source()
            .ok_or_else(|| refused(RefusedReason::NestedSource))?;
        let is_mount_point = || bind.place_of(&file, &Mounts::default()).is_some();
        let is_as_before = || match &nested.shown {
            Some(shown) => certainly_shows(shown, &place, is_mount_point),
            // Two filesystems may have the same inode number.
            None => self.recorded(bind).contains(&place) && self.is_recorded_file(bind, &file),
        };
        if !bind.is_in_pod && !is_as_before() {
            return Err(refused(RefusedReason::NestedSource));
        }
        if let Some(refused) = self.refusal_of_dead(&bind.source) {
            return Err(refused.into());
        }
        self.add_place(bind, nested.shown.as_ref(), &place)?;
        Ok(OpenedNested {
            file,
            like: nested.shown.clone().unwrap_or(made),
            settings: bind.settings,
        })
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        self.bind_of(stale)
            .map(|bind| bind.settings)
            .unwrap_or_default()
    }
}

/// The new mounts are copied as a tree, and a copy of a tree lacks the unbindable mounts.
fn refuse_unbindable<'t>(
    mut mounts: impl Iterator<Item = &'t MountEntry>,
) -> Result<(), NotReplaced> {
    match mounts.find(|mount| mount.propagation.unbindable) {
        Some(mount) => Err(Refused::new(RefusedReason::Unbindable, &mount.mount_point).into()),
        None => Ok(()),
    }
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
    let is_on_device = || mount.fs_type.has_root_in_source() && mount.device == place.device;
    place.is_root_of(mount) || is_on_device()
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
