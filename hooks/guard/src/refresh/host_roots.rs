//! The host-root binds of a container whose private copies keep the host's mounts alive.
//!
//! The new mount is the mount that a create gives now. A recursive clone of the source receives the
//! host's mounts and umounts (rslave), with the restrictions of the old mount and of the spec.
//! Policy decides as at a create: its scope, its rule for read-only binds, the pod's annotations.
//!
//! A release only unmounts, in a container, copies of mounts that the host has unmounted. A copy is
//! known by the record of the create alone: its unique id is below the number that was recorded
//! after the runtime had made its mounts. Without a record nothing is unmounted. The umount goes by
//! the name in the folder of the parent mount, and fails with EBUSY while the mount is in use.

use std::borrow::Cow;
use std::path::Path;
use std::slice;
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::judge::{Finding, Pinning, Verdict};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Alarm, Kept, Mode, Policy};
use bindguard_core::proof::ExpectedBinds;
use bindguard_core::refresh::{
    HostRootBind, KeptMounts, MountsBelow, MountsInVolume, Refused, RefusedReason,
    SubpathInContainer, host_roots_in_container,
};
use bindguard_core::report::{MountResult, ReleaseResult};
use bindguard_core::spec::{Bind, MountMakers, RequestedPropagation, SpecUsers};
use bindguard_sys::Handle;
use bindguard_sys::enter::{Action, EnterError, HeldProcess, HelperProcess, Replacement};
use bindguard_sys::files::{read_record, read_spec};
use bindguard_sys::replace::CloneSettings;

use crate::SourceError;
use crate::inspect::{OpenBundle, OpenError, inspect};
use crate::probes::Probes;
use crate::rebind::REPLACE_TIMEOUT;
use crate::refresh::{Container, RefreshError};
use crate::refresh::{
    CurrentFiles, SpecifiedBind, changed, failed, mounts_of_host, place_of_source,
};

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
    bind: SpecifiedBind,
    pinning: Pinning,
}

/// A mount that the host does not have, in the bind of a container.
struct PrivateCopy {
    mount: MountEntry,
    parent: Option<MountEntry>,
    is_recorded: bool,
}

impl HostRoots {
    /// The binds of the container with this bundle that a create under this policy would make
    /// rslave, or would report, and those that are rslave by the spec.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn open(bundle: &Path, policy: &Policy, places: &Places) -> Result<Self, OpenError> {
        let bytes = read_spec(bundle)?;
        let mut bundle = OpenBundle::parse(&bytes, bundle, policy)?;
        // Only host-root binds are of interest, so the refresh probes no other source.
        bundle.policy = Cow::Owned(Policy {
            stale_subpaths: Mode::Off,
            unmounted_volumes: Alarm::Off,
            dead_sources: Alarm::Off,
            ..*bundle.policy
        });
        let mut binds = Vec::new();
        for finding in inspect(&bundle, places, &Probes::for_create()) {
            let mut specified = bundle.spec.binds().iter();
            if let Some(bind) = specified.find(|it| Some(it.index) == finding.bind) {
                binds.extend(RootBind::of(bind, finding, &bundle.policy));
            }
        }
        Ok(Self {
            binds,
            makers: MountMakers::from_spec(bundle.spec.bytes()),
            mode: bundle.policy.host_root,
            record: read_record(bundle.path).unwrap_or_default(),
        })
    }

    /// True if a host-root bind has this source.
    pub fn has(&self, source: &Path) -> bool {
        self.binds.iter().any(|root| root.bind.source == source)
    }

    /// True if the container has no such bind.
    pub fn is_empty(&self) -> bool {
        self.binds.is_empty()
    }

    /// The mounts that the host does not have, in the binds of the container: the innermost first.
    fn copies(&self, table: &MountTable) -> Result<Vec<PrivateCopy>, SourceError> {
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
                let gone = below
                    .gone(&root, &host, makers, &self.record, &place_of_source)
                    .map_err(|refused| {
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
        self.binds.iter().find(|root| root.bind.is_of(stale))
    }
}

impl RootBind {
    fn of(bind: &Bind<'_>, finding: Finding, policy: &Policy) -> Option<Self> {
        let is_slave = matches!(
            bind.propagation,
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
                kept: policy.keeps(bind.denied, bind.denied_below),
            }
        } else {
            return None;
        };
        let mut specified = SpecifiedBind::of(bind, false);
        specified.settings = CloneSettings {
            below: Some(bind.denied_below),
            denied: bind.denied,
            requested: RequestedPropagation::RecursiveSlave,
            ..CloneSettings::default()
        };
        (finding.kind == SourceKind::HostRoot).then_some(Self {
            bind: specified,
            pinning,
        })
    }

    /// The source, if no server has to answer. A link is not followed: the container could have
    /// exchanged a folder on the way. The CRI resolves links before it writes the spec.
    fn open(&self) -> Option<(Handle, HostRootBind)> {
        let (handle, source) = self.bind.open()?;
        let root = HostRootBind {
            source: source.path.clone(),
            destination: self.bind.destination.clone(),
            current: source.place()?,
            pinning: self.pinning.clone(),
        };
        Some((handle, root))
    }

    fn refuse(&self, mode: Mode) -> Result<(), Refused> {
        let here = |reason| Err(Refused::new(reason, &self.bind.destination));
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

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        let root = self.bind_of(stale).ok_or(MountResult::KeyGone)?;
        root.refuse(self.mode)?;
        match root.open() {
            Some((handle, _)) => Ok((handle, root.bind.settings)),
            None => Err(Refused::new(RefusedReason::NoSource, &root.bind.source).into()),
        }
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
        if parent.is_none_or(MountEntry::is_shared) {
            let place = &now.mount_point;
            return Err(Refused::new(RefusedReason::ParentIsShared, place).into());
        }
        let (_, root) = bind.open().ok_or_else(changed)?;
        let makers = self.makers.as_ref().map_err(|error| {
            let refused = Refused::new(RefusedReason::SpecUnknown, &root.destination);
            refused.with_error(error.to_string())
        })?;
        let host = mounts_of_host().map_err(failed)?;
        let found = MountsInVolume {
            nested: Vec::new(),
            others: below.mounts().collect(),
        };
        let places = (&*root.source, &*root.destination);
        let kept = below.compared(found, places, &host, makers, &self.record, &place_of_source);
        Ok(Some(kept?))
    }
}

// The release of copies.

/// The extent of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Report the copies.
    Look,
    /// Unmount the copies that are not in use.
    Unmount,
    /// Detach the copies. A file that is open keeps the device busy, and no mount table shows that.
    Detach,
}

/// A copy of a mount of the host, and what was done about it.
#[derive(Debug)]
pub struct Released {
    /// The number of the container's mount namespace.
    pub namespace: u64,
    /// Its line in the container's mount table.
    pub mount: MountEntry,
    pub result: ReleaseResult,
    /// Why the copy is not released.
    pub error: Option<String>,
    /// True if the child in the container gave no answer.
    is_unanswered: bool,
}

impl Released {
    fn set(&mut self, result: ReleaseResult, error: impl Into<String>) {
        self.result = result;
        self.error = Some(error.into());
    }

    /// Corrects the result by the mount table after the release.
    ///
    /// An umount by name takes the topmost mount there. A mount keeps its unique id whatever the
    /// container changes of the mount. An umount that waits for a dead server has taken the mount
    /// out of the table before.
    fn check_against(&mut self, table: &MountTable) {
        let now = table.mount(self.mount.id);
        let is_there = now.is_some_and(|now| now.unique_id == self.mount.unique_id);
        if self.result == ReleaseResult::Released && is_there {
            let error = "the container mounted over the copy meanwhile";
            self.set(ReleaseResult::Refused, error);
        } else if self.is_unanswered && !is_there {
            self.result = ReleaseResult::Released;
            self.error = None;
        }
    }
}

/// Releases the copies of mounts that the host has unmounted, as far as they are wanted, from the
/// container with this init. The innermost copy comes first.
///
/// # Errors
/// If the container cannot be entered, or its mounts cannot be compared with the host's.
pub fn release_copies(
    helper: &HelperProcess,
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    roots: &HostRoots,
    is_wanted: impl Fn(&MountEntry, &MountIndex<'_>) -> bool,
    extent: Release,
) -> Result<Vec<Released>, RefreshError> {
    let container = Container::open(process, spec)?;
    let until = Instant::now() + REPLACE_TIMEOUT;
    let lock = container.lock(until)?;
    let namespace = &container.namespace;
    let table = namespace.mounts()?;
    let index = MountIndex::of(&table);
    let mut released = Vec::new();
    for copy in roots.copies(&table)? {
        if !is_wanted(&copy.mount, &index) {
            continue;
        }
        let mut done = Released {
            namespace: namespace.number().unwrap_or_default(),
            mount: copy.mount.clone(),
            result: ReleaseResult::Kept,
            error: None,
            is_unanswered: false,
        };
        if let Some(why) = refusal(&copy, roots) {
            done.set(ReleaseResult::Refused, why);
        } else if extent != Release::Look && Instant::now() >= until {
            let limit = REPLACE_TIMEOUT.as_secs();
            let why = format!("no time was left after {limit} s; run the command again");
            done.set(ReleaseResult::Refused, why);
        } else if extent != Release::Look {
            match release(helper, &container, &copy, extent, until) {
                Ok(true) => done.result = ReleaseResult::Released,
                Ok(false) => done.set(ReleaseResult::Busy, "it is in use"),
                Err(error) => {
                    done.is_unanswered = error.is_over();
                    done.set(ReleaseResult::Refused, error_chain(&error));
                }
            }
        }
        released.push(done);
    }
    // A single read for all copies: a container may have thousands of mounts.
    if let Ok(table) = namespace.mounts() {
        for copy in &mut released {
            copy.check_against(&table);
        }
    }
    drop(lock);
    Ok(released)
}

/// The copies that [`release_copies`] would release while no process uses them. Nothing is entered.
///
/// # Errors
/// As there.
pub fn releasable_copies(
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    roots: &HostRoots,
) -> Result<Vec<MountEntry>, RefreshError> {
    let namespace = Container::open(process, spec)?.namespace;
    let table = namespace.mounts()?;
    let mut copies = roots.copies(&table)?;
    copies.retain(|copy| refusal(copy, roots).is_none());
    Ok(copies.into_iter().map(|copy| copy.mount).collect())
}

fn refusal(copy: &PrivateCopy, roots: &HostRoots) -> Option<&'static str> {
    if roots.record.mounts_before.is_none() {
        Some("the create of the container was not recorded: the container may have made the mount")
    } else if !copy.is_recorded {
        Some("the record of the create lacks the mount: the container may have made the mount")
    } else if copy.parent.as_ref().is_none_or(MountEntry::is_shared) {
        Some("the parent mount is shared: an umount would reach other mount namespaces")
    } else {
        None
    }
}

/// Returns false if the copy is in use.
fn release(
    helper: &HelperProcess,
    container: &Container<'_>,
    copy: &PrivateCopy,
    extent: Release,
    until: Instant,
) -> Result<bool, EnterError> {
    let mount = Replacement {
        stale: &copy.mount,
        parent: copy.parent.as_ref(),
        new: None,
    };
    // A child for each: the folder that a child has open is in use.
    let entered = container.enter(helper, vec![mount], until)?;
    entered.call(Action::Open, 0)?;
    if extent == Release::Detach {
        // A detach would take mounts along that may be the container's own.
        let is_on_copy = |it: &MountEntry| it.parent == copy.mount.id;
        let table = container.namespace.mounts();
        if table.map_or(true, |table| table.entries().iter().any(is_on_copy)) {
            return Ok(false);
        }
        entered.call(Action::MakePrivate, 0)?;
        entered.call(Action::Detach, 0)?;
        return Ok(true);
    }
    match entered.call(Action::Unmount, 0) {
        Ok(()) => Ok(true),
        Err(error) if error.is_busy() => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const COPY: &str = "7 1 8:2 / /host/mnt rw - ext4 d rw\n";

    #[test]
    fn the_table_decides_if_a_copy_is_released() {
        let table = |text: &str| MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let remounted = COPY.replace(" rw - ", " ro - ");
        let others = COPY.replace("7 1", "8 1");
        for (result, is_unanswered, afterwards, is_released) in [
            (ReleaseResult::Released, false, others.as_str(), true),
            (ReleaseResult::Released, false, COPY, false),
            (ReleaseResult::Released, false, &remounted, false),
            (ReleaseResult::Refused, true, &others, true),
            (ReleaseResult::Refused, true, COPY, false),
            (ReleaseResult::Busy, false, &others, false),
        ] {
            let mut copy = Released {
                namespace: 1,
                mount: table(COPY).entries()[0].clone(),
                result,
                error: None,
                is_unanswered,
            };
            copy.check_against(&table(afterwards));
            let is = copy.result == ReleaseResult::Released;
            assert_eq!(is, is_released, "{result:?}, {afterwards}");
        }
    }
}
