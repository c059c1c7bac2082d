//! The host-root binds of a container whose private copies keep the host's mounts alive.
//!
//! The new mount is the mount that a create gives now. A recursive clone of the source receives the
//! host's mounts and umounts (rslave), with the restrictions of the old mount and of the spec.
//! Policy decides as at a create: its scope, its rule for read-only binds, the pod's annotations.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use std::{fs, slice};

use bindguard_core::judge::{Finding, Pinning, Unmounted, Verdict};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::{MountAttributes, MountEntry, MountTable};
use bindguard_core::places::Places;
use bindguard_core::plan::{Plan, Rebind};
use bindguard_core::policy::{Alarm, Kept, Mode, Policy};
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{
    HostRootBind, KeptMounts, MountsBelow, MountsInVolume, Refused, RefusedReason,
    SubpathInContainer, host_roots_in_container,
};
use bindguard_core::report::{BindReport, Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{Bind, MountMakers, RequestedPropagation};
use bindguard_sys::bundle::{read_spec, record};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, MountinfoError, require_calls};

use crate::inspect::{OpenBundle, OpenError};
use crate::inspect::{inspect, judge_subpaths, planned_outcome};
use crate::probes::Probes;
use crate::rebind::{NotRebound, rebind};
use crate::refresh::current_files::CurrentFiles;
use crate::refresh::files::place_of_source;
use crate::refresh::outcome::NotReplaced;

/// The host-root binds of a container.
#[derive(Debug)]
pub struct HostRoots {
    binds: Vec<RootBind>,
    makers: Result<MountMakers, Arc<serde_json::Error>>,
    mode: Mode,
    /// From the record of the create; `None` without a record.
    record: ExpectedBinds,
}

#[derive(Debug)]
struct RootBind {
    source: PathBuf,
    destination: PathBuf,
    pinning: Pinning,
    denied: MountAttributes,
    denied_below: MountAttributes,
}

impl HostRoots {
    /// The binds of the container with this bundle that a create under this policy would make
    /// rslave, or would report, and those that are rslave by the spec.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn open(bundle: &Path, policy: &Policy, places: &Places) -> Result<Self, OpenError> {
        let bytes = read_spec(bundle)?;
        let bundle = OpenBundle::parse(&bytes, bundle, policy)?;
        Ok(Self::of(&bundle, places))
    }

    fn of(bundle: &OpenBundle<'_>, places: &Places) -> Self {
        // Only host-root binds are of interest, so the refresh probes no other source.
        let policy = Policy {
            stale_subpaths: Mode::Off,
            unmounted_volumes: Alarm::Off,
            dead_sources: Alarm::Off,
            ..*bundle.policy
        };
        let probes = Probes::for_create();
        let findings = inspect(&bundle.spec, bundle.path, &policy, places, &probes);
        let binds = bundle.spec.binds();
        let found = findings.into_iter().filter_map(|finding| {
            let bind = binds.iter().find(|it| Some(it.index()) == finding.bind)?;
            RootBind::of(bind, finding, &policy)
        });
        Self {
            binds: found.collect(),
            makers: MountMakers::from_spec(bundle.spec.bytes()).map_err(Arc::new),
            mode: policy.host_root,
            record: record::read(bundle.path).unwrap_or_default(),
        }
    }

    fn bind_of(&self, stale: &SubpathInContainer) -> Option<&RootBind> {
        let is_of = |bind: &&RootBind| {
            bind.source == stale.volume && bind.destination == stale.mount.mount_point
        };
        self.binds.iter().find(is_of)
    }

    /// The mounts below, if the old mounts below may go with the stale mount.
    fn kept_mounts(
        &self,
        bind: &RootBind,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<KeptMounts, NotReplaced> {
        let (Some(now), Some(below)) = (
            table.mount(stale.mount.id),
            MountsBelow::of(table, stale.mount.id),
        ) else {
            return Err(NotReplaced::Changed);
        };
        if now.propagation.passes_umounts_on() {
            return Err(NotReplaced::Changed);
        }
        let parent = table.mount(now.parent);
        if parent.is_none_or(|parent| parent.propagation.peer_group.is_some()) {
            let place = &now.mount_point;
            return Err(Refused::new(RefusedReason::ParentIsShared, place).into());
        }
        let (_, root) = bind.open().ok_or(NotReplaced::Changed)?;
        let makers = self.makers.as_ref().map_err(|error| {
            let refused = Refused::new(RefusedReason::SpecUnknown, &bind.destination);
            refused.with_error(error.to_string())
        })?;
        let host = bindguard_sys::read_mount_table().map_err(NotReplaced::HostMounts)?;
        let found = MountsInVolume {
            nested: Vec::new(),
            others: below.mounts().collect(),
        };
        let places = (&*root.source, &*root.destination);
        Ok(below.compared(found, places, &host, makers, &self.record, &place_of_source)?)
    }
}

/// A mount that the host does not have, in the bind of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrivateCopy {
    pub mount: MountEntry,
    pub parent: Option<MountEntry>,
    pub is_recorded: bool,
}

impl HostRoots {
    /// True if a host-root bind has this source.
    pub fn has(&self, source: &Path) -> bool {
        self.binds.iter().any(|bind| bind.source == source)
    }

    /// True if the container has no such bind.
    pub fn is_empty(&self) -> bool {
        self.binds.is_empty()
    }

    /// True if the create of the container was recorded with its mounts.
    pub(crate) fn has_record(&self) -> bool {
        self.record.mounts_before.is_some()
    }

    /// The mounts that the host does not have, in the binds of the container: the innermost first.
    pub(crate) fn copies(&self, table: &MountTable) -> Result<Vec<PrivateCopy>, HostRootError> {
        let makers = self.makers.as_ref();
        let makers = makers.map_err(|error| HostRootError::Spec(Arc::clone(error)))?;
        let host = bindguard_sys::read_mount_table().map_err(HostRootError::HostMounts)?;
        let mut copies = Vec::new();
        for bind in &self.binds {
            let Some((_, root)) = bind.open() else {
                continue;
            };
            for shown in host_roots_in_container(table, slice::from_ref(&root)) {
                let Some(below) = MountsBelow::of(table, shown.mount.id) else {
                    continue;
                };
                let gone = below.gone(&root, &host, makers, &self.record, &place_of_source);
                let gone = gone.map_err(|refused| HostRootError::Below(refused.path))?;
                copies.extend(gone.into_iter().rev().map(|gone| PrivateCopy {
                    mount: gone.mount.clone(),
                    parent: table.mount(gone.mount.parent).cloned(),
                    is_recorded: gone.is_recorded_copy,
                }));
            }
        }
        Ok(copies)
    }
}

impl RootBind {
    fn of(bind: &Bind<'_>, finding: Finding, policy: &Policy) -> Option<Self> {
        let is_slave = matches!(
            bind.propagation(),
            RequestedPropagation::Slave | RequestedPropagation::RecursiveSlave
        );
        let pinning = if let Verdict::Pinning(pinning) = finding.verdict {
            pinning
        } else if finding.verdict == Verdict::Current && is_slave && policy.is_recursive(bind) {
            // As a create left the spec. runc and crun make the mount private on which a plain
            // folder with the root filesystem lies, and then a bind of this mount stays private.
            Pinning {
                bind: true,
                rootfs: false,
                private_mount: None,
                kept: policy.keeps(bind.denied(), bind.denied_below()),
            }
        } else {
            return None;
        };
        (finding.kind == SourceKind::HostRoot).then(|| Self {
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            pinning,
            denied: bind.denied(),
            denied_below: bind.denied_below(),
        })
    }

    /// The source, if no server has to answer. A link is not followed: the container could have
    /// exchanged a folder on the way. The CRI resolves links before it writes the spec.
    fn open(&self) -> Option<(Handle, HostRootBind)> {
        let (handle, source) = BindSource::open_without_waiting(&self.source)?;
        if source.path != self.source {
            return None;
        }
        let root = HostRootBind {
            source: source.path.clone(),
            destination: self.destination.clone(),
            current: source.place()?,
            pinning: self.pinning.clone(),
        };
        Some((handle, root))
    }

    fn refusal(&self, mode: Mode) -> Option<Refused> {
        let here = |reason| Some(Refused::new(reason, &self.destination));
        match (self.pinning.kept, &self.pinning.private_mount) {
            (Some(Kept::RecursivelyReadOnly), _) => here(RefusedReason::RecursivelyReadOnly),
            (Some(Kept::ReadOnly), _) => here(RefusedReason::ReadOnlyKept),
            (None, Some(mount)) => Some(Refused::new(RefusedReason::PrivateOnHost, mount)),
            (None, None) if mode != Mode::Repair => here(RefusedReason::OnlyReported),
            (None, None) => None,
        }
    }
}

impl CurrentFiles for HostRoots {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let binds = self.binds.iter().filter_map(|bind| Some(bind.open()?.1));
        host_roots_in_container(table, &binds.collect::<Vec<_>>())
    }

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.bind_of(stale).is_some()
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        let bind = self.bind_of(stale).ok_or(NotReplaced::KeyGone)?;
        if let Some(refusal) = bind.refusal(self.mode) {
            return Err(refusal.into());
        }
        let opened = bind.open().map(|(handle, _)| handle);
        opened.ok_or_else(|| Refused::new(RefusedReason::NoSource, &bind.source).into())
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        let settings = |bind: &RootBind| CloneSettings {
            below: Some(bind.denied_below),
            denied: Some(bind.denied),
            requested: RequestedPropagation::RecursiveSlave,
            ..CloneSettings::default()
        };
        self.bind_of(stale).map(settings).unwrap_or_default()
    }

    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        let bind = self.bind_of(stale);
        bind.map(|bind| self.kept_mounts(bind, stale, table))
            .transpose()
    }
}

// Why the mounts in the host-root binds of a container cannot be compared with those of the host.

/// Why the mounts in a host-root bind cannot be compared with those of the host.
#[derive(Debug, thiserror::Error)]
pub enum HostRootError {
    /// The spec itself mounts below the bind.
    #[error("the spec mounts or masks {} below the bind", .0.display())]
    Below(PathBuf),
    /// The spec was not understood.
    #[error("find the mounts that the spec makes")]
    Spec(#[source] Arc<serde_json::Error>),
    /// The mounts of the host could not be read.
    #[error("compare with the mounts of the host")]
    HostMounts(#[source] MountinfoError),
}

// Re-binds the host's subpaths of a volume, right after the kubelet updated it.
//
// It is the guard's own re-bind, for a volume instead of a bundle.

/// A volume of a pod, by its name in the pod's spec.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeOfPod {
    pub kubelet_root: PathBuf,
    pub pod_uid: String,
    pub volume: String,
}

impl VolumeOfPod {
    /// `<root>/pods/<uid>`
    pub fn pod_directory(&self) -> PathBuf {
        self.kubelet_root.join("pods").join(&self.pod_uid)
    }

    /// `<root>/pods/<uid>/volume-subpaths/<volume>`
    pub fn subpaths_directory(&self) -> PathBuf {
        self.pod_directory()
            .join("volume-subpaths")
            .join(&self.volume)
    }

    /// True if a container has a directory of the volume as its subPath: such a directory is empty
    /// once the kubelet removed the old payload.
    pub fn has_directories(&self) -> bool {
        let paths = self.subpaths().into_iter().map(|subpath| subpath.path());
        paths
            .into_iter()
            .any(|path| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir()))
    }

    /// The subpaths that the kubelet bound, in no order. A missing folder has no subpaths: the pod
    /// is being removed.
    fn subpaths(&self) -> Vec<VolumeSubpath> {
        let containers = entries(&self.subpaths_directory());
        let paths = containers.iter().flat_map(|container| entries(container));
        paths
            .filter_map(|path| VolumeSubpath::from_path(&path, [self.kubelet_root.as_path()]))
            .collect()
    }
}

/// Re-binds the stale subpaths of a volume, or reports them, as policy says of stale subpaths.
///
/// A subpath without a mount is left out: the kubelet is about to bind it, or to remove it.
pub fn rebind_volume(volume: &VolumeOfPod, policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    if policy.stale_subpaths != Mode::Off
        && let Err(old) = require_calls()
    {
        report.problems.push(old.to_string());
    } else if policy.stale_subpaths != Mode::Off {
        let findings = judge_subpaths(&volume.subpaths(), &Probes::for_create())
            .into_iter()
            .filter(|finding| !has_no_mount(&finding.verdict));
        report.binds = findings
            .filter_map(|finding| reported(finding, policy))
            .collect();
    }
    report.set_duration(start.elapsed());
    report
}

fn has_no_mount(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Unmounted(Unmounted::Subpath))
}

/// `None` if the subpath went away meanwhile.
fn reported(finding: Finding, policy: &Policy) -> Option<BindReport> {
    let outcome = match policy.stale_subpaths {
        Mode::Repair => {
            let rebind = |order: &Rebind| rebind(order, &Probes::for_repairs(Instant::now()));
            match Rebind::from_finding(&finding, policy).as_ref().map(rebind) {
                Some(Err(NotRebound::NoLongerStale(_))) => return None,
                rebound => rebound.map(|rebound| rebound.unwrap_or_else(Outcome::from)),
            }
        }
        // The effect that a repair would have: policy only keeps it from being done.
        Mode::Report | Mode::Off => {
            let policy = Policy {
                stale_subpaths: Mode::Repair,
                ..*policy
            };
            planned_outcome(
                &finding,
                &Plan::from_findings(slice::from_ref(&finding), &policy),
                &policy,
            )
        }
    };
    Some(BindReport { finding, outcome })
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}
