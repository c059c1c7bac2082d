//! Looking, read only: a bundle's binds, or all volume-subpaths of a node.

use std::path::Path;
use std::time::Instant;

use bindguard_core::judge::{Finding, Verdict, judge_host_root, judge_subpath};
use bindguard_core::plan::Plan;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{Container, Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::observe::{HeldSubpath, list_subpaths, observe_host_mount};
use bindguard_sys::{Handle, HandleError, MountinfoError, bundle, read_mount_table};

/// A bind's source, held until it is judged.
enum Held {
    Subpath(HeldSubpath),
    HostRoot(Result<Handle, HandleError>),
    /// Nothing of it is looked at.
    Other,
}

/// Judges every bind of a spec.
pub(crate) fn inspect(spec: &SpecView<'_>, bundle: &Path, policy: &Policy) -> Result<Vec<Finding>, MountinfoError> {
    let held: Vec<(&Bind, SourceKind, Held)> = spec.binds().iter().map(|bind| hold(bind, bundle, policy)).collect();
    if held.iter().all(|(_, _, held)| matches!(held, Held::Other)) {
        return Ok(held.into_iter().map(|(bind, kind, _)| finding(bind, kind, Verdict::Foreign)).collect());
    }
    // Read when all are held: a mount id names its mount only while something holds that mount.
    let table = read_mount_table()?;
    let any_shared = spec.binds().iter().any(|bind| bind.propagation() == AskedPropagation::Shared);
    let judged = held.into_iter().map(|(bind, kind, held)| {
        let verdict = match held {
            Held::Subpath(subpath) => judge_subpath(&subpath.observe(&table)),
            Held::HostRoot(source) => {
                let host = observe_host_mount(&source, &table);
                judge_host_root(bind.propagation(), spec.rootfs_propagation(), any_shared, &host)
            }
            Held::Other if kind == SourceKind::InVolume => Verdict::Current,
            Held::Other => Verdict::Foreign,
        };
        finding(bind, kind, verdict)
    });
    Ok(judged.collect())
}

fn hold<'s>(bind: &'s Bind, bundle: &Path, policy: &Policy) -> (&'s Bind, SourceKind, Held) {
    let source = bundle.join(bind.source());
    let (kind, held) = match SourceKind::from_path(&source, None, policy) {
        SourceKind::Subpath(_) if policy.stale_subpaths == Mode::Off => (SourceKind::Foreign, Held::Other),
        SourceKind::Subpath(subpath) => {
            let held = HeldSubpath::hold(&subpath);
            (SourceKind::Subpath(subpath), Held::Subpath(held))
        }
        SourceKind::HostRoot | SourceKind::Foreign if policy.host_root == Mode::Off => {
            (SourceKind::Foreign, Held::Other)
        }
        SourceKind::HostRoot => (SourceKind::HostRoot, Held::HostRoot(Handle::follow(&source))),
        SourceKind::Foreign => behind_links(&source, policy),
        SourceKind::InVolume => (SourceKind::InVolume, Held::Other),
    };
    (bind, kind, held)
}

/// A path that is not itself a host root may be a link to one: `/var/run` is `/run` nearly everywhere.
fn behind_links(source: &Path, policy: &Policy) -> (SourceKind, Held) {
    let handle = Handle::follow(source);
    let resolved = handle.as_ref().ok().and_then(|handle| handle.resolved_path().ok());
    match SourceKind::from_path(source, resolved.as_deref(), policy) {
        SourceKind::HostRoot => (SourceKind::HostRoot, Held::HostRoot(handle)),
        SourceKind::Subpath(_) | SourceKind::InVolume | SourceKind::Foreign => (SourceKind::Foreign, Held::Other),
    }
}

fn finding(bind: &Bind, kind: SourceKind, verdict: Verdict) -> Finding {
    Finding {
        bind: Some(bind.index()),
        source: bind.source().to_owned(),
        destination: Some(bind.destination().to_owned()),
        kind,
        verdict,
    }
}

/// What admission would find in a bundle, and what it would do. Changes nothing.
pub fn check_bundle(bundle: &Path, policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::about_bundle(bundle);
    match look(bundle, policy, &mut report) {
        Ok(findings) => {
            let plan = Plan::from_findings(&findings, policy);
            report.tell(&findings, |finding| would_be(finding, &plan));
        }
        Err(problem) => report.problems.push(problem),
    }
    report.took(start.elapsed());
    report
}

fn look(bundle: &Path, policy: &Policy, report: &mut Report) -> Result<Vec<Finding>, String> {
    let bytes = bundle::read_spec(bundle).map_err(in_full)?;
    let spec = SpecView::from_bytes(&bytes).map_err(in_full)?;
    report.container = Container::from_spec(&spec);
    inspect(&spec, bundle, policy).map_err(in_full)
}

/// Every volume-subpath of this node, judged. Changes nothing.
pub fn diagnose_node(policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    let mut subpaths = Vec::new();
    for root in policy.kubelet_roots() {
        match list_subpaths(root) {
            Ok(found) => subpaths.extend(found),
            Err(error) => report.problems.push(in_full(error)),
        }
    }
    let held: Vec<_> = subpaths.into_iter().map(|subpath| (HeldSubpath::hold(&subpath), subpath)).collect();
    match read_mount_table() {
        Ok(table) => {
            let judged = held.into_iter().map(|(held, subpath)| Finding {
                bind: None,
                source: subpath.path(),
                destination: None,
                verdict: judge_subpath(&held.observe(&table)),
                kind: SourceKind::Subpath(subpath),
            });
            let findings: Vec<Finding> = judged.collect();
            let plan = Plan::from_findings(&findings, policy);
            report.tell(&findings, |finding| would_be(finding, &plan));
        }
        Err(error) => report.problems.push(in_full(error)),
    }
    report.took(start.elapsed());
    report
}

fn would_be(finding: &Finding, plan: &Plan) -> Option<Outcome> {
    let SourceKind::Subpath(subpath) = &finding.kind else {
        let edited = finding.bind.is_some_and(|bind| plan.edits_bind(bind))
            || matches!(finding.verdict, Verdict::Pinning(_)) && !plan.is_empty();
        return edited.then_some(Outcome::WouldBe { done: "made rslave" });
    };
    if plan.rebinds.iter().any(|rebind| rebind.subpath() == subpath) {
        return Some(Outcome::WouldBe { done: "re-bound to the current target" });
    }
    let pointed = finding.bind.is_some_and(|bind| plan.edits_bind(bind));
    pointed.then_some(Outcome::WouldBe { done: "pointed at the volume's own path" })
}

/// An error with all its causes in one line.
pub(crate) fn in_full(error: impl std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_is_not_there_is_a_problem_and_no_panic() {
        let report = check_bundle(Path::new("/nowhere"), &Policy::default());
        assert_eq!(report.problems, ["read /nowhere/config.json: No such file or directory (os error 2)"]);
    }
}
