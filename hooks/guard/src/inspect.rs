//! Inspects the binds of a spec, read only.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::{FileKind, Reach};
use bindguard_core::judge::{Finding, Verdict, judge_host_root, judge_reach, judge_subpath, judge_volume};
use bindguard_core::kubelet::{MountedVolume, PodPath};
use bindguard_core::paths::lies_in;
use bindguard_core::policy::{Alarm, Mode, Policy, Scope};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::observe::{HeldSubpath, HeldVolume, HeldVolumeDirectories, observe_host_mount};
use bindguard_sys::{Handle, HandleError, Mounts};

use crate::directories::{by_all_names, in_real_folder};
use crate::probes::{Answers, Probes};
use crate::roots_in_use::RootsInUse;

/// A bind's source, open until it is judged.
enum Held<'a> {
    Subpath(Box<HeldSubpath>),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, HandleError>),
    /// A path anywhere on the node, perhaps on a server. This process never walks to it, unless the kernel has the whole path
    /// in its cache.
    Somewhere(Cow<'a, Path>, Option<Handle>),
    InVolume,
    Foreign,
}

impl<'a> Held<'a> {
    fn hold(bind: &Bind<'_>, source: Cow<'a, Path>, directories: &HeldVolumeDirectories, policy: &Policy) -> Self {
        match SourceKind::from_path(&source, None, policy) {
            SourceKind::Subpath(subpath) if policy.stale_subpaths != Mode::Off || looks_at_volumes(policy) => {
                Self::Subpath(Box::new(HeldSubpath::hold_among(subpath, directories)))
            }
            SourceKind::MountedVolume(volume) if looks_at_volumes(policy) => {
                let held = HeldVolume::hold_of(&volume);
                Self::Volume(volume, held)
            }
            SourceKind::HostRoot if policy.host_root != Mode::Off => Self::HostRoot(Handle::follow(&source)),
            SourceKind::Foreign if is_worth_asking(bind, &source, policy) => {
                let cached = Handle::cached(&source).map(Handle::wary);
                Self::Somewhere(source, cached)
            }
            SourceKind::InVolume => Self::InVolume,
            SourceKind::Subpath(_) | SourceKind::MountedVolume(_) | SourceKind::PlainVolume => Self::Foreign,
            SourceKind::HostRoot | SourceKind::Foreign => Self::Foreign,
        }
    }

    /// A name by which the policy, which has more names by now, recognizes a source that no name led to before. It is the
    /// name in the spec, or the kernel's.
    fn other_name(&self, policy: &Policy, probes: &Probes) -> Option<Cow<'a, Path>> {
        let Self::Somewhere(path, _) = self else { return None };
        let is_known = |path: &Path| SourceKind::from_path(path, None, policy) != SourceKind::Foreign;
        if is_known(path) {
            return Some(path.clone());
        }
        let real = PodPath::may_be_one(path).then(|| in_real_folder(path, probes)).flatten();
        real.filter(|real| is_known(real)).map(Cow::Owned)
    }

    /// The paths to probe: those not on a local filesystem, for which the kernel itself answers. If the check for dead
    /// sources is off, only those that cannot be judged otherwise: a subpath, and a path whose links are unknown.
    fn to_ask(&self, look: &Look<'_>) -> Vec<PathBuf> {
        let is_local = |handle| look.mounts.mount_of(handle).is_ok_and(|mount| mount.entry.fs_type.is_local());
        let is_to_answer = |handle| look.policy.dead_sources != Alarm::Off && !is_local(handle);
        match self {
            Self::Subpath(held) => held.to_ask(&look.mounts),
            Self::Volume(volume, held) if held.handle().is_some_and(is_to_answer) => {
                vec![volume.mount_point().to_owned()]
            }
            Self::Somewhere(path, cached) if cached.as_ref().is_none_or(is_to_answer) => vec![path.to_path_buf()],
            Self::Volume(..) | Self::Somewhere(..) | Self::HostRoot(_) | Self::InVolume | Self::Foreign => Vec::new(),
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
                let by_heart = cached.as_ref().and_then(|handle| handle.resolved_path().ok());
                let resolved = answers.resolved().map(Path::to_owned).or(by_heart);
                match (look.judge_reach(&answers.reach()), resolved) {
                    (Some(dead), _) => (SourceKind::Foreign, dead),
                    // A path that is not itself a host root may be a link to one: `/var/run` is `/run` nearly everywhere.
                    (None, Some(resolved)) if look.is_host_root(bind, &path, &resolved, cached.as_ref()) => {
                        (SourceKind::HostRoot, look.judge_host_root(bind, &Handle::follow(&path)))
                    }
                    _ => (SourceKind::Foreign, Verdict::Foreign),
                }
            }
            Self::InVolume => (SourceKind::InVolume, Verdict::Current),
            Self::Foreign => (SourceKind::Foreign, Verdict::Foreign),
        }
    }
}

/// The data that all judgements of one spec share.
struct Look<'a> {
    spec: &'a SpecView<'a>,
    policy: &'a Policy,
    mounts: Mounts,
    roots: &'a RootsInUse,
}

impl Look<'_> {
    /// True if a path that is no host root by its name leads to one, or is another name of one.
    fn is_host_root(&self, bind: &Bind<'_>, written: &Path, resolved: &Path, held: Option<&Handle>) -> bool {
        let leads_to_one = || resolved != written && self.policy.holds_runtime_mounts(resolved);
        let is_another_name =
            || held.is_some_and(|held| self.roots.show_below(held, resolved, &self.mounts, self.policy));
        let may_hold_mounts = || {
            self.policy.host_root_scope == Scope::AnySubmounts
                || self.policy.may_hold_mounts_of_containers(resolved) && !held.is_some_and(is_file)
        };
        let takes_mounts_along =
            || bind.is_recursive() && may_hold_mounts() && self.mounts.any_below(resolved) == Ok(true);
        self.policy.host_root != Mode::Off && (leads_to_one() || is_another_name() || takes_mounts_along())
    }

    fn judge_host_root(&self, bind: &Bind<'_>, source: &Result<Handle, HandleError>) -> Verdict {
        let any_shared = self.spec.binds().iter().any(|bind| bind.propagation() == AskedPropagation::Shared);
        let host = observe_host_mount(source, &self.mounts);
        let kept = self.policy.keeps(bind.access());
        judge_host_root(bind.propagation(), kept, self.spec.rootfs_propagation(), any_shared, &host)
    }

    fn judge_volume(&self, volume: &MountedVolume, held: &HeldVolume) -> Verdict {
        match self.policy.unmounted_volumes {
            Alarm::Off => Verdict::Foreign,
            Alarm::Report | Alarm::Refuse => judge_volume(volume, &held.observe(&self.mounts)),
        }
    }

    /// If the check for stale subpaths is off, subpaths are inspected only for the other two checks.
    fn wanted_of_subpath(&self, verdict: Verdict) -> Verdict {
        let is_wanted = self.policy.stale_subpaths != Mode::Off
            || matches!(verdict, Verdict::Dead(_) | Verdict::NotProbed) && self.policy.dead_sources != Alarm::Off
            || matches!(verdict, Verdict::Unmounted(_)) && self.policy.unmounted_volumes != Alarm::Off;
        if is_wanted { verdict } else { Verdict::Foreign }
    }

    fn judge_reach(&self, reach: &Reach) -> Option<Verdict> {
        judge_reach(reach).filter(|_| self.policy.dead_sources != Alarm::Off)
    }
}

/// Judges every bind of a spec.
pub(crate) fn inspect(spec: &SpecView<'_>, bundle: &Path, policy: &Policy) -> Vec<Finding> {
    let is_in_use = |root: &Path| spec.binds().iter().any(|bind| lies_in(bind.source(), root));
    let (mounts, probes) = (Mounts::default(), Probes::for_create());
    let roots = RootsInUse::of(policy, is_in_use, &mounts, &probes);
    let answering = roots.without_silent(policy);
    let policy = answering.as_ref().unwrap_or(policy);
    let mut findings = Vec::with_capacity(spec.binds().len());
    for binds in spec.binds().chunks(AT_A_TIME) {
        findings.append(&mut judged(binds, spec, bundle, policy, &roots, &mounts, &probes));
    }
    findings
}

/// Limit of binds that are open at a time, with at most three descriptors each: a runtime's limit is usually 1024.
const AT_A_TIME: usize = 300;

fn judged(
    binds: &[Bind<'_>],
    spec: &SpecView<'_>,
    bundle: &Path,
    policy: &Policy,
    roots: &RootsInUse,
    mounts: &Mounts,
    probes: &Probes,
) -> Vec<Finding> {
    let directories = HeldVolumeDirectories::default();
    let mut held: Vec<_> =
        binds.iter().map(|bind| Held::hold(bind, source_of(bind, bundle), &directories, policy)).collect();
    // A source that no name of the policy matches may match by another name.
    let any_unknown = held.iter().any(|held| matches!(held, Held::Somewhere(..)));
    let by_all_names = any_unknown.then(|| by_all_names(policy, roots, probes)).flatten();
    let policy = by_all_names.as_ref().unwrap_or(policy);
    for (held, bind) in held.iter_mut().zip(binds) {
        if let Some(name) = held.other_name(policy, probes) {
            *held = Held::hold(bind, name, &directories, policy);
        }
    }
    let look = Look { spec, policy, mounts: mounts.for_what_is_held(), roots };
    let to_ask: Vec<_> = held.iter().map(|held| held.to_ask(&look)).collect();
    let judged = binds.iter().zip(held).zip(probes.ask(&to_ask)).map(|((bind, held), answers)| {
        let (kind, verdict) = held.judge(bind, &look, &answers);
        let (source, destination) = (bind.source().to_owned(), Some(bind.destination().to_owned()));
        Finding { bind: Some(bind.index()), source, destination, kind, verdict }
    });
    judged.collect()
}

/// True if a volume, and the volume of a subpath, must be mounted or must answer.
fn looks_at_volumes(policy: &Policy) -> bool {
    policy.unmounted_volumes != Alarm::Off || policy.dead_sources != Alarm::Off
}

/// The source of a bind; a relative source is relative to the bundle.
fn source_of<'a>(bind: &'a Bind<'_>, bundle: &Path) -> Cow<'a, Path> {
    let source = bind.source();
    if source.is_absolute() { source.into() } else { bundle.join(source).into() }
}

fn is_worth_asking(bind: &Bind<'_>, source: &Path, policy: &Policy) -> bool {
    let wanted = policy.host_root != Mode::Off || policy.dead_sources != Alarm::Off;
    let may_take_mounts_along = || {
        policy.host_root != Mode::Off
            && bind.is_recursive()
            && (policy.host_root_scope == Scope::AnySubmounts || policy.may_hold_mounts_of_containers(source))
    };
    wanted && (!policy.is_local_by_construction(source) || may_take_mounts_along())
}

/// Nothing can be mounted below a file, such as a runtime's socket: the mount table need not be read.
fn is_file(held: &Handle) -> bool {
    held.identity().is_ok_and(|identity| identity.kind == FileKind::File)
}
