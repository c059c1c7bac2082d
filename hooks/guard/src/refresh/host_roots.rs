//! The host-root binds of a container whose private copies keep the host's mounts alive.
//!
//! The new mount is the mount that a create gives now. A recursive clone of the source receives the
//! host's mounts and umounts (rslave), with the restrictions of the old mount and of the spec.
//! Policy decides as at a create: its scope, its rule for read-only binds, the pod's annotations.

use std::path::{Path, PathBuf};
use std::slice;

use bindguard_core::judge::{Finding, Pinning, Verdict};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Kept, Mode, Policy};
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{
    HostRootBind, KeptMounts, MountsBelow, MountsInVolume, Refused, RefusedReason,
    SubpathInContainer, host_roots_in_container,
};
use bindguard_core::report::MountResult;
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{Bind, MountMakers, RequestedPropagation};
use bindguard_sys::Handle;
use bindguard_sys::bundle::{read_spec, record};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::CloneSettings;

use crate::SourceError;
use crate::inspect::{OpenBundle, OpenError, inspect};
use crate::probes::Probes;
use crate::refresh::current_files::{CurrentFiles, changed, failed, mounts_of_host};
use crate::refresh::mounts::place_of_source;

/// The host-root binds of a container.
#[derive(Debug)]
pub struct HostRoots {
    binds: Vec<RootBind>,
    makers: serde_json::Result<MountMakers>,
    mode: Mode,
    /// From the record of the create; `None` without a record.
    record: ExpectedBinds,
}

#[derive(Debug)]
struct RootBind {
    source: PathBuf,
    destination: PathBuf,
    pinning: Pinning,
    settings: CloneSettings,
}

/// A mount that the host does not have, in the bind of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrivateCopy {
    pub mount: MountEntry,
    pub parent: Option<MountEntry>,
    pub is_recorded: bool,
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
        // Only host-root binds are of interest, so the refresh probes no other source.
        let policy = Policy {
            stale_subpaths: Mode::Off,
            unmounted_volumes: Alarm::Off,
            dead_sources: Alarm::Off,
            ..*bundle.policy
        };
        let probes = Probes::for_create();
        let mut binds = Vec::new();
        for finding in inspect(&bundle.spec, bundle.path, &policy, places, &probes) {
            let mut specified = bundle.spec.binds().iter();
            if let Some(bind) = specified.find(|it| Some(it.index()) == finding.bind) {
                binds.extend(RootBind::of(bind, finding, &policy));
            }
        }
        Ok(Self {
            binds,
            makers: MountMakers::from_spec(bundle.spec.bytes()),
            mode: policy.host_root,
            record: record::read(bundle.path).unwrap_or_default(),
        })
    }

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
    pub(crate) fn copies(&self, table: &MountTable) -> Result<Vec<PrivateCopy>, SourceError> {
        let makers = self.makers.as_ref().map_err(|error| {
            SourceError::new(format!("find the mounts that the spec makes: {error}"))
        })?;
        let host = mounts_of_host()?;
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
                let gone = gone.map_err(|refused| {
                    let place = refused.path.display();
                    SourceError::new(format!("the spec mounts or masks {place} below the bind"))
                })?;
                for gone in gone.into_iter().rev() {
                    copies.push(PrivateCopy {
                        mount: gone.mount.clone(),
                        parent: table.mount(gone.mount.parent).cloned(),
                        is_recorded: gone.is_recorded_copy,
                    });
                }
            }
        }
        Ok(copies)
    }

    fn bind_of(&self, stale: &SubpathInContainer) -> Option<&RootBind> {
        let mut binds = self.binds.iter();
        binds
            .find(|bind| bind.source == stale.volume && bind.destination == stale.mount.mount_point)
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
            settings: CloneSettings {
                below: Some(bind.denied_below()),
                denied: Some(bind.denied()),
                requested: RequestedPropagation::RecursiveSlave,
                ..CloneSettings::default()
            },
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

    fn refuse(&self, mode: Mode) -> Result<(), Refused> {
        let here = |reason| Err(Refused::new(reason, &self.destination));
        match (self.pinning.kept, &self.pinning.private_mount) {
            (Some(Kept::RecursivelyReadOnly), _) => here(RefusedReason::RecursivelyReadOnly),
            (Some(Kept::ReadOnly), _) => here(RefusedReason::ReadOnlyKept),
            (None, Some(mount)) => Err(Refused::new(RefusedReason::PrivateOnHost, mount)),
            (None, None) if mode != Mode::Repair => here(RefusedReason::OnlyReported),
            (None, None) => Ok(()),
        }
    }
}

impl CurrentFiles for HostRoots {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let binds = self.binds.iter().filter_map(|bind| Some(bind.open()?.1));
        host_roots_in_container(table, &binds.collect::<Vec<_>>())
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, MountResult> {
        let bind = self.bind_of(stale).ok_or(MountResult::KeyGone)?;
        bind.refuse(self.mode)?;
        match bind.open() {
            Some((handle, _)) => Ok(handle),
            None => Err(Refused::new(RefusedReason::NoSource, &bind.source).into()),
        }
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        let bind = self.bind_of(stale);
        bind.map(|bind| bind.settings).unwrap_or_default()
    }

    /// The mounts below, if the old mounts below may go with the stale mount.
    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, MountResult> {
        let bind = self.bind_of(stale).ok_or_else(changed)?;
        let now = table.mount(stale.mount.id).ok_or_else(changed)?;
        let below = MountsBelow::of(table, now.id).ok_or_else(changed)?;
        if now.propagation.passes_umounts_on() {
            return Err(changed());
        }
        let parent = table.mount(now.parent);
        if parent.is_none_or(|parent| parent.propagation.peer_group.is_some()) {
            let place = &now.mount_point;
            return Err(Refused::new(RefusedReason::ParentIsShared, place).into());
        }
        let (_, root) = bind.open().ok_or_else(changed)?;
        let makers = self.makers.as_ref().map_err(|error| {
            let refused = Refused::new(RefusedReason::SpecUnknown, &bind.destination);
            refused.with_error(error.to_string())
        })?;
        let host = mounts_of_host().map_err(|error| failed(&error))?;
        let found = MountsInVolume {
            nested: Vec::new(),
            others: below.mounts().collect(),
        };
        let places = (&*root.source, &*root.destination);
        let kept = below.compared(found, places, &host, makers, &self.record, &place_of_source);
        Ok(Some(kept?))
    }
}
