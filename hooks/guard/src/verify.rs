//! After the runtime created a container: checks if its host-root binds receive the host's umounts.

use std::path::Path;
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::evidence::Observed;
use bindguard_core::judge::{Finding, judge_in_container};
use bindguard_core::mount_table::Propagation;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Container, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{Bind, RequestedPropagation};
use bindguard_sys::in_container::ContainerMounts;
use bindguard_sys::{Handle, Mounts};

use crate::admission::{OpenBundle, with_bundle};
use crate::directories::by_all_names;
use crate::probes::Probes;
use crate::roots_in_use::RootsInUse;

/// Checks the mounts of a container's init for each host-root bind that the spec requests as
/// rslave. Changes nothing. It walks in the container's filesystems: call it from a process that
/// can be abandoned.
pub fn verify_container(bundle: &Path, pid: u32, policy: &Policy, places: &Places) -> Report {
    let start = Instant::now();
    let mut report = Report::about_bundle(bundle);
    let verified = with_bundle(bundle, policy, |bundle| {
        // The admission reported the problems of the spec.
        report.container = Container::from_spec(&bundle.spec);
        ContainerMounts::of(pid)
            .map(|mounts| report.add(verify(&bundle, places, &mounts), |_| None))
    });
    match verified {
        Ok(Ok(())) => {}
        Ok(Err(error)) => report.problems.push(error_chain(&error)),
        Err(error) => report.problems.push(error_chain(&error)),
    }
    report.set_duration(start.elapsed());
    report
}

fn verify(bundle: &OpenBundle<'_>, places: &Places, mounts: &ContainerMounts) -> Vec<Finding> {
    let (hosts, probes) = (Mounts::default(), Probes::for_create());
    let roots = RootsInUse::of(places, |_| true, &hosts, &probes);
    let by_all_names = by_all_names(places, &roots, &probes);
    let places = by_all_names.as_ref().unwrap_or(places);
    let scope = bundle.policy.host_root_scope;
    let is_host_root = |bind: &Bind<'_>| {
        let held = Handle::follow(&bundle.path.join(bind.source())).ok();
        let resolved = held.as_ref().and_then(|held| held.resolved_path().ok());
        let leads_to_one = || {
            resolved
                .as_deref()
                .is_some_and(|path| places.holds_runtime_mounts(path, scope))
        };
        let is_another_name = || match (&held, &resolved) {
            (Some(held), Some(resolved)) => roots.show_below(held, resolved, &hosts, places, scope),
            _ => false,
        };
        match SourceKind::from_path(bind.source(), places, scope) {
            SourceKind::HostRoot => true,
            SourceKind::Foreign => leads_to_one() || is_another_name(),
            _ => is_another_name(),
        }
    };
    let made_rslave = |bind: &&Bind<'_>| bind.propagation() == RequestedPropagation::RecursiveSlave;
    let checked = bundle
        .spec
        .binds()
        .iter()
        .filter(made_rslave)
        .filter(|bind| is_host_root(bind));
    checked
        .map(|bind| in_container(bind, &mounts.at(bind.destination())))
        .collect()
}

fn in_container(bind: &Bind<'_>, mount: &Observed<Propagation>) -> Finding {
    Finding {
        bind: Some(bind.index()),
        source: bind.source().to_owned(),
        destination: Some(bind.destination().to_owned()),
        kind: SourceKind::HostRoot,
        verdict: judge_in_container(mount),
    }
}
