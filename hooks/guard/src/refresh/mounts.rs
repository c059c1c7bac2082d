//! The binds of a pod's container whose source the host has mounted anew: volumes of drivers that
//! were restarted.
//!
//! Only sources in the folder of the pod count. The kubelet made the way to them, for root alone,
//! and no symlink is followed. The record beside the bundle says what the container's mounts showed
//! before; it is written anew before a mount is replaced.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use bindguard_core::evidence::{FilePlace, Reach};
use bindguard_core::judge::{Verdict, judge_reach};
use bindguard_core::kubelet::{Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::MountTable;
use bindguard_core::paths::lies_in;
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{BoundMount, SubpathInContainer, mounts_in_container};
use bindguard_core::spec::{Bind, RequestedPropagation, SpecView};
use bindguard_sys::bundle::{read_record, read_spec, replace_record};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, Mounts, OpenedTarget, open_without_waiting};

use super::current_files::CurrentFiles;
use super::outcome::NotReplaced;
use crate::probes::Probes;

/// Limit of places that the record keeps for one bind.
const MAX_PLACES: usize = 8;

/// The binds of one container with a source in the folder of its pod.
#[derive(Debug)]
pub struct BoundMounts {
    bundle: PathBuf,
    binds: Vec<PodBind>,
    record: Mutex<ExpectedBinds>,
}

#[derive(Debug)]
struct PodBind {
    index: usize,
    source: PathBuf,
    destination: PathBuf,
    settings: CloneSettings,
}

impl BoundMounts {
    /// The binds of the container with this bundle, of the pod with this folder
    /// (`<root>/pods/<uid>`). None if the bundle has no spec.
    pub fn open(bundle: &Path, pod: &Path) -> Option<Self> {
        let bytes = read_spec(bundle).ok()?;
        let spec = SpecView::from_bytes(&bytes).ok()?;
        let binds = spec.binds().iter().filter(|bind| {
            let source = bind.source();
            lies_in(source, pod) && source != pod && !is_of_kubelet_written_volume(source, pod)
        });
        let binds = binds.map(|bind| PodBind {
            index: bind.index(),
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            settings: settings_of(bind),
        });
        let record = read_record(bundle)
            .ok()
            .and_then(|json| serde_json::from_slice(&json).ok())
            .unwrap_or_default();
        Some(Self {
            bundle: bundle.to_owned(),
            binds: binds.collect(),
            record: Mutex::new(record),
        })
    }

    fn bind_of(&self, stale: &SubpathInContainer) -> Option<&PodBind> {
        let is_of = |bind: &&PodBind| {
            bind.source == stale.volume && bind.destination == stale.mount.mount_point
        };
        self.binds.iter().find(is_of)
    }

    fn recorded(&self, bind: &PodBind) -> Vec<FilePlace> {
        let record = self.record.lock().unwrap_or_else(|it| it.into_inner());
        let mut known = record.binds.iter();
        let expected = known.find(|it| it.bind == bind.index && it.destination == bind.destination);
        expected.map(|it| it.places()).unwrap_or_default()
    }

    /// Adds what the new mount will show: a refresh that is interrupted leaves one of both.
    fn add_place(&self, bind: &PodBind, place: &FilePlace) {
        let mut record = self.record.lock().unwrap_or_else(|it| it.into_inner());
        let mut known = record.binds.iter_mut();
        let Some(expected) = known.find(|it| it.bind == bind.index) else {
            return;
        };
        if expected.places().contains(place) {
            return;
        }
        expected.refreshed.push(place.clone());
        let excess = expected.refreshed.len().saturating_sub(MAX_PLACES);
        expected.refreshed.drain(..excess);
        if let Ok(json) = serde_json::to_vec(&*record) {
            // Without it the next refresh takes the mount for the container's own, and keeps it.
            let _ = replace_record(&self.bundle, &json);
        }
    }
}

impl PodBind {
    /// The source, if it is a mount point now and no server has to answer.
    fn open(&self) -> Option<(Handle, FilePlace)> {
        let earlier = Mounts::default();
        let handle = open_without_waiting(&self.source, |handle| earlier.is_local(handle)).ok()?;
        let handle = handle.unqueried();
        let mounts = earlier.for_newly_opened();
        let place = self.place_of(&handle, &mounts)?;
        Some((handle, place))
    }

    /// `None` unless the file is the root of the mount at the source itself.
    fn place_of(&self, handle: &Handle, mounts: &Mounts) -> Option<FilePlace> {
        let source = BindSource::of(handle, mounts)?;
        if source.path != self.source || source.mount.mount_point != self.source {
            return None;
        }
        Some(FilePlace {
            device: source.mount.device,
            path: source.mount.place_in_filesystem(&source.path)?,
        })
    }
}

impl CurrentFiles for BoundMounts {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let bound = self.binds.iter().filter_map(|bind| {
            Some(BoundMount {
                source: bind.source.clone(),
                destination: bind.destination.clone(),
                recorded: self.recorded(bind),
                current: bind.open()?.1,
            })
        });
        mounts_in_container(table, &bound.collect::<Vec<_>>())
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Option<Result<OpenedTarget, NotReplaced>> {
        let bind = self.bind_of(stale)?;
        if stale
            .parent
            .as_ref()
            .is_some_and(|parent| parent.propagation.peer_group.is_some())
        {
            return Some(Err(NotReplaced::ParentIsShared));
        }
        if stale.mount.propagation.peer_group.is_some() {
            return Some(Err(NotReplaced::IsShared));
        }
        let Some((handle, _)) = bind.open() else {
            return Some(Ok(OpenedTarget {
                timestamp: None,
                file: None,
            }));
        };
        if let Some(words) = error_of(&bind.source) {
            return Some(Err(NotReplaced::SourceIsDead(words)));
        }
        Some(Ok(OpenedTarget {
            timestamp: None,
            file: Some(handle),
        }))
    }

    fn note_replacement(&self, stale: &SubpathInContainer, file: &Handle) {
        let bind = self.bind_of(stale);
        let place = bind.and_then(|bind| bind.place_of(file, &Mounts::default()));
        if let Some((bind, place)) = bind.zip(place) {
            self.add_place(bind, &place);
        }
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        self.bind_of(stale)
            .map(|bind| bind.settings)
            .unwrap_or_default()
    }
}

fn settings_of(bind: &Bind<'_>) -> CloneSettings {
    CloneSettings {
        below: bind.is_recursive().then(|| bind.denied_below()),
        denied: None,
        is_slave: bind.propagation() == RequestedPropagation::RecursiveSlave,
    }
}

/// Why the new mount does not answer: a FUSE mount is in the mount table before its daemon answers.
fn error_of(source: &Path) -> Option<String> {
    let probed = Probes::for_create().probe(&[vec![source.to_owned()]]);
    let reach = probed
        .first()
        .map_or(Reach::NotProbed, |answers| answers.reach());
    match judge_reach(&reach)? {
        Verdict::Dead(words) => Some(words),
        verdict => verdict.reason(),
    }
}

/// True for a volume that follows `..data` by itself, and for its subpaths, which have a refresh of
/// their own.
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
