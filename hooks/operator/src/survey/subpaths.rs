//! All volume-subpaths of a node: judged, or repaired without waiting for a container's next
//! create.

use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::judge::{Finding, Unmounted, Verdict};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::plan::Rebind;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_guard::{Probes, judge_subpaths, rebind};
use bindguard_sys::observe::{is_listed, list_subpaths};

use super::detach::detach_stale;
use super::{for_operators, planned_alone};
use crate::kubelet_roots::Roots;

/// The volume-subpaths of this node that are `wanted`, judged. Changes nothing.
pub(crate) fn diagnose_subpaths(
    policy: &Policy,
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> Report {
    let policy = for_operators(policy);
    report_on_subpaths(roots, probes, wanted, |finding| {
        planned_alone(finding, &policy)
    })
}

/// Re-binds every stale subpath that is `wanted`, whatever policy says of admissions: an operator
/// requested it. Other subpaths are not inspected.
pub(crate) fn rebind_subpaths(
    policy: &Policy,
    roots: &Roots,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> Report {
    let policy = for_operators(policy);
    let probes = Probes::for_operator();
    report_on_subpaths(roots, &probes, wanted, |finding| {
        Rebind::from_finding(finding, &policy).map(|order| repaired(&order))
    })
}

/// Detaches the stale mount of every subpath that is `wanted`. Only stale subpaths are detached.
pub(crate) fn detach_subpaths(roots: &Roots, wanted: impl Fn(&VolumeSubpath) -> bool) -> Report {
    report_on_subpaths(roots, &Probes::for_operator(), wanted, |finding| {
        match (&finding.kind, &finding.verdict) {
            (SourceKind::Subpath(subpath), Verdict::Stale { .. }) => {
                Some(match detach_stale(subpath) {
                    Ok(()) => Outcome::Detached,
                    Err(error) => Outcome::Failed {
                        error: error.to_string(),
                    },
                })
            }
            _ => None,
        }
    })
}

fn repaired(order: &Rebind) -> Outcome {
    let probes = Probes::for_repairs(Instant::now());
    rebind(order, &probes).unwrap_or_else(Outcome::from)
}

fn report_on_subpaths(
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&VolumeSubpath) -> bool,
    outcome: impl Fn(&Finding) -> Option<Outcome>,
) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    let mut subpaths = Vec::new();
    for root in roots.names() {
        match list_subpaths(root) {
            Ok(found) => subpaths.extend(found),
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    subpaths.retain(wanted);
    report.add(judged(&subpaths, probes), outcome);
    report.set_duration(start.elapsed());
    report
}

/// Limit of sources that are open at a time, with at most three descriptors each: a shell's limit
/// is 1024, and a node may have thousands.
pub(crate) const AT_A_TIME: usize = 100;

fn judged(subpaths: &[VolumeSubpath], probes: &Probes) -> Vec<Finding> {
    let at_a_time = subpaths.chunks(AT_A_TIME);
    let findings = at_a_time.flat_map(|some| judge_subpaths(some, probes));
    findings.filter(|finding| !is_gone(finding)).collect()
}

/// True if the kubelet removed the subpath after it was listed.
fn is_gone(finding: &Finding) -> bool {
    let SourceKind::Subpath(subpath) = &finding.kind else {
        return false;
    };
    may_be_gone(&finding.verdict) && !is_listed(subpath)
}

/// The verdicts on a subpath that the kubelet removed after it was listed.
fn may_be_gone(verdict: &Verdict) -> bool {
    matches!(
        verdict,
        Verdict::Unmounted(Unmounted::Subpath) | Verdict::Unknown(_)
    )
}
