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

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, SubpathEvidence};
use bindguard_core::judge::{PathInVolume, Remedy, RepairMethod, Verdict, judge_subpath};
use bindguard_core::kubelet::{TimestampDirectory, VolumeSubpath, Writer};
use bindguard_core::plan::Rebind;
use bindguard_core::report::Outcome;
use bindguard_sys::fault::FaultPoint;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::replace::{
    CloneError, NewMount, ReplaceError, attach_beneath, attach_tucked, clone_mount, detach,
};
use bindguard_sys::{
    Handle, MountOf, Mounts, OpenedTarget, fault, make_directories, open_target, require_calls,
    stranded,
};

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
    let mut left_behind = BTreeSet::new();
    let result = until_current(order, probes, &mut left_behind);
    fault::reach(FaultPoint::Verified);
    remove_stranded(order.subpath(), &left_behind);
    fault::reach(FaultPoint::Cleared);
    result
}

fn until_current(
    order: &Rebind,
    probes: &Probes,
    left_behind: &mut BTreeSet<String>,
) -> Result<Outcome, NotRebound> {
    let (mut swaps, mut failures) = (0, 0);
    let ended = repeat(Instant::now() + REPLACE_TIMEOUT, || {
        let round = RebindRound::begin(order.subpath(), probes);
        fault::reach(FaultPoint::Held);
        match round.act(order, left_behind) {
            Ok(Step::Done) => return Ok::<_, NotRebound>(ControlFlow::Break(swaps)),
            Ok(Step::Swapped) => swaps += 1,
            Ok(Step::LookAgain) => {}
            // Another repairer, or the kubelet, detached the mount that this round had open.
            Err(_) if round.was_overtaken() => {}
            // Before Linux 6.5 the mount of another repairer may be in the volume for a moment
            // (`sys::replace::attach_tucked`).
            Err(_) if order.writer() == Writer::Kubelet && failures < MAX_FAILURES => {
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
        Ended::Unfinished { rounds } => Err(NotRebound::Impossible(format!(
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
struct RebindRound<'s> {
    subpath: &'s VolumeSubpath,
    held: HeldSubpath,
    evidence: SubpathEvidence,
}

impl<'s> RebindRound<'s> {
    fn begin(subpath: &'s VolumeSubpath, probes: &Probes) -> Self {
        let held = HeldSubpath::hold(subpath.clone());
        let evidence = probes.observe_one(&held, &Mounts::default());
        Self {
            subpath,
            held,
            evidence,
        }
    }

    fn verdict(&self) -> Verdict {
        judge_subpath(self.subpath, &self.evidence)
    }

    fn act(&self, order: &Rebind, left_behind: &mut BTreeSet<String>) -> Result<Step, NotRebound> {
        match self.verdict() {
            // Two repairers attached a mount each. Detach the upper mount: detaching the lower
            // mount would also detach the upper mount.
            Verdict::Current | Verdict::Foreign if self.covers_its_equal() => {
                detach(self.mount()?).map_err(not_rebound)?;
                Ok(Step::LookAgain)
            }
            // Foreign: the file that a hostPath shows exists again, and there is nothing else to
            // compare it with.
            Verdict::Current | Verdict::Foreign => Ok(Step::Done),
            Verdict::Stale {
                remedy: Ok(remedy), ..
            } if remedy.method == RepairMethod::Rebind => {
                if remedy.writer == Writer::Kubelet {
                    left_behind.extend(
                        remedy
                            .sub_path
                            .timestamp
                            .as_ref()
                            .map(|shown| shown.name().to_owned()),
                    );
                }
                self.replace(&remedy)
            }
            Verdict::Orphaned {
                remake: Some(remedy),
                ..
            } if order.method() == RepairMethod::Remake => {
                self.remake(&remedy)?;
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
        let now = HeldSubpath::hold(self.subpath.clone());
        let ids =
            [&self.held, &now].map(|held| held.handle().and_then(|handle| handle.mount_id().ok()));
        matches!(ids, [Some(held), Some(now)] if held != now)
    }

    fn replace(&self, remedy: &Remedy) -> Result<Step, NotRebound> {
        // The new mount is there already: a guard was killed before it detached, or is about to
        // detach.
        if !self.covers_its_equal() {
            return Ok(if self.swap(remedy)? {
                Step::Swapped
            } else {
                Step::LookAgain
            });
        }
        detach(self.mount()?).map_err(not_rebound)?;
        Ok(Step::Swapped)
    }

    /// True if a second mount lies directly below, at the same path.
    fn covers_its_equal(&self) -> bool {
        matches!(&self.evidence.mount, Observed::Seen(mount) if mount.covers_its_equal)
    }

    fn mount(&self) -> Result<&Handle, NotRebound> {
        self.held
            .handle()
            .ok_or_else(|| NotRebound::Impossible("it went away".to_owned()))
    }

    /// Swaps the stale mount for a bind of the current target. `false` if the target was removed
    /// meanwhile: judge again.
    fn swap(&self, remedy: &Remedy) -> Result<bool, NotRebound> {
        let Some(target) = self.open_current(&remedy.sub_path, remedy)?.file else {
            return Ok(false);
        };
        fault::reach(FaultPoint::TargetOpened);
        let new = match clone_mount(&target, self.held.attributes_to_keep()) {
            Ok(new) => new,
            Err(CloneError::TargetGone) => return Ok(false),
            Err(error) => return Err(not_rebound(error)),
        };
        let is_attached = match self.attach(&new) {
            Err(error) if error.is_not_possible() => self.tuck(&new)?,
            done => is_done(done)?,
        };
        if !is_attached {
            return Ok(false);
        }
        fault::reach(FaultPoint::AfterAttach);
        detach(self.mount()?).map_err(not_rebound)?;
        fault::reach(FaultPoint::Detached);
        Ok(true)
    }

    /// Creates the directory that the sub path names; the next round binds it.
    fn remake(&self, remedy: &Remedy) -> Result<(), NotRebound> {
        if self.held.attributes_to_keep().is_some() {
            let why = "the mount that it was bound from is gone, or was changed: a directory is not made through another one";
            return Err(NotRebound::Impossible(why.to_owned()));
        }
        make_directories(self.directory()?, &remedy.sub_path.path).map_err(not_rebound)
    }

    fn attach(&self, new: &NewMount) -> Result<(), ReplaceError> {
        match self.held.handle() {
            Some(stale) if !fault::denies_beneath() => attach_beneath(new, stale),
            _ => Err(ReplaceError::NO_BENEATH),
        }
    }

    fn open_current(
        &self,
        sub_path: &PathInVolume,
        remedy: &Remedy,
    ) -> Result<OpenedTarget, NotRebound> {
        open_target(self.directory()?, &sub_path.path, remedy.layout).map_err(not_rebound)
    }

    fn directory(&self) -> Result<&Handle, NotRebound> {
        self.held
            .volume()
            .ok_or_else(|| NotRebound::Impossible("its volume went away".to_owned()))
    }

    /// Attaches below the stale mount through propagation, and checks that it arrived there.
    /// `false` if the target was removed meanwhile.
    fn tuck(&self, new: &NewMount) -> Result<bool, NotRebound> {
        let before = self.mount_of_stale()?;
        if before
            .parent
            .is_none_or(|parent| parent.propagation.peer_group.is_none())
        {
            return Err(NotRebound::Impossible(
                "its parent mount is private, and this kernel cannot mount beneath it".to_owned(),
            ));
        }
        let path = self.subpath.path();
        let (folder, name) = path
            .parent()
            .zip(path.file_name())
            .ok_or_else(|| NotRebound::Impossible("it has no folder".to_owned()))?;
        let folder = Handle::of(folder).map_err(not_rebound)?;
        if !is_done(attach_tucked(new, &folder, name))? {
            return Ok(false);
        }
        if self.mount_of_stale()?.covers_its_equal() {
            Ok(true)
        } else {
            Err(NotRebound::Impossible(
                "the new mount did not arrive below the stale one".to_owned(),
            ))
        }
    }

    fn mount_of_stale(&self) -> Result<MountOf, NotRebound> {
        Mounts::default()
            .mount_of(self.mount()?)
            .map_err(not_rebound)
    }
}

/// Finishes the removal of payloads that the kubelet may not have removed because of a swap.
fn remove_stranded(subpath: &VolumeSubpath, left_behind: &BTreeSet<String>) {
    if left_behind.is_empty() {
        return;
    }
    let held = HeldSubpath::hold(subpath.clone());
    let Some(volume) = held.volume_of_kubelet() else {
        return;
    };
    for payload in left_behind
        .iter()
        .filter_map(|name| TimestampDirectory::from_name(name.as_ref()))
    {
        // A payload that stays costs a little disk, and the judge recognizes it; the container does
        // not wait for its removal.
        let _ = stranded::remove_payload(volume, &payload);
    }
}

fn not_rebound(error: impl std::error::Error) -> NotRebound {
    NotRebound::Impossible(error_chain(&error))
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
pub(crate) const REPLACE_TIMEOUT: Duration = Duration::from_secs(20);

/// The end of the rounds of a replacement.
#[derive(Debug)]
pub(crate) enum Ended<T> {
    /// A round had this result.
    Done(T),
    /// There were [`MAX_ROUNDS`] rounds, or the time is over.
    Unfinished {
        /// The number of rounds.
        rounds: u32,
    },
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
