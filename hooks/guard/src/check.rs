//! The findings of an admission in a bundle, and the actions that it would take, without taking
//! them.

use std::path::Path;
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::judge::{Finding, Pinning, Verdict};
use bindguard_core::places::Places;
use bindguard_core::plan::{Plan, refusal_of, refusal_of_unseen};
use bindguard_core::policy::Policy;
use bindguard_core::report::{Outcome, PlannedAction, Report};
use bindguard_core::source::SourceKind;
use bindguard_sys::bundle::read_spec;

use crate::admission::{OpenBundle, OpenError};
use crate::inspect::inspect;
use crate::probes::Probes;

/// Checks a bundle. Changes nothing.
pub fn check_bundle(bundle: &Path, policy: &Policy, places: &Places) -> Report {
    let start = Instant::now();
    let mut report = Report::about_bundle(bundle);
    if let Err(error) = check(bundle, policy, places, &mut report) {
        report.problems.push(error_chain(&error));
    }
    report.set_duration(start.elapsed());
    report
}

fn check(
    path: &Path,
    node: &Policy,
    places: &Places,
    report: &mut Report,
) -> Result<(), OpenError> {
    let bytes = read_spec(path)?;
    let bundle = OpenBundle::parse(&bytes, path, node)?;
    let policy = &*bundle.policy;
    bundle.describe(report);
    let probes = Probes::for_create();
    let findings = inspect(&bundle.spec, path, policy, places, &probes);
    let mut plan = Plan::from_findings(&findings, policy);
    plan.refusal = plan
        .refusal
        .or_else(|| refusal_of_unseen(&bundle.spec.overlooked()?, policy));
    report.add(findings, |finding| planned_outcome(finding, &plan, policy));
    Ok(())
}

/// The outcome that a plan would have for a finding. In a refused container nothing else is done.
pub fn planned_outcome(finding: &Finding, plan: &Plan, policy: &Policy) -> Option<Outcome> {
    if plan.refusal.is_some() {
        return refusal_of(finding, policy).map(|_| Outcome::Planned {
            action: PlannedAction::Refuse,
        });
    }
    if let Verdict::Pinning(Pinning {
        private_mount: Some(mount),
        ..
    }) = &finding.verdict
    {
        return Some(Outcome::needs_shared(mount));
    }
    let is_edited = finding.bind.is_some_and(|bind| plan.edits_bind(bind));
    let action = match (&finding.verdict, &finding.kind) {
        (Verdict::Pinning(pinning), _) => (is_edited || pinning.rootfs && plan.edits_rootfs())
            .then_some(PlannedAction::MakeRslave),
        (_, SourceKind::Subpath(subpath))
            if plan
                .rebinds
                .iter()
                .any(|rebind| rebind.subpath() == subpath) =>
        {
            let is_gone = matches!(&finding.verdict, Verdict::Orphaned { .. });
            Some(if is_gone {
                PlannedAction::Remake
            } else {
                PlannedAction::Rebind
            })
        }
        _ => is_edited.then_some(PlannedAction::PointAtVolume),
    };
    action.map(|action| Outcome::Planned { action })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_is_not_there_is_a_problem_and_no_panic() {
        let report = check_bundle(
            Path::new("/nowhere"),
            &Policy::default(),
            &Places::default(),
        );
        assert_eq!(
            report.problems,
            ["read /nowhere/config.json: No such file or directory (os error 2)"]
        );
    }
}
