//! After the runtime created a container: checks if its host-root binds receive the host's umounts.

use std::path::Path;
use std::time::Instant;

use bindguard_core::annotations::policy_of_pod;
use bindguard_core::error_chain;
use bindguard_core::evidence::Observed;
use bindguard_core::judge::{Finding, judge_in_container};
use bindguard_core::mount_table::Propagation;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Container, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::in_container::ContainerMounts;
use bindguard_sys::{Handle, Mounts, bundle};

use crate::directories::by_all_names;
use crate::probes::Probes;
use crate::roots_in_use::RootsInUse;

/// Checks the mounts of a container's init for each host-root bind that the spec requests as rslave. Changes nothing. It
/// walks in the container's filesystems: call it from a process that can be abandoned.
pub fn verify_container(bundle: &Path, pid: u32, policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::about_bundle(bundle);
    if let Err(problem) = look(bundle, pid, policy, &mut report) {
        report.problems.push(problem);
    }
    report.set_duration(start.elapsed());
    report
}

fn look(bundle: &Path, pid: u32, policy: &Policy, report: &mut Report) -> Result<(), String> {
    let bytes = bundle::read_spec(bundle).map_err(|error| error_chain(&error))?;
    let spec = SpecView::from_bytes(&bytes).map_err(|error| error_chain(&error))?;
    report.container = Container::from_spec(&spec);
    let (policy, _) = policy_of_pod(policy, |name| spec.annotation(name));
    let (mounts, hosts, probes) = (ContainerMounts::of(pid)?, Mounts::default(), Probes::for_create());
    let roots = RootsInUse::of(&policy, |_| true, &hosts, &probes);
    let by_all_names = by_all_names(&policy, &roots, &probes);
    let policy = by_all_names.as_ref().unwrap_or(&policy);
    let made_rslave = |bind: &&Bind<'_>| bind.propagation() == AskedPropagation::RecursiveSlave;
    let findings = spec.binds().iter().filter(made_rslave).filter_map(|bind| {
        let held = Handle::follow(&bundle.join(bind.source())).ok();
        let resolved = held.as_ref().and_then(|held| held.resolved_path().ok());
        let is_another_name = || roots.show_below(held.as_ref()?, resolved.as_deref()?, &hosts, policy).then_some(());
        let by_name = SourceKind::from_path(bind.source(), resolved.as_deref(), policy) == SourceKind::HostRoot;
        (by_name || is_another_name().is_some()).then(|| in_container(bind, &mounts.at(bind.destination())))
    });
    report.add(findings.collect(), |_| None);
    Ok(())
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
