//! Inspects the binds of a bundle, read only: a single read of config.json, and the policy for its
//! pod.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::evidence::FileKind;
use bindguard_core::identity::Identity;
use bindguard_core::judge::{
    Finding, Pinning, Plan, Verdict, judge_host_root, judge_reach, judge_subpath, judge_volume,
    refusal_of, refusal_of_unseen,
};
use bindguard_core::kubelet::{MountedVolume, PodPath, VolumeSubpath};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Alarm, Mode, Policy, Scope, policy_of_pod};
use bindguard_core::report::{Outcome, PlannedAction, Report};
use bindguard_core::spec::{Bind, RequestedPropagation, SpecError, SpecView};
use bindguard_core::text::lies_in;
use bindguard_sys::files::read_spec;
use bindguard_sys::observe::{HeldSubpath, HeldVolume, HeldVolumeDirectories, observe_host_mount};
use bindguard_sys::{Failure, Handle, MountError, Mounts, OldKernel, require_calls};

use crate::probes::{Answers, Probes, RootsInUse, by_all_names, in_real_folder};

/// Why a bundle could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// config.json could not be read.
    #[error(transparent)]
    Read(#[from] Failure),
    /// It is not a spec.
    #[error(transparent)]
    Parse(#[from] SpecError),
    /// Nothing can be compared and repaired on this kernel.
    #[error(transparent)]
    Kernel(#[from] OldKernel),
}

/// A bundle whose spec is parsed, and the policy for its pod.
pub(crate) struct OpenBundle<'b> {
    pub path: &'b Path,
    /// A view of its spec.
    pub spec: SpecView<'b>,
    /// The node's policy, with the changes of the pod's annotations.
    pub policy: Cow<'b, Policy>,
    /// Annotations that are not followed.
    not_followed: Vec<String>,
}

impl<'b> OpenBundle<'b> {
    /// The bundle at `path`, whose spec has these bytes. Relative sources are relative to `path`.
    ///
    /// # Errors
    /// If the kernel is too old, or the bytes are no spec.
    pub fn parse(bytes: &'b [u8], path: &'b Path, node: &'b Policy) -> Result<Self, OpenError> {
        require_calls()?;
        let spec = SpecView::from_bytes(bytes)?;
        let (policy, not_followed) = policy_of_pod(node, |name| spec.annotation(name));
        Ok(Self {
            path,
            spec,
            policy,
            not_followed,
        })
    }

    /// The plan for the findings in its binds. Policy may refuse a spec with unchecked parts.
    pub fn plan(&self, findings: &[Finding]) -> Plan {
        let mut plan = Plan::from_findings(findings, &self.policy);
        let unseen = || refusal_of_unseen(&self.spec.overlooked()?, &self.policy);
        plan.refusal = plan.refusal.or_else(unseen);
        plan
    }

    /// Adds the container's names, the parts that are not checked, and the annotations that are not
    /// followed.
    pub fn describe(&self, report: &mut Report) {
        report.container = Identity::from_spec(&self.spec);
        report.problems.extend(self.spec.overlooked());
        report.problems.extend(self.not_followed.iter().cloned());
    }
}

/// The source of a bind; a relative source is relative to the bundle.
pub(crate) fn source_of<'a>(bind: &'a Bind<'_>, bundle: &Path) -> Cow<'a, Path> {
    let source = bind.source();
    if source.is_absolute() {
        source.into()
    } else {
        bundle.join(source).into()
    }
}

/// Limit of binds that are open at a time, with at most three descriptors each: a runtime's limit
/// is usually 1024.
pub(crate) const MAX_HELD_BINDS: usize = 300;

/// A bind's source, open until it is judged.
enum Held<'b> {
    Subpath(Box<HeldSubpath>),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, Failure>),
    /// A path anywhere on the node, perhaps on a server. This process never walks to it, unless the
    /// kernel has the whole path in its cache.
    Elsewhere(Cow<'b, Path>, Option<Handle>),
    /// Nothing has to be observed.
    Judged(SourceKind, Verdict),
}

/// The data that all judgements of a spec share.
#[derive(Clone, Copy)]
struct Inspection<'a> {
    spec: &'a SpecView<'a>,
    policy: &'a Policy,
    places: &'a Places,
    roots: &'a RootsInUse,
    mounts: &'a Mounts,
}

/// Judges every bind of a spec.
pub(crate) fn inspect(bundle: &OpenBundle<'_>, places: &Places, probes: &Probes) -> Vec<Finding> {
    let spec = &bundle.spec;
    let places = &places.with_runtimes_at([bundle.path]);
    let is_in_use = |root: &Path| spec.binds().iter().any(|bind| lies_in(bind.source(), root));
    let mounts = Mounts::default();
    let roots = RootsInUse::of(places, is_in_use, &mounts, probes);
    let answering = roots.without_silent(places);
    let inspection = Inspection {
        spec,
        policy: &bundle.policy,
        places: answering.as_ref().unwrap_or(places),
        roots: &roots,
        mounts: &mounts,
    };
    let mut findings = Vec::with_capacity(spec.binds().len());
    for binds in spec.binds().chunks(MAX_HELD_BINDS) {
        inspection.judge_all(binds, bundle.path, probes, &mut findings);
    }
    findings
}

impl Inspection<'_> {
    fn judge_all(
        self,
        binds: &[Bind<'_>],
        bundle: &Path,
        probes: &Probes,
        findings: &mut Vec<Finding>,
    ) {
        let directories = HeldVolumeDirectories::default();
        let mut held = Vec::with_capacity(binds.len());
        for bind in binds {
            let source = source_of(bind, bundle);
            let kind = self.kind_of(&source);
            held.push(self.hold(bind, source, kind, &directories));
        }
        // A source that no name of the places matches may match by the kernel's name: the name in
        // the spec if more names of the places are known by now, or the kernel's name of the source.
        let any_unknown = held.iter().any(|held| matches!(held, Held::Elsewhere(..)));
        let more = any_unknown.then(|| by_all_names(self.places, self.roots, probes));
        let more = more.flatten();
        let look = Inspection {
            places: more.as_ref().unwrap_or(self.places),
            mounts: &self.mounts.for_newly_opened(),
            ..self
        };
        for (held, bind) in held.iter_mut().zip(binds) {
            let Held::Elsewhere(path, _) = held else {
                continue;
            };
            let mut path = path.clone();
            let mut kind = look.kind_of(&path);
            if kind == SourceKind::Foreign
                && PodPath::may_be_one(&path)
                && let Some(real) = in_real_folder(&path, probes)
            {
                kind = look.kind_of(&real);
                path = real.into();
            }
            if kind != SourceKind::Foreign {
                *held = look.hold(bind, path, kind, &directories);
            }
        }
        let paths: Vec<_> = held.iter().map(|held| look.paths_to_probe(held)).collect();
        let answers = probes.probe(&paths);
        for ((bind, held), answers) in binds.iter().zip(held).zip(answers) {
            let (kind, verdict) = look.judge(bind, held, &answers);
            findings.push(Finding {
                bind: Some(bind.index),
                source: bind.source().to_owned(),
                destination: Some(bind.destination().to_owned()),
                kind,
                verdict,
            });
        }
    }

    fn kind_of(&self, source: &Path) -> SourceKind {
        SourceKind::from_path(source, self.places, self.policy.host_root_scope)
    }

    fn hold<'b>(
        &self,
        bind: &Bind<'_>,
        source: Cow<'b, Path>,
        kind: SourceKind,
        directories: &HeldVolumeDirectories,
    ) -> Held<'b> {
        let policy = self.policy;
        let checks_volumes =
            policy.unmounted_volumes != Alarm::Off || policy.dead_sources != Alarm::Off;
        match kind {
            SourceKind::Subpath(subpath)
                if policy.stale_subpaths != Mode::Off || checks_volumes =>
            {
                Held::Subpath(Box::new(HeldSubpath::hold_among(subpath, directories)))
            }
            SourceKind::MountedVolume(volume) if checks_volumes => {
                let held = HeldVolume::hold_of(&volume);
                Held::Volume(volume, held)
            }
            SourceKind::HostRoot if policy.host_root != Mode::Off => {
                Held::HostRoot(Handle::follow(&source))
            }
            SourceKind::Foreign if self.is_worth_probing(bind, &source) => {
                let cached = Handle::cached(&source).ok().map(Handle::unqueried);
                Held::Elsewhere(source, cached)
            }
            SourceKind::InVolume => Held::Judged(SourceKind::InVolume, Verdict::Current),
            SourceKind::Subpath(_)
            | SourceKind::MountedVolume(_)
            | SourceKind::PlainVolume
            | SourceKind::HostRoot
            | SourceKind::Foreign => Held::Judged(SourceKind::Foreign, Verdict::Foreign),
        }
    }

    fn is_worth_probing(&self, bind: &Bind<'_>, source: &Path) -> bool {
        let checks_host_root = self.policy.host_root != Mode::Off;
        if !checks_host_root && self.policy.dead_sources == Alarm::Off {
            return false;
        }
        !self.places.is_local_by_construction(source)
            || checks_host_root
                && self.policy.is_recursive(bind)
                && self.may_take_mounts_along(source)
    }

    /// True if mounts below a path count, as far as its name shows.
    fn may_take_mounts_along(&self, path: &Path) -> bool {
        match self.policy.host_root_scope {
            Scope::HostRoot => false,
            Scope::RuntimeDirectories => self.places.may_hold_mounts_of_containers(path),
            Scope::AnySubmounts => true,
        }
    }

    /// The paths to probe. The kernel answers for local filesystems, so their paths need no probe.
    /// If the check for dead sources is off, only subpaths and paths with unknown links are probed,
    /// because their verdict needs a probe.
    fn paths_to_probe(&self, held: &Held<'_>) -> Vec<PathBuf> {
        let is_to_answer = |handle| {
            let mount = self.mounts.mount_of(handle);
            self.policy.dead_sources != Alarm::Off
                && !mount.is_ok_and(|mount| mount.entry.fs_type.is_local())
        };
        match held {
            Held::Subpath(held) => held.paths_to_probe(self.mounts),
            Held::Volume(volume, held) if held.handle().is_some_and(is_to_answer) => {
                vec![volume.mount_point().to_owned()]
            }
            Held::Elsewhere(path, cached) if cached.as_ref().is_none_or(is_to_answer) => {
                vec![path.to_path_buf()]
            }
            Held::Volume(..) | Held::Elsewhere(..) | Held::HostRoot(_) | Held::Judged(..) => {
                Vec::new()
            }
        }
    }

    fn judge(&self, bind: &Bind<'_>, held: Held<'_>, answers: &Answers) -> (SourceKind, Verdict) {
        let policy = self.policy;
        let dead = judge_reach(&answers.reach()).filter(|_| policy.dead_sources != Alarm::Off);
        match held {
            Held::Subpath(held) => {
                let evidence = held.observe(self.mounts, &answers.reaches());
                let verdict = judge_subpath(&held.subpath, &evidence);
                // If the check for stale subpaths is off, subpaths are inspected only for dead
                // sources and unmounted volumes.
                let is_wanted = policy.stale_subpaths != Mode::Off
                    || matches!(verdict, Verdict::Dead(_) | Verdict::NotProbed)
                        && policy.dead_sources != Alarm::Off
                    || matches!(verdict, Verdict::Unmounted(_))
                        && policy.unmounted_volumes != Alarm::Off;
                let verdict = if is_wanted { verdict } else { Verdict::Foreign };
                (SourceKind::Subpath(held.subpath), verdict)
            }
            Held::Volume(volume, held) => {
                let verdict = match dead {
                    Some(dead) => dead,
                    None if policy.unmounted_volumes == Alarm::Off => Verdict::Foreign,
                    None => judge_volume(&volume, &held.observe(self.mounts)),
                };
                (SourceKind::MountedVolume(volume), verdict)
            }
            Held::HostRoot(source) => (SourceKind::HostRoot, self.judge_host_root(bind, &source)),
            Held::Elsewhere(path, cached) => {
                if let Some(dead) = dead {
                    return (SourceKind::Foreign, dead);
                }
                let from_cache = || cached.as_ref().and_then(|it| it.resolved_path().ok());
                let resolved = answers.resolved().map(Path::to_owned).or_else(from_cache);
                let Some(resolved) = resolved else {
                    return (SourceKind::Foreign, Verdict::Foreign);
                };
                // A path that is not itself a host root may be a link to a host root: `/var/run` is
                // `/run` nearly everywhere.
                match self.is_host_root(bind, &path, &resolved, cached.as_ref()) {
                    Ok(true) => {
                        let verdict = self.judge_host_root(bind, &Handle::follow(&path));
                        (SourceKind::HostRoot, verdict)
                    }
                    Ok(false) => (SourceKind::Foreign, Verdict::Foreign),
                    Err(error) => (SourceKind::Foreign, Verdict::Unknown(error_chain(&error))),
                }
            }
            Held::Judged(kind, verdict) => (kind, verdict),
        }
    }

    /// True if a path that is no host root by its name leads to a host root, or is another name of
    /// a host root.
    ///
    /// # Errors
    /// If the mounts below the path are not known, and decide.
    fn is_host_root(
        &self,
        bind: &Bind<'_>,
        written: &Path,
        resolved: &Path,
        held: Option<&Handle>,
    ) -> Result<bool, MountError> {
        let (places, scope) = (self.places, self.policy.host_root_scope);
        if self.policy.host_root == Mode::Off {
            return Ok(false);
        }
        if resolved != written && places.holds_runtime_mounts(resolved, scope) {
            return Ok(true);
        }
        if let Some(held) = held
            && (self.roots).show_below(held, resolved, self.mounts, places, scope)?
        {
            return Ok(true);
        }
        if !self.policy.is_recursive(bind) || !self.may_take_mounts_along(resolved) {
            return Ok(false);
        }
        // Nothing can be mounted below a file, such as a runtime's socket: the mount table need not
        // be read.
        let identity = held.and_then(|held| held.identity().ok());
        let is_file = identity.is_some_and(|identity| identity.kind == FileKind::File);
        if is_file && scope != Scope::AnySubmounts {
            return Ok(false);
        }
        self.mounts.any_below(resolved)
    }

    fn judge_host_root(&self, bind: &Bind<'_>, source: &Result<Handle, Failure>) -> Verdict {
        let mut binds = self.spec.binds().iter();
        judge_host_root(
            bind.propagation,
            self.policy.is_recursive(bind),
            self.policy.keeps(bind.denied, bind.denied_below),
            &self.spec.rootfs_propagation,
            binds.any(|bind| bind.propagation == RequestedPropagation::Shared),
            &observe_host_mount(source, self.mounts),
        )
    }
}

// Judges the kubelet's volume-subpaths of a volume or a node, without a container's spec.

/// Returns a finding for each subpath. Opens all subpaths at once, with at most three descriptors
/// each.
pub fn judge_subpaths(subpaths: &[VolumeSubpath], probes: &Probes) -> Vec<Finding> {
    let (directories, mounts) = (HeldVolumeDirectories::default(), Mounts::default());
    let (mut held, mut findings) = (Vec::new(), Vec::new());
    for subpath in subpaths {
        held.push(HeldSubpath::hold_among(subpath.clone(), &directories));
    }
    let paths: Vec<_> = held
        .iter()
        .map(|held| held.paths_to_probe(&mounts))
        .collect();
    for (held, answers) in held.into_iter().zip(probes.probe(&paths)) {
        let evidence = held.observe(&mounts, &answers.reaches());
        findings.push(Finding {
            bind: None,
            source: held.subpath.path(),
            destination: None,
            verdict: judge_subpath(&held.subpath, &evidence),
            kind: SourceKind::Subpath(held.subpath),
        });
    }
    findings
}

// The findings of an admission in a bundle, and the actions that it would take, without taking
// them.

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
    bundle.describe(report);
    let findings = inspect(&bundle, places, &Probes::for_create());
    let plan = bundle.plan(&findings);
    report.add(findings, |finding| {
        planned_outcome(finding, &plan, &bundle.policy)
    });
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
            if plan.rebinds.iter().any(|rebind| rebind.subpath == *subpath) =>
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
mod check_tests {
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
