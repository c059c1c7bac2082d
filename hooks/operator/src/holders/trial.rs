//! Tries, without a change, the commands that would free the copies of a running container.
//!
//! A refresh and a release are refused for many reasons: a recursively read-only bind, a bind of
//! another shim without a record of the create. A command that would be refused is no advice.

use std::path::Path;

use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{HostRoots, releasable_copies};

use super::report::is_in_bind;
use crate::bundles::{bundle_of_container, spec_of_container};
use crate::container_inits::{ContainerInits, stale_mounts};
use crate::node::refuse_other_mounts;
use crate::pods::PodContainer;

/// The effect that commands would have on a running container.
#[derive(Debug, Default)]
pub struct Trial {
    /// `refresh --what host-root` would replace a bind.
    pub refreshes: bool,
    /// The copies that `release` would unmount.
    pub releases: Vec<MountEntry>,
    /// The mounts of the spec. `None` if unknown: then any mount may be the container's own.
    pub spec: Option<SpecUsers>,
}

impl Trial {
    /// True for a mount in a bind of the container that is no mount of the spec, and has no mount on
    /// it: a copy of a mount of the host, and no volume.
    pub(super) fn is_copy(
        &self,
        entry: &MountEntry,
        index: &MountIndex<'_>,
        table: &MountTable,
    ) -> bool {
        let spec = self.spec.as_ref();
        let is_of_spec = spec.is_none_or(|spec| spec.has_mount_at(&entry.mount_point));
        is_in_bind(entry, index) && !is_of_spec && !table.has_mounts_on(entry)
    }

    /// Tries the commands on a container. Nothing is entered.
    pub fn of(container: &PodContainer, policy: &Policy, places: &Places) -> Self {
        let root = Path::new("/");
        let spec = spec_of_container(root, &container.id);
        let mut trial = Self {
            spec: spec.and_then(|spec| SpecUsers::from_spec(&spec).ok()),
            ..Self::default()
        };
        let Some(process) = ContainerInits::of([container]).hold(container) else {
            return trial;
        };
        if refuse_other_mounts(&process).is_err() {
            return trial;
        }
        let Some(bundle) = bundle_of_container(root, &container.id) else {
            return trial;
        };
        let Ok(roots) = HostRoots::open(&bundle, policy, places) else {
            return trial;
        };
        // both verbs refuse a container that left the namespaces of its runtime
        let Ok(releases) = releasable_copies(&process, trial.spec.as_ref(), &roots) else {
            return trial;
        };
        trial.releases = releases;
        if let Ok(mounts) = stale_mounts(&process, &roots) {
            let is_stale = |outcome: &MountResult| *outcome == MountResult::Stale;
            trial.refreshes = mounts.iter().any(|mount| is_stale(&mount.outcome));
        }
        trial
    }
}
