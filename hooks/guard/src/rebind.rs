//! Repairs a stale subpath: binds and checks again, until the mount shows the current target.
//!
//! ```text
//! ┌► hold, look, judge ─ current? ─► done
//! │    another mount lies below it? detach the top ─────┐
//! │    open the current target                          │
//! │    attach it below the stale mount, detach that ────┤
//! └─────────────────────────────────────────────────────┘   at most 64 times
//! ```
//!
//! Each round judges from fresh evidence. So a volume that is updated meanwhile, another repairer,
//! or an earlier guard that was killed half way are only states to continue from. No lock separates
//! repairers, because a container could hold the lock (decision 0024). A repairer detaches a mount
//! only if the repairer has the mount open and a second mount is below.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, slice, thread};

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, SubpathEvidence};
use bindguard_core::judge::{
    Finding, Plan, Rebind, Remedy, RepairMethod, Unmounted, Verdict, judge_subpath,
};
use bindguard_core::kubelet::{TimestampDirectory, VolumeSubpath, Writer};
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{BindReport, Outcome, Report};
use bindguard_sys::observe::{HeldSubpath, children};
use bindguard_sys::replace::{
    CloneError, NewMount, ReplaceError, attach_beneath, attach_tucked, clone_mount, detach,
};
use bindguard_sys::{
    FaultPoint, Handle, MountOf, Mounts, denies_beneath, make_directories, open_target,
    remove_payload, require_calls,
};

use crate::inspect::{judge_subpaths, planned_outcome};
use crate::probes::Probes;

/// The pause after a failure that may pass.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The reason why a subpath is not current.
#[derive(Debug, thiserror::Error)]
pub enum NotRebound {
    /// It can no longer be repaired, for example because its key was removed meanwhile.
    #[error("{0}")]
    NoLongerStale(String),
    /// It is stale, and could not be repaired here.
    #[error("{0}")]
    Impossible(String),
}

impl From<NotRebound> for Outcome {
    fn from(error: NotRebound) -> Self {
        Self::Failed {
            error: error.to_string(),
        }
    }
}

/// Replaces a stale subpath's mount by a bind of its current target. Returns the number of swaps, or
/// that the mount was current before the first swap. All repairs of a create share `probes`.
pub fn rebind(order: &Rebind, probes: &Probes) -> Result<Outcome, NotRebound> {
    require_calls().map_err(not_rebound)?;
    let mut left_behind = Vec::new();
    let result = until_current(order, probes, &mut left_behind);
    FaultPoint::Verified.reach();
    remove_stranded(&order.subpath, &left_behind);
    FaultPoint::Cleared.reach();
    result
}

fn until_current(
    order: &Rebind,
    probes: &Probes,
    left_behind: &mut Vec<TimestampDirectory>,
) -> Result<Outcome, NotRebound> {
    let (mut swaps, mut failures) = (0, 0);
    let ended = repeat(Instant::now() + REPLACE_TIMEOUT, || {
        let held = HeldSubpath::hold(order.subpath.clone());
        let evidence = probes.observe_one(&held, &Mounts::default());
        let round = RebindRound { held, evidence };
        FaultPoint::Held.reach();
        match round.act(order, left_behind) {
            Ok(Step::Done) => return Ok::<_, NotRebound>(ControlFlow::Break(swaps)),
            Ok(Step::Swapped) => swaps += 1,
            Ok(Step::LookAgain) => {}
            // Another repairer, or the kubelet, detached the mount that this round had open.
            Err(_) if round.was_overtaken() => {}
            // Before Linux 6.5 the mount of another repairer may be in the volume for a moment
            // (`sys::replace::attach_tucked`).
            Err(_) if order.remedy.writer == Writer::Kubelet && failures < MAX_FAILURES => {
                failures += 1;
                thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => return Err(error),
        }
        Ok(ControlFlow::Continue(()))
    })?;
    match ended {
        // Another repairer was first.
        Ended::Done(0) => Ok(Outcome::AlreadyCurrent),
        Ended::Done(tries) => Ok(Outcome::Rebound { tries }),
        Ended::Unfinished { rounds } => Err(impossible(format!(
            "its volume changed {rounds} times meanwhile"
        ))),
    }
}

/// The result of a round.
enum Step {
    /// The subpath is current, and has exactly one mount.
    Done,
    /// A stale mount was detached.
    Swapped,
    /// The subpath, or the source of its bind, changed.
    LookAgain,
}

/// An observation of a subpath, and the actions that follow from the observation.
struct RebindRound {
    held: HeldSubpath,
    evidence: SubpathEvidence,
}

impl RebindRound {
    fn act(
        &self,
        order: &Rebind,
        left_behind: &mut Vec<TimestampDirectory>,
    ) -> Result<Step, NotRebound> {
        // True if a second mount lies directly below, at the same path.
        let covers_its_equal =
            matches!(&self.evidence.mount, Observed::Seen(mount) if mount.covers_its_equal);
        match judge_subpath(&self.held.subpath, &self.evidence) {
            // Two repairers attached a mount each. Detach the upper mount: detaching the lower
            // mount would also detach the upper mount.
            Verdict::Current | Verdict::Foreign if covers_its_equal => {
                detach(self.mount()?).map_err(not_rebound)?;
                Ok(Step::LookAgain)
            }
            // Foreign: the file that a hostPath shows exists again, and there is nothing else to
            // compare it with.
            Verdict::Current | Verdict::Foreign => Ok(Step::Done),
            Verdict::Stale {
                remedy: Ok(remedy), ..
            } if remedy.method == RepairMethod::Rebind => {
                if remedy.writer == Writer::Kubelet
                    && let Some(shown) = &remedy.sub_path.timestamp
                {
                    left_behind.push(shown.clone());
                }
                // If the new mount is there already, a guard was killed before it detached, or is
                // about to detach.
                if !covers_its_equal && !self.attach(&remedy)? {
                    return Ok(Step::LookAgain);
                }
                detach(self.mount()?).map_err(not_rebound)?;
                if !covers_its_equal {
                    FaultPoint::Detached.reach();
                }
                Ok(Step::Swapped)
            }
            Verdict::Orphaned {
                remake: Some(remedy),
                ..
            } if order.remedy.method == RepairMethod::Remake => {
                // The next round binds the new directory.
                if self.held.attributes_to_keep().is_some() {
                    return Err(impossible(
                        "the mount that it was bound from is gone, or was changed: a directory is not made through another one",
                    ));
                }
                make_directories(self.directory()?, &remedy.sub_path.path).map_err(not_rebound)?;
                Ok(Step::LookAgain)
            }
            verdict => {
                let why = verdict
                    .reason()
                    .unwrap_or_else(|| verdict.name().to_string());
                Err(NotRebound::NoLongerStale(why))
            }
        }
    }

    /// True if the path no longer shows the mount that this round opened.
    fn was_overtaken(&self) -> bool {
        let id = |held: &HeldSubpath| held.handle().and_then(|handle| handle.mount_id().ok());
        let now = HeldSubpath::hold(self.held.subpath.clone());
        matches!((id(&self.held), id(&now)), (Some(held), Some(now)) if held != now)
    }

    fn mount(&self) -> Result<&Handle, NotRebound> {
        let mount = self.held.handle();
        mount.ok_or_else(|| impossible("it went away"))
    }

    fn directory(&self) -> Result<&Handle, NotRebound> {
        let volume = self.held.volume();
        volume.ok_or_else(|| impossible("its volume went away"))
    }

    /// Attaches a bind of the current target beneath the stale mount. `false` if the target was
    /// removed meanwhile: judge again.
    fn attach(&self, remedy: &Remedy) -> Result<bool, NotRebound> {
        let target = open_target(self.directory()?, &remedy.sub_path.path, remedy.layout);
        let Some(target) = target.map_err(not_rebound)?.file else {
            return Ok(false);
        };
        FaultPoint::TargetOpened.reach();
        let new = match clone_mount(&target, self.held.attributes_to_keep()) {
            Ok(new) => new,
            Err(CloneError::TargetGone) => return Ok(false),
            Err(error) => return Err(not_rebound(error)),
        };
        let attached = match self.held.handle() {
            Some(stale) if !denies_beneath() => attach_beneath(&new, stale),
            _ => Err(ReplaceError::NO_BENEATH),
        };
        let is_attached = match attached {
            Err(error) if error.is_not_possible() => self.tuck(&new)?,
            attached => is_done(attached)?,
        };
        if is_attached {
            FaultPoint::AfterAttach.reach();
        }
        Ok(is_attached)
    }

    /// Attaches below the stale mount through propagation, and checks that it arrived there.
    /// `false` if the target was removed meanwhile.
    fn tuck(&self, new: &NewMount) -> Result<bool, NotRebound> {
        let parent = self.mount_of_stale()?.parent;
        if !parent.is_some_and(|parent| parent.is_shared()) {
            return Err(impossible(
                "its parent mount is private, and this kernel cannot mount beneath it",
            ));
        }
        let path = self.held.subpath.path();
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(impossible("it has no folder"));
        };
        let folder = Handle::of(folder).map_err(not_rebound)?;
        if !is_done(attach_tucked(new, &folder, name))? {
            return Ok(false);
        }
        if !self.mount_of_stale()?.covers_its_equal() {
            return Err(impossible(
                "the new mount did not arrive below the stale one",
            ));
        }
        Ok(true)
    }

    fn mount_of_stale(&self) -> Result<MountOf, NotRebound> {
        let mount = Mounts::default().mount_of(self.mount()?);
        mount.map_err(not_rebound)
    }
}

/// Finishes the removal of payloads that the kubelet may not have removed because of a swap.
fn remove_stranded(subpath: &VolumeSubpath, left_behind: &[TimestampDirectory]) {
    if left_behind.is_empty() {
        return;
    }
    let held = HeldSubpath::hold(subpath.clone());
    let Some(volume) = held.volume_of_kubelet() else {
        return;
    };
    for payload in left_behind {
        // A payload that stays costs a little disk, and the judge recognizes it; the container
        // does not wait for its removal.
        let _ = remove_payload(volume, payload);
    }
}

fn impossible(why: impl Into<String>) -> NotRebound {
    NotRebound::Impossible(why.into())
}

fn not_rebound(error: impl std::error::Error) -> NotRebound {
    impossible(error_chain(&error))
}

/// False if the target was removed meanwhile, or another repairer was at work: judge again.
fn is_done(attached: Result<(), ReplaceError>) -> Result<bool, NotRebound> {
    match attached {
        Ok(()) => Ok(true),
        Err(error) if error.is_target_gone() || error == ReplaceError::Overtaken => Ok(false),
        Err(error) => Err(not_rebound(error)),
    }
}

// The budget and the retry rule of a replacement, the same on the host and in a container.

/// Limit of rounds. Updates every 2 ms needed at most 2 rounds, updates without a pause 12.
pub(crate) const MAX_ROUNDS: u32 = 64;

/// Limit of rounds in which a mount could not be replaced. Rounds that an update of the volume
/// ended do not count.
pub(crate) const MAX_FAILURES: u32 = 3;

/// Time limit of the replacements in a place.
pub const REPLACE_TIMEOUT: Duration = Duration::from_secs(20);

/// The end of the rounds of a replacement.
#[derive(Debug)]
pub(crate) enum Ended<T> {
    /// A round had this result.
    Done(T),
    /// There were [`MAX_ROUNDS`] rounds, or the time is over.
    Unfinished { rounds: u32 },
}

/// Runs rounds until a round breaks with a result or an error, for at most [`MAX_ROUNDS`]. No round
/// begins after `until`.
pub(crate) fn repeat<T, E>(
    until: Instant,
    mut round: impl FnMut() -> Result<ControlFlow<T>, E>,
) -> Result<Ended<T>, E> {
    for rounds in 0..MAX_ROUNDS {
        if Instant::now() >= until {
            return Ok(Ended::Unfinished { rounds });
        }
        if let ControlFlow::Break(result) = round()? {
            return Ok(Ended::Done(result));
        }
    }
    Ok(Ended::Unfinished { rounds: MAX_ROUNDS })
}

// Re-binds the host's subpaths of a volume, right after the kubelet updated it.

/// A volume of a pod, by its name in the pod's spec.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeOfPod {
    pub kubelet_root: PathBuf,
    pub pod_uid: String,
    pub volume: String,
}

impl VolumeOfPod {
    /// `<root>/pods/<uid>`
    pub fn pod_directory(&self) -> PathBuf {
        self.kubelet_root.join("pods").join(&self.pod_uid)
    }

    /// True if a container has a directory of the volume as its subPath: such a directory is empty
    /// once the kubelet removed the old payload.
    pub fn has_directories(&self) -> bool {
        let subpaths = self.subpaths();
        let mut paths = subpaths.iter().map(VolumeSubpath::path);
        paths.any(|path| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir()))
    }

    /// The subpaths that the kubelet bound, in no order. A missing folder has no subpaths: the pod
    /// is being removed.
    fn subpaths(&self) -> Vec<VolumeSubpath> {
        let root = self.kubelet_root.as_path();
        let folder = self.pod_directory().join("volume-subpaths");
        let mut subpaths = Vec::new();
        for container in children(&folder.join(&self.volume)).unwrap_or_default() {
            for path in children(&container).unwrap_or_default() {
                subpaths.extend(VolumeSubpath::from_path(&path, [root]));
            }
        }
        subpaths
    }
}

/// Re-binds the stale subpaths of a volume, or reports them, as policy says of stale subpaths.
///
/// A subpath without a mount is left out: the kubelet is about to bind it, or to remove it.
pub fn rebind_volume(volume: &VolumeOfPod, policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    if policy.stale_subpaths != Mode::Off {
        match require_calls() {
            Ok(()) => {
                for finding in judge_subpaths(&volume.subpaths(), &Probes::for_create()) {
                    if finding.verdict != Verdict::Unmounted(Unmounted::Subpath) {
                        report.binds.extend(reported(finding, policy));
                    }
                }
            }
            Err(old) => report.problems.push(old.to_string()),
        }
    }
    report.set_duration(start.elapsed());
    report
}

/// `None` if the subpath went away meanwhile.
fn reported(finding: Finding, policy: &Policy) -> Option<BindReport> {
    let outcome = if policy.stale_subpaths == Mode::Repair {
        match Rebind::from_finding(&finding, policy) {
            Some(order) => match rebind(&order, &Probes::for_repairs(Instant::now())) {
                Err(NotRebound::NoLongerStale(_)) => return None,
                rebound => Some(rebound.unwrap_or_else(Outcome::from)),
            },
            None => None,
        }
    } else {
        // The effect that a repair would have: policy only keeps it from being done.
        let policy = Policy {
            stale_subpaths: Mode::Repair,
            ..*policy
        };
        let plan = Plan::from_findings(slice::from_ref(&finding), &policy);
        planned_outcome(&finding, &plan, &policy)
    };
    Some(BindReport { finding, outcome })
}
