//! Looking, read only: a bundle's binds, or all volume-subpaths of a node.

use std::path::Path;
use std::time::Instant;

use bindguard_core::judge::{Finding, Verdict, judge_host_root, judge_subpath, judge_volume};
use bindguard_core::kubelet::{MountedVolume, VolumeSubpath};
use bindguard_core::plan::Plan;
use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::report::{Container, Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::observe::{HeldSubpath, HeldVolume, list_subpaths, observe_host_mount};
use bindguard_sys::{Handle, HandleError, Mounts, bundle};

/// A bind's source, held until it is judged.
enum Held {
    Subpath(VolumeSubpath, HeldSubpath),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, HandleError>),
    InVolume,
    Foreign,
}

impl Held {
    fn hold(source: &Path, policy: &Policy) -> Self {
        match SourceKind::from_path(source, None, policy) {
            SourceKind::Subpath(subpath) if policy.stale_subpaths != Mode::Off => {
                let held = HeldSubpath::hold(&subpath);
                Self::Subpath(subpath, held)
            }
            SourceKind::MountedVolume(volume) if policy.unmounted_volumes != Alarm::Off => {
                let held = HeldVolume::hold(&volume);
                Self::Volume(volume, held)
            }
            SourceKind::HostRoot if policy.host_root != Mode::Off => Self::HostRoot(Handle::follow(source)),
            SourceKind::Foreign if policy.host_root != Mode::Off => Self::behind_links(source, policy),
            SourceKind::InVolume => Self::InVolume,
            SourceKind::Subpath(_) | SourceKind::MountedVolume(_) | SourceKind::HostRoot | SourceKind::Foreign => {
                Self::Foreign
            }
        }
    }

    /// A path that is not itself a host root may be a link to one: `/var/run` is `/run` nearly everywhere.
    fn behind_links(source: &Path, policy: &Policy) -> Self {
        let handle = Handle::follow(source);
        let resolved = handle.as_ref().ok().and_then(|handle| handle.resolved_path().ok());
        match resolved {
            Some(path) if policy.holds_runtime_mounts(&path) => Self::HostRoot(handle),
            _ => Self::Foreign,
        }
    }

    fn judge(&self, bind: &Bind, spec: &SpecView<'_>, mounts: &Mounts) -> Verdict {
        match self {
            Self::Subpath(_, held) => judge_subpath(&held.observe(mounts)),
            Self::Volume(volume, held) => judge_volume(volume, &held.observe(mounts)),
            Self::HostRoot(source) => {
                let any_shared = spec.binds().iter().any(|bind| bind.propagation() == AskedPropagation::Shared);
                let host = observe_host_mount(source, mounts);
                judge_host_root(bind.propagation(), spec.rootfs_propagation(), any_shared, &host)
            }
            Self::InVolume => Verdict::Current,
            Self::Foreign => Verdict::Foreign,
        }
    }

    fn into_kind(self) -> SourceKind {
        match self {
            Self::Subpath(subpath, _) => SourceKind::Subpath(subpath),
            Self::Volume(volume, _) => SourceKind::MountedVolume(volume),
            Self::HostRoot(_) => SourceKind::HostRoot,
            Self::InVolume => SourceKind::InVolume,
            Self::Foreign => SourceKind::Foreign,
        }
    }
}

/// Judges every bind of a spec.
pub(crate) fn inspect(spec: &SpecView<'_>, bundle: &Path, policy: &Policy) -> Vec<Finding> {
    let held: Vec<Held> = spec.binds().iter().map(|bind| Held::hold(&bundle.join(bind.source()), policy)).collect();
    let mounts = Mounts::default();
    let judged = spec.binds().iter().zip(held).map(|(bind, held)| Finding {
        bind: Some(bind.index()),
        source: bind.source().to_owned(),
        destination: Some(bind.destination().to_owned()),
        verdict: held.judge(bind, spec, &mounts),
        kind: held.into_kind(),
    });
    judged.collect()
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
    Ok(inspect(&spec, bundle, policy))
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
    let mounts = Mounts::default();
    let judged = held.into_iter().map(|(held, subpath)| Finding {
        bind: None,
        source: subpath.path(),
        destination: None,
        verdict: judge_subpath(&held.observe(&mounts)),
        kind: SourceKind::Subpath(subpath),
    });
    let findings: Vec<Finding> = judged.collect();
    let plan = Plan::from_findings(&findings, policy);
    report.tell(&findings, |finding| would_be(finding, &plan));
    report.took(start.elapsed());
    report
}

fn would_be(finding: &Finding, plan: &Plan) -> Option<Outcome> {
    if matches!(finding.verdict, Verdict::Unmounted(_)) {
        return plan.refusal.is_some().then_some(Outcome::WouldBe { done: "refused" });
    }
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
