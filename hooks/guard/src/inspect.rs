//! Looking at the binds of a spec, read only.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::evidence::Reach;
use bindguard_core::judge::{Finding, Verdict, judge_host_root, judge_reach, judge_subpath, judge_volume};
use bindguard_core::kubelet::{MountedVolume, VolumeSubpath};
use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::observe::{HeldSubpath, HeldVolume, observe_host_mount};
use bindguard_sys::probe::{Answer, Patience, probe};
use bindguard_sys::{Handle, HandleError, Mounts};

/// How long sources that may hang are asked: well within the guard's own deadline.
const PATIENCE: Patience = Patience { each: Duration::from_millis(700), all: Duration::from_millis(1200) };

/// A bind's source, held until it is judged.
enum Held {
    Subpath(VolumeSubpath, HeldSubpath),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, HandleError>),
    /// Somewhere on the node, perhaps on a server: nobody walks there in this process.
    Somewhere(PathBuf),
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
            SourceKind::Foreign if is_worth_asking(source, policy) => Self::Somewhere(source.to_owned()),
            SourceKind::InVolume => Self::InVolume,
            SourceKind::Subpath(_) | SourceKind::MountedVolume(_) | SourceKind::HostRoot | SourceKind::Foreign => {
                Self::Foreign
            }
        }
    }

    /// The path to ask whether it is alive, if that is in question: the kernel itself answers for a local filesystem.
    fn to_ask(&self, mounts: &Mounts) -> Option<PathBuf> {
        let (path, handle) = match self {
            Self::Subpath(subpath, held) => (subpath.path(), held.handle()),
            Self::Volume(volume, held) => (volume.mount_point().to_owned(), held.handle()),
            Self::Somewhere(path) => return Some(path.clone()),
            Self::HostRoot(_) | Self::InVolume | Self::Foreign => return None,
        };
        let mount = handle.and_then(|handle| mounts.mount_of(handle).ok())?;
        (!mount.entry.fs_type.is_local()).then_some(path)
    }

    fn judge(self, bind: &Bind, look: &Look<'_>, answer: &Answer) -> (SourceKind, Verdict) {
        let dead = judge_reach(&reach(answer)).filter(|_| look.policy.dead_sources != Alarm::Off);
        match self {
            Self::Subpath(subpath, held) => {
                let verdict = dead.unwrap_or_else(|| judge_subpath(&held.observe(&look.mounts)));
                (SourceKind::Subpath(subpath), verdict)
            }
            Self::Volume(volume, held) => {
                let verdict = dead.unwrap_or_else(|| judge_volume(&volume, &held.observe(&look.mounts)));
                (SourceKind::MountedVolume(volume), verdict)
            }
            Self::HostRoot(source) => (SourceKind::HostRoot, look.judge_host_root(bind, &source)),
            Self::Somewhere(path) => match (answer, dead) {
                (_, Some(dead)) => (SourceKind::Foreign, dead),
                // A path that is not itself a host root may be a link to one: `/var/run` is `/run` nearly everywhere.
                (Answer::Reached(resolved), None) if look.is_host_root(resolved) => {
                    (SourceKind::HostRoot, look.judge_host_root(bind, &Handle::follow(&path)))
                }
                _ => (SourceKind::Foreign, Verdict::Foreign),
            },
            Self::InVolume => (SourceKind::InVolume, Verdict::Current),
            Self::Foreign => (SourceKind::Foreign, Verdict::Foreign),
        }
    }
}

/// What every judgement of one spec shares.
struct Look<'a> {
    spec: &'a SpecView<'a>,
    policy: &'a Policy,
    mounts: Mounts,
}

impl Look<'_> {
    fn is_host_root(&self, resolved: &Path) -> bool {
        self.policy.host_root != Mode::Off && self.policy.holds_runtime_mounts(resolved)
    }

    fn judge_host_root(&self, bind: &Bind, source: &Result<Handle, HandleError>) -> Verdict {
        let any_shared = self.spec.binds().iter().any(|bind| bind.propagation() == AskedPropagation::Shared);
        let host = observe_host_mount(source, &self.mounts);
        judge_host_root(bind.propagation(), self.spec.rootfs_propagation(), any_shared, &host)
    }
}

/// Judges every bind of a spec.
pub(crate) fn inspect(spec: &SpecView<'_>, bundle: &Path, policy: &Policy) -> Vec<Finding> {
    let held: Vec<Held> = spec.binds().iter().map(|bind| Held::hold(&bundle.join(bind.source()), policy)).collect();
    let look = Look { spec, policy, mounts: Mounts::default() };
    let answers = ask(&held, &look.mounts);
    let judged = spec.binds().iter().zip(held).zip(&answers).map(|((bind, held), answer)| {
        let (kind, verdict) = held.judge(bind, &look, answer);
        let (source, destination) = (bind.source().to_owned(), Some(bind.destination().to_owned()));
        Finding { bind: Some(bind.index()), source, destination, kind, verdict }
    });
    judged.collect()
}

/// One answer for each source; those that are not in question were not asked.
fn ask(held: &[Held], mounts: &Mounts) -> Vec<Answer> {
    let to_ask: Vec<Option<PathBuf>> = held.iter().map(|held| held.to_ask(mounts)).collect();
    let paths: Vec<PathBuf> = to_ask.iter().flatten().cloned().collect();
    // Without a process to ask with, nobody is called dead.
    let mut answers = probe(&paths, PATIENCE).unwrap_or_default().into_iter();
    let answer = |path: &Option<PathBuf>| path.as_ref().and_then(|_| answers.next()).unwrap_or(Answer::NotAsked);
    to_ask.iter().map(answer).collect()
}

fn is_worth_asking(source: &Path, policy: &Policy) -> bool {
    let wanted = policy.host_root != Mode::Off || policy.dead_sources != Alarm::Off;
    wanted && !policy.is_local_by_construction(source)
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => {
            Reach::Refused { number: error.raw_os_error().unwrap_or(0), words: error.to_string() }
        }
        Answer::Silent => Reach::Silent(PATIENCE.each.as_millis() as u64),
        Answer::NotAsked => Reach::NotAsked,
    }
}
