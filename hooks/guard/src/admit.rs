//! Admits a bundle: inspects, acts, verifies, reports.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::judge::{
    Finding, Pinning, Verdict, refusal_of, refusal_of_failed, refusal_of_uncompared,
    refusal_of_unseen,
};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::report::{BindReport, Outcome, Report, explain_unrepaired};
use bindguard_core::spec::{SpecEdit, SpecView};
use bindguard_sys::{FaultPoint, files};

use crate::inspect::{OpenBundle, OpenError, inspect};
use crate::probes::Probes;
use crate::prove::{ExpectedSources, record_expected_binds};
use crate::rebind::{NotRebound, rebind};

/// The first create of a container, or a later create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    First,
    /// A later create, because the runtime failed. A volume that changed between admission and the
    /// runtime's mount may change again. Then re-binding alone can lose that race every time, so
    /// the spec is also pointed at the volume.
    Again,
}

/// The result of an admission. By default nothing.
#[derive(Debug, Default)]
pub struct Admission {
    pub report: Report,
    /// The reason why policy refuses the container. Unless a repair failed, or the record could not
    /// be written, nothing was done then.
    pub refusal: Option<String>,
    /// The binds that were not repaired and can make a runtime fail, with the next step: to be
    /// reported if it fails.
    pub unrepaired: Option<String>,
    /// True if something was repaired that the runtime can have failed on: creating again makes
    /// sense.
    pub worth_another_try: bool,
    /// True if the bundle has a record of the binds that the new container must show:
    /// [`crate::prove_container`] compares its mounts with the record.
    pub is_provable: bool,
    /// Of a spec that no bundle has yet: what [`crate::prove_new_container`] compares.
    pub expected: ExpectedSources,
}

/// Admits a bundle: repairs what policy says, and reports. Never fails; see the crate's
/// documentation.
pub fn admit(bundle: &Path, policy: &Policy, places: &Places, attempt: Attempt) -> Admission {
    admit_with_spec(bundle, &files::spec_of(bundle), policy, places, attempt)
}

/// As [`admit`], for a runtime that reads the spec `spec_file` instead of the bundle's own. A proof
/// reads the bundle's own spec, so the policy must have no proof.
pub fn admit_with_spec(
    bundle: &Path,
    spec_file: &Path,
    policy: &Policy,
    places: &Places,
    attempt: Attempt,
) -> Admission {
    FaultPoint::Start.reach();
    let start = Instant::now();
    let mut admission = Admission {
        report: Report::about_bundle(bundle),
        ..Admission::default()
    };
    if attempt == Attempt::Again {
        // The guard of the first attempt may have been killed during a write, and this guard may
        // have nothing to write.
        files::clear_leavings(bundle);
    }
    if let Err(error) = admission.admit_bundle((bundle, spec_file), policy, places, attempt, start)
    {
        admission.skip(error_chain(&error), policy);
    }
    admission.report.set_duration(start.elapsed());
    admission
}

/// Admits a spec that no bundle has yet, before its runtime gets it. The caller waits for
/// `deadline`, and probes of servers end before. `adjust` receives the edits, and returns those
/// that the spec will have. Never fails, as [`admit`].
pub fn admit_spec(
    spec: &[u8],
    policy: &Policy,
    places: &Places,
    deadline: Duration,
    adjust: impl FnOnce(&SpecView<'_>, &[SpecEdit]) -> Vec<SpecEdit>,
) -> Admission {
    let start = Instant::now();
    let mut admission = Admission::default();
    match OpenBundle::parse(spec, Path::new("/"), policy) {
        Ok(bundle) => {
            let probes = || Probes::for_deadline(start, deadline);
            let probes = [probes(), probes()];
            let place = |edits: &[SpecEdit]| Ok(adjust(&bundle.spec, edits));
            let placed = admission.repair(&bundle, places, Attempt::First, start, &probes, place);
            if let Some(placed) = placed {
                admission.expected = ExpectedSources::of(&bundle, &placed);
            }
        }
        Err(error) => admission.skip(error_chain(&error), policy),
    }
    admission.report.set_duration(start.elapsed());
    admission
}

impl Admission {
    /// For a create whose spec cannot be known: policy decides, as for a spec that cannot be read.
    pub fn of_unseen(bundle: &Path, why: &str, policy: &Policy) -> Self {
        let mut admission = Self {
            report: Report::about_bundle(bundle),
            ..Self::default()
        };
        admission.skip(why.to_owned(), policy);
        admission
    }

    fn admit_bundle(
        &mut self,
        (path, spec_file): (&Path, &Path),
        policy: &Policy,
        places: &Places,
        attempt: Attempt,
        start: Instant,
    ) -> Result<(), OpenError> {
        let bytes = files::read_spec_file(spec_file)?;
        let bundle = OpenBundle::parse(&bytes, path, policy)?;
        let probes = [Probes::for_create_since(start), Probes::for_repairs(start)];
        let place = |edits: &[SpecEdit]| {
            if !edits.is_empty() {
                files::replace_spec(spec_file, &bundle.spec.edited(edits)?)?;
                FaultPoint::AfterEdit.reach();
            }
            Ok(edits.to_vec())
        };
        let placed = self.repair(&bundle, places, attempt, start, &probes, place);
        if let Some(placed) = placed
            && self.refusal.is_none()
        {
            self.expect_binds(&bundle, &placed);
        }
        Ok(())
    }

    /// Inspects the binds of a bundle, re-binds the stale subpaths, and reports the results. Returns
    /// the edits that `place` puts into the spec; `None` if policy refuses the container before.
    fn repair(
        &mut self,
        bundle: &OpenBundle<'_>,
        places: &Places,
        attempt: Attempt,
        start: Instant,
        [of_sources, of_repairs]: &[Probes; 2],
        place: impl FnOnce(&[SpecEdit]) -> Result<Vec<SpecEdit>, Box<dyn Error>>,
    ) -> Option<Vec<SpecEdit>> {
        let report = &mut self.report;
        bundle.describe(report);
        FaultPoint::SpecRead.reach();
        let findings = inspect(bundle, places, of_sources);
        report.set_inspection_time(start.elapsed());
        FaultPoint::Judged.reach();
        let plan = bundle.plan(&findings);
        self.refusal = plan.refusal;
        if self.refusal.is_some() {
            report.add(findings, |finding| {
                refusal_of(finding, &bundle.policy).map(|_| Outcome::Refused)
            });
            return None;
        }
        let (mut outcomes, mut edits) = (BTreeMap::new(), plan.edits);
        for order in &plan.rebinds {
            let Some(bind) = order.bind else { continue };
            let result = rebind(order, of_repairs);
            // The spec is edited instead if the re-bind is impossible, and in addition if an earlier
            // re-bind did not help.
            let is_edited = match &result {
                Ok(Outcome::Rebound { .. }) => attempt == Attempt::Again,
                Err(NotRebound::Impossible(_)) => true,
                Ok(_) | Err(NotRebound::NoLongerStale(_)) => false,
            };
            if is_edited {
                edits.extend(order.spec_edit());
            }
            outcomes.insert(bind, result.unwrap_or_else(Outcome::from));
        }
        let placed = place(&edits).unwrap_or_else(|error| {
            for edit in &edits {
                if let SpecEdit::Source { bind, .. } | SpecEdit::BindRslave { bind } = edit {
                    let error = error_chain(&*error);
                    outcomes.insert(*bind, Outcome::Failed { error });
                }
            }
            Vec::new()
        });
        self.finish(findings, outcomes, &placed, &bundle.policy);
        Some(placed)
    }

    /// Reports the findings, after these edits were placed in the spec.
    fn finish(
        &mut self,
        findings: Vec<Finding>,
        mut outcomes: BTreeMap<usize, Outcome>,
        placed: &[SpecEdit],
        policy: &Policy,
    ) {
        for edit in placed {
            let (bind, outcome) = match edit {
                SpecEdit::Source { bind, to } => {
                    (*bind, Outcome::PointedAtVolume { source: to.clone() })
                }
                SpecEdit::BindRslave { bind } => (*bind, Outcome::MadeRslave),
                SpecEdit::RootfsRslave => continue,
            };
            outcomes.insert(bind, outcome);
        }
        let is_rootfs_edited = placed.contains(&SpecEdit::RootfsRslave);
        let report = &mut self.report;
        report.add(findings, |finding| {
            let outcome = outcomes.get(&finding.bind?).cloned();
            match &finding.verdict {
                _ if matches!(outcome, Some(Outcome::Failed { .. })) => outcome,
                // rslave has no effect there, whatever was edited.
                Verdict::Pinning(Pinning {
                    private_mount: Some(mount),
                    ..
                }) => Some(Outcome::needs_shared(mount)),
                Verdict::Pinning(pinning) if is_rootfs_edited && pinning.rootfs => {
                    Some(Outcome::MadeRslave)
                }
                _ => outcome,
            }
        });
        for BindReport { finding, outcome } in &report.binds {
            if let Some(Outcome::Failed { error }) = outcome
                && self.refusal.is_none()
            {
                self.refusal = refusal_of_failed(finding, error, policy);
            }
        }
        self.unrepaired = explain_unrepaired(&report.binds);
        // A stale source was repaired since the last create, or the spec points into a volume that
        // may have changed meanwhile.
        self.worth_another_try = report.binds.iter().any(|bind| match &bind.finding.kind {
            SourceKind::InVolume => true,
            SourceKind::Subpath(_) => bind.is_repaired(),
            SourceKind::MountedVolume(_)
            | SourceKind::PlainVolume
            | SourceKind::HostRoot
            | SourceKind::Foreign => false,
        });
    }

    /// Records what the kernel will show for the binds of the edited spec.
    fn expect_binds(&mut self, bundle: &OpenBundle<'_>, edits: &[SpecEdit]) {
        let repairs_host_root = bundle.policy.host_root == Mode::Repair;
        let is_host_root = |index: usize| {
            let mut binds = self.report.binds.iter().map(|bind| &bind.finding);
            repairs_host_root
                && binds.any(|it| it.bind == Some(index) && it.kind == SourceKind::HostRoot)
        };
        files::remove_records(bundle.path);
        let binds = bundle.spec.binds().len();
        if bundle.policy.proof == Alarm::Off || binds == 0 {
            return;
        }
        let recorded = record_expected_binds(bundle, edits, is_host_root).unwrap_or_else(|error| {
            let problem = format!("write the record of expected binds: {error}");
            self.refusal = refusal_of_uncompared(&problem, &bundle.policy);
            self.report.problems.push(problem);
            0
        });
        self.report.unproven = binds - recorded;
        self.is_provable = recorded > 0;
    }

    /// A bundle that could not be opened is created as it is, unless policy refuses it.
    fn skip(&mut self, problem: String, policy: &Policy) {
        self.refusal = refusal_of_unseen(&problem, policy);
        self.report.problems.push(match self.refusal {
            Some(_) => problem,
            None => format!("{problem}; the container is created as it is"),
        });
    }
}
