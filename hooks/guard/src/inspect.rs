//! Inspects the binds of a spec, read only.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use bindguard_core::annotations::policy_of_pod;
use bindguard_core::error_chain;
use bindguard_core::evidence::{FileKind, Reach};
use bindguard_core::identity::Identity;
use bindguard_core::judge::{
    Finding, Pinning, Verdict, judge_host_root, judge_reach, judge_subpath, judge_volume,
};
use bindguard_core::kubelet::{MountedVolume, PodPath, VolumeSubpath};
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_core::plan::{Plan, refusal_of, refusal_of_unseen};
use bindguard_core::policy::{Alarm, Mode, Policy, Scope};
use bindguard_core::report::{Outcome, PlannedAction, Report};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{Bind, RequestedPropagation, SpecError, SpecView};
use bindguard_sys::bundle::read_spec;
use bindguard_sys::observe::{HeldSubpath, HeldVolume, HeldVolumeDirectories, observe_host_mount};
use bindguard_sys::{Failure, Handle, MountError, Mounts, OldKernel, require_calls};

use crate::directories::{RootsInUse, by_all_names, in_real_folder};
use crate::probes::{Answers, Probes};

/// A bind's source, open until it is judged.
enum Held<'a> {
    Subpath(Box<HeldSubpath>),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, Failure>),
    /// A path anywhere on the node, perhaps on a server. This process never walks to it, unless the
    /// kernel has the whole path in its cache.
    Somewhere(Cow<'a, Path>, Option<Handle>),
    InVolume,
    Foreign,
}

impl<'a> Held<'a> {
    fn hold(
        bind: &Bind<'_>,
        source: Source<'a>,
        directories: &HeldVolumeDirectories,
        choice: &Choice<'_>,
    ) -> Self {
        let policy = choice.policy;
        match source.kind {
            SourceKind::Subpath(subpath)
                if policy.stale_subpaths != Mode::Off || checks_volumes(policy) =>
            {
                Self::Subpath(Box::new(HeldSubpath::hold_among(subpath, directories)))
            }
            SourceKind::MountedVolume(volume) if checks_volumes(policy) => {
                let held = HeldVolume::hold_of(&volume);
                Self::Volume(volume, held)
            }
            SourceKind::HostRoot if policy.host_root != Mode::Off => {
                Self::HostRoot(Handle::follow(&source.path))
            }
            SourceKind::Foreign if choice.is_worth_probing(bind, &source.path) => {
                let cached = Handle::cached(&source.path).ok().map(Handle::unqueried);
                Self::Somewhere(source.path, cached)
            }
            SourceKind::InVolume => Self::InVolume,
            SourceKind::Subpath(_) | SourceKind::MountedVolume(_) | SourceKind::PlainVolume => {
                Self::Foreign
            }
            SourceKind::HostRoot | SourceKind::Foreign => Self::Foreign,
        }
    }

    /// The source by a name that matches the places, for a source that no name matched before: the
    /// name in the spec if `more` names are known by now, else the kernel's.
    fn by_other_name(
        &self,
        more: Option<&Choice<'_>>,
        choice: &Choice<'_>,
        probes: &Probes,
    ) -> Option<Source<'a>> {
        let Self::Somewhere(path, _) = self else {
            return None;
        };
        if let Some(source) = more.and_then(|more| more.known(path.clone())) {
            return Some(source);
        }
        let real = PodPath::may_be_one(path)
            .then(|| in_real_folder(path, probes))
            .flatten()?;
        more.unwrap_or(choice).known(Cow::Owned(real))
    }

    /// The paths to probe. The kernel answers for local filesystems, so their paths need no probe.
    /// If the check for dead sources is off, only subpaths and paths with unknown links are probed,
    /// because their verdict needs a probe.
    fn paths_to_probe(&self, look: &Look<'_>) -> Vec<PathBuf> {
        let is_local = |handle| {
            look.mounts
                .mount_of(handle)
                .is_ok_and(|mount| mount.entry.fs_type.is_local())
        };
        let is_to_answer =
            |handle| look.choice.policy.dead_sources != Alarm::Off && !is_local(handle);
        match self {
            Self::Subpath(held) => held.paths_to_probe(&look.mounts),
            Self::Volume(volume, held) if held.handle().is_some_and(is_to_answer) => {
                vec![volume.mount_point().to_owned()]
            }
            Self::Somewhere(path, cached) if cached.as_ref().is_none_or(is_to_answer) => {
                vec![path.to_path_buf()]
            }
            Self::Volume(..)
            | Self::Somewhere(..)
            | Self::HostRoot(_)
            | Self::InVolume
            | Self::Foreign => Vec::new(),
        }
    }

    fn judge(self, bind: &Bind<'_>, look: &Look<'_>, answers: &Answers) -> (SourceKind, Verdict) {
        match self {
            Self::Subpath(held) => {
                let evidence = held.observe(&look.mounts, &answers.reaches());
                let verdict = look.wanted_of_subpath(judge_subpath(held.subpath(), &evidence));
                (SourceKind::Subpath(held.into_subpath()), verdict)
            }
            Self::Volume(volume, held) => {
                let dead = look.judge_reach(&answers.reach());
                let verdict = dead.unwrap_or_else(|| look.judge_volume(&volume, &held));
                (SourceKind::MountedVolume(volume), verdict)
            }
            Self::HostRoot(source) => (SourceKind::HostRoot, look.judge_host_root(bind, &source)),
            Self::Somewhere(path, cached) => {
                let from_cache = cached
                    .as_ref()
                    .and_then(|handle| handle.resolved_path().ok());
                let resolved = answers.resolved().map(Path::to_owned).or(from_cache);
                if let Some(dead) = look.judge_reach(&answers.reach()) {
                    return (SourceKind::Foreign, dead);
                }
                let Some(resolved) = resolved else {
                    return (SourceKind::Foreign, Verdict::Foreign);
                };
                // A path that is not itself a host root may be a link to a host root: `/var/run` is
                // `/run` nearly everywhere.
                match look.is_host_root(bind, &path, &resolved, cached.as_ref()) {
                    Ok(true) => (
                        SourceKind::HostRoot,
                        look.judge_host_root(bind, &Handle::follow(&path)),
                    ),
                    Ok(false) => (SourceKind::Foreign, Verdict::Foreign),
                    Err(error) => (SourceKind::Foreign, Verdict::Unknown(error_chain(&*error))),
                }
            }
            Self::InVolume => (SourceKind::InVolume, Verdict::Current),
            Self::Foreign => (SourceKind::Foreign, Verdict::Foreign),
        }
    }
}

/// A bind's source, under a name that may differ from the spec's.
struct Source<'a> {
    path: Cow<'a, Path>,
    kind: SourceKind,
}

/// The policy, and the places that it applies to.
#[derive(Clone, Copy)]
struct Choice<'p> {
    policy: &'p Policy,
    places: &'p Places,
}

impl Choice<'_> {
    fn classify<'a>(&self, path: Cow<'a, Path>) -> Source<'a> {
        let kind = SourceKind::from_path(&path, self.places, self.policy.host_root_scope);
        Source { path, kind }
    }

    /// The source, unless it is foreign.
    fn known<'a>(&self, path: Cow<'a, Path>) -> Option<Source<'a>> {
        Some(self.classify(path)).filter(|source| source.kind != SourceKind::Foreign)
    }

    fn is_host_root(&self, path: &Path) -> bool {
        self.places
            .holds_runtime_mounts(path, self.policy.host_root_scope)
    }

    /// True if mounts below a path count, as far as its name shows.
    fn may_take_mounts_along(&self, path: &Path) -> bool {
        match self.policy.host_root_scope {
            Scope::HostRoot => false,
            Scope::RuntimeDirectories => self.places.may_hold_mounts_of_containers(path),
            Scope::AnySubmounts => true,
        }
    }

    fn is_worth_probing(&self, bind: &Bind<'_>, source: &Path) -> bool {
        let checks_host_root = self.policy.host_root != Mode::Off;
        let wanted = checks_host_root || self.policy.dead_sources != Alarm::Off;
        let may_take_mounts_along = || {
            checks_host_root && self.policy.is_recursive(bind) && self.may_take_mounts_along(source)
        };
        wanted && (!self.places.is_local_by_construction(source) || may_take_mounts_along())
    }
}

/// The data that all judgements of a spec share.
struct Look<'a> {
    spec: &'a SpecView<'a>,
    choice: Choice<'a>,
    mounts: Mounts,
    roots: &'a RootsInUse,
}

impl Look<'_> {
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
    ) -> Result<bool, Rc<MountError>> {
        if self.choice.policy.host_root == Mode::Off {
            return Ok(false);
        }
        if resolved != written && self.choice.is_host_root(resolved) {
            return Ok(true);
        }
        if let Some(held) = held {
            let Choice { policy, places } = self.choice;
            let scope = policy.host_root_scope;
            if (self.roots).show_below(held, resolved, &self.mounts, places, scope)? {
                return Ok(true);
            }
        }
        let scope = self.choice.policy.host_root_scope;
        let may_hold_mounts = || {
            self.choice.may_take_mounts_along(resolved)
                && (scope == Scope::AnySubmounts || !held.is_some_and(is_file))
        };
        if self.choice.policy.is_recursive(bind) && may_hold_mounts() {
            return self.mounts.any_below(resolved).map_err(Rc::new);
        }
        Ok(false)
    }

    fn judge_host_root(&self, bind: &Bind<'_>, source: &Result<Handle, Failure>) -> Verdict {
        let any_shared = self
            .spec
            .binds()
            .iter()
            .any(|bind| bind.propagation() == RequestedPropagation::Shared);
        let host = observe_host_mount(source, &self.mounts);
        let policy = self.choice.policy;
        let kept = policy.keeps(bind.denied(), bind.denied_below());
        judge_host_root(
            bind.propagation(),
            policy.is_recursive(bind),
            kept,
            self.spec.rootfs_propagation(),
            any_shared,
            &host,
        )
    }

    fn judge_volume(&self, volume: &MountedVolume, held: &HeldVolume) -> Verdict {
        match self.choice.policy.unmounted_volumes {
            Alarm::Off => Verdict::Foreign,
            Alarm::Report | Alarm::Refuse => judge_volume(volume, &held.observe(&self.mounts)),
        }
    }

    /// If the check for stale subpaths is off, subpaths are inspected only for dead sources and
    /// unmounted volumes.
    fn wanted_of_subpath(&self, verdict: Verdict) -> Verdict {
        let is_wanted = self.choice.policy.stale_subpaths != Mode::Off
            || matches!(verdict, Verdict::Dead(_) | Verdict::NotProbed)
                && self.choice.policy.dead_sources != Alarm::Off
            || matches!(verdict, Verdict::Unmounted(_))
                && self.choice.policy.unmounted_volumes != Alarm::Off;
        if is_wanted { verdict } else { Verdict::Foreign }
    }

    fn judge_reach(&self, reach: &Reach) -> Option<Verdict> {
        judge_reach(reach).filter(|_| self.choice.policy.dead_sources != Alarm::Off)
    }
}

/// Judges every bind of a spec.
pub(crate) fn inspect(
    spec: &SpecView<'_>,
    bundle: &Path,
    policy: &Policy,
    places: &Places,
    probes: &Probes,
) -> Vec<Finding> {
    let places = &places.with_runtimes_at([bundle]);
    let is_in_use = |root: &Path| spec.binds().iter().any(|bind| lies_in(bind.source(), root));
    let mounts = Mounts::default();
    let roots = RootsInUse::of(places, is_in_use, &mounts, probes);
    let answering = roots.without_silent(places);
    let choice = Choice {
        policy,
        places: answering.as_ref().unwrap_or(places),
    };
    let mut findings = Vec::with_capacity(spec.binds().len());
    for binds in spec.binds().chunks(MAX_HELD_BINDS) {
        findings.append(&mut judged(
            binds, spec, bundle, choice, &roots, &mounts, probes,
        ));
    }
    findings
}

/// Limit of binds that are open at a time, with at most three descriptors each: a runtime's limit
/// is usually 1024.
pub(crate) const MAX_HELD_BINDS: usize = 300;

fn judged(
    binds: &[Bind<'_>],
    spec: &SpecView<'_>,
    bundle: &Path,
    choice: Choice<'_>,
    roots: &RootsInUse,
    mounts: &Mounts,
    probes: &Probes,
) -> Vec<Finding> {
    let directories = HeldVolumeDirectories::default();
    let hold = |bind| {
        Held::hold(
            bind,
            choice.classify(source_of(bind, bundle)),
            &directories,
            &choice,
        )
    };
    let mut held: Vec<_> = binds.iter().map(hold).collect();
    // A source that no name of the places matches may match by the kernel's name.
    let any_unknown = held.iter().any(|held| matches!(held, Held::Somewhere(..)));
    let by_all_names = any_unknown
        .then(|| by_all_names(choice.places, roots, probes))
        .flatten();
    let more = by_all_names
        .as_ref()
        .map(|places| Choice { places, ..choice });
    let choice = more.unwrap_or(choice);
    for (held, bind) in held.iter_mut().zip(binds) {
        if let Some(source) = held.by_other_name(more.as_ref(), &choice, probes) {
            *held = Held::hold(bind, source, &directories, &choice);
        }
    }
    let look = Look {
        spec,
        choice,
        mounts: mounts.for_newly_opened(),
        roots,
    };
    let paths_to_probe: Vec<_> = held.iter().map(|held| held.paths_to_probe(&look)).collect();
    let judged = binds
        .iter()
        .zip(held)
        .zip(probes.probe(&paths_to_probe))
        .map(|((bind, held), answers)| {
            let (kind, verdict) = held.judge(bind, &look, &answers);
            let (source, destination) = (
                bind.source().to_owned(),
                Some(bind.destination().to_owned()),
            );
            Finding {
                bind: Some(bind.index()),
                source,
                destination,
                kind,
                verdict,
            }
        });
    judged.collect()
}

/// True if a volume, and the volume of a subpath, must be mounted or must answer.
fn checks_volumes(policy: &Policy) -> bool {
    policy.unmounted_volumes != Alarm::Off || policy.dead_sources != Alarm::Off
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

/// Nothing can be mounted below a file, such as a runtime's socket: the mount table need not be
/// read.
fn is_file(held: &Handle) -> bool {
    held.identity()
        .is_ok_and(|identity| identity.kind == FileKind::File)
}

// Judges the kubelet's volume-subpaths of a volume or a node, without a container's spec.

/// Returns a finding for each subpath. Opens all subpaths at once, with at most three descriptors
/// each.
pub fn judge_subpaths(subpaths: &[VolumeSubpath], probes: &Probes) -> Vec<Finding> {
    let directories = HeldVolumeDirectories::default();
    let held: Vec<_> = subpaths
        .iter()
        .map(|subpath| HeldSubpath::hold_among(subpath.clone(), &directories))
        .collect();
    let evidence = probes.observe(&held, &Mounts::default());
    let findings = subpaths
        .iter()
        .zip(evidence)
        .map(|(subpath, evidence)| Finding {
            bind: None,
            source: subpath.path(),
            destination: None,
            verdict: judge_subpath(subpath, &evidence),
            kind: SourceKind::Subpath(subpath.clone()),
        });
    findings.collect()
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

// The beginning of an admission, a check and a proof: a single read of config.json, and the policy
// for its pod.

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

/// A report with the names that the bundle has. A bundle that cannot be read has no names: the runtime
/// reports the bundle.
pub(crate) fn named_report(bundle: &Path) -> Report {
    let mut report = Report::about_bundle(bundle);
    if let Ok(bytes) = read_spec(bundle)
        && let Ok(spec) = SpecView::from_bytes(&bytes)
    {
        report.container = Identity::from_spec(&spec);
    }
    report
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

    /// Adds the container's names, the parts that are not checked, and the annotations that are not
    /// followed.
    pub fn describe(&self, report: &mut Report) {
        report.container = Identity::from_spec(&self.spec);
        report.problems.extend(self.spec.overlooked());
        report.problems.extend(self.not_followed.iter().cloned());
    }
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
