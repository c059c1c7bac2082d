//! Mending one stale subpath: bind, look again, until what is there is what should be there.
//!
//! ```text
//! lock the pod
//! ┌► hold, look, judge ─ current? ─► done
//! │    a cut-off swap lies there? detach its stale top ─┐
//! │    open the current target                          │
//! │    attach it below the stale mount, detach that ────┤
//! └─────────────────────────────────────────────────────┘   at most 32 times
//! ```
//!
//! Each round judges from fresh evidence, so a volume that is updated meanwhile, another guard, or an earlier guard that
//! was killed half way are all the same: a state to go on from.

use std::collections::BTreeSet;
use std::time::Duration;

use bindguard_core::evidence::{Observed, SubpathEvidence};
use bindguard_core::judge::{Remedy, Verdict, Way, judge_subpath};
use bindguard_core::kubelet::{SubPath, TimestampDirectory, VolumeSubpath, Writer};
use bindguard_core::plan::Rebind;
use bindguard_sys::fault::{self, FaultPoint};
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::pod_lock::PodLock;
use bindguard_sys::swap::{SwapError, attach_beneath, attach_tucked, detach};
use bindguard_sys::{Handle, MountOf, Mounts, OpenedTarget, make_directories, open_target, stranded};

use crate::ask::observe;
use crate::causes::in_full;

/// How often a volume may change under a re-bind. Updates every 2 ms needed at most 2 rounds, updates without a pause 12.
const ROUNDS: u32 = 32;
/// How long to wait for another guard of the same pod; a re-bind takes it a few milliseconds.
const PATIENCE: Duration = Duration::from_millis(500);

/// How a subpath came to be current.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rebound {
    /// By this many swaps.
    Swapped(u32),
    /// Without any: somebody else was first.
    AlreadyCurrent,
}

/// Why a subpath is not current.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotRebound {
    /// It is no longer something that can be mended: its key went away meanwhile, say.
    #[error("{0}")]
    NoLongerStale(String),
    /// It is stale, and could not be mended here.
    #[error("{0}")]
    Impossible(String),
}

/// Binds a subpath's current target in the stale one's place.
pub(crate) fn rebind(order: &Rebind) -> Result<Rebound, NotRebound> {
    let subpath = order.subpath();
    let lock = PodLock::acquire(&subpath.pod_directory(), PATIENCE).map_err(not_rebound)?;
    fault::reach(FaultPoint::Locked);
    let mut left_behind = BTreeSet::new();
    let result = until_current(order, &mut left_behind);
    fault::reach(FaultPoint::Verified);
    remove_stranded(subpath, &left_behind);
    drop(lock);
    fault::reach(FaultPoint::Unlocked);
    result
}

fn until_current(order: &Rebind, left_behind: &mut BTreeSet<String>) -> Result<Rebound, NotRebound> {
    let mut swaps = 0;
    for _ in 0..ROUNDS {
        let round = Round::begin(order.subpath());
        fault::reach(FaultPoint::Held);
        match round.verdict() {
            // Foreign: what a hostPath shows is there again, and there is nothing else to compare it with.
            Verdict::Current | Verdict::Foreign if swaps == 0 => return Ok(Rebound::AlreadyCurrent),
            Verdict::Current | Verdict::Foreign => return Ok(Rebound::Swapped(swaps)),
            Verdict::Stale { remedy: Ok(remedy), .. } if remedy.way == Way::Rebind => {
                if remedy.writer == Writer::Kubelet {
                    left_behind.extend(remedy.sub_path.timestamp.as_ref().map(|shown| shown.name().to_owned()));
                }
                if round.was_cut_off() {
                    detach(round.stale()?).map_err(swap_failed)?;
                    swaps += 1;
                } else if round.swap(&remedy)? {
                    swaps += 1;
                }
            }
            Verdict::Orphaned { remake: Some(remedy), .. } if order.way() == Way::Remake => round.remake(&remedy)?,
            verdict => {
                let why = verdict.reason().unwrap_or_else(|| verdict.name().to_owned());
                return Err(NotRebound::NoLongerStale(why));
            }
        }
    }
    Err(NotRebound::Impossible(format!("its volume changed {ROUNDS} times meanwhile")))
}

/// One look at a subpath, and what can be done with what was seen.
struct Round<'s> {
    subpath: &'s VolumeSubpath,
    held: HeldSubpath,
    evidence: SubpathEvidence,
}

impl<'s> Round<'s> {
    fn begin(subpath: &'s VolumeSubpath) -> Self {
        let held = HeldSubpath::hold(subpath.clone());
        let evidence = observe(&held, &Mounts::default());
        Self { subpath, held, evidence }
    }

    fn verdict(&self) -> Verdict {
        judge_subpath(self.subpath, &self.evidence)
    }

    /// An earlier guard was killed after it attached and before it detached.
    fn was_cut_off(&self) -> bool {
        matches!(&self.evidence.mount, Observed::Seen(mount) if mount.covers_its_equal)
    }

    fn stale(&self) -> Result<&Handle, NotRebound> {
        self.held.handle().ok_or_else(|| NotRebound::Impossible("it went away".to_owned()))
    }

    /// Swaps the stale mount for a bind of the current target. `false`: the target went away meanwhile, look again.
    fn swap(&self, remedy: &Remedy) -> Result<bool, NotRebound> {
        let Some(target) = self.open_current(&remedy.sub_path, remedy)?.file else { return Ok(false) };
        fault::reach(FaultPoint::TargetOpened);
        match self.attach(&target) {
            Ok(()) => fault::reach(FaultPoint::AfterAttach),
            Err(SwapError::TargetGone) => return Ok(false),
            Err(SwapError::NotPossible { .. }) if self.tuck(&target)? => {}
            Err(SwapError::NotPossible { .. }) => return Ok(false),
            Err(error @ SwapError::Failed { .. }) => return Err(swap_failed(error)),
        }
        detach(self.stale()?).map_err(swap_failed)?;
        fault::reach(FaultPoint::Detached);
        Ok(true)
    }

    /// Makes the directory that the sub path names; the next round binds it.
    fn remake(&self, remedy: &Remedy) -> Result<(), NotRebound> {
        if self.held.attributes_to_keep().is_some() {
            let why =
                "the mount that it was bound from is gone, or was changed: a directory is not made through another one";
            return Err(NotRebound::Impossible(why.to_owned()));
        }
        make_directories(self.directory()?, &remedy.sub_path.path).map_err(not_rebound)
    }

    fn attach(&self, target: &Handle) -> Result<(), SwapError> {
        match self.held.handle() {
            Some(stale) if !fault::denies_beneath() => attach_beneath(target, stale, self.held.attributes_to_keep()),
            _ => Err(SwapError::not_possible("mounting beneath the stale mount")),
        }
    }

    fn open_current(&self, sub_path: &SubPath, remedy: &Remedy) -> Result<OpenedTarget, NotRebound> {
        open_target(self.directory()?, &sub_path.path, remedy.layout).map_err(not_rebound)
    }

    fn directory(&self) -> Result<&Handle, NotRebound> {
        self.held.volume().ok_or_else(|| NotRebound::Impossible("its volume went away".to_owned()))
    }

    /// Attaches below the stale mount through propagation, and makes sure that it arrived there. `false`: the target went
    /// away meanwhile.
    fn tuck(&self, target: &Handle) -> Result<bool, NotRebound> {
        let before = self.mount_of_stale()?;
        if before.parent.is_none_or(|parent| parent.propagation.peer_group.is_none()) {
            return Err(NotRebound::Impossible(
                "its parent mount is private, and this kernel cannot mount beneath it".to_owned(),
            ));
        }
        let path = self.subpath.path();
        let folder = path.parent().map(Handle::of).transpose().map_err(not_rebound)?;
        let folder = folder.ok_or_else(|| NotRebound::Impossible("it has no folder".to_owned()))?;
        match attach_tucked(target, &folder, &path, self.held.attributes_to_keep()) {
            Ok(()) => fault::reach(FaultPoint::AfterAttach),
            Err(SwapError::TargetGone) => return Ok(false),
            Err(error) => return Err(swap_failed(error)),
        }
        if self.mount_of_stale()?.covers_its_equal() {
            Ok(true)
        } else {
            Err(NotRebound::Impossible("the new mount did not arrive below the stale one".to_owned()))
        }
    }

    fn mount_of_stale(&self) -> Result<MountOf, NotRebound> {
        Mounts::default().mount_of(self.stale()?).map_err(NotRebound::Impossible)
    }
}

/// Finishes the removal of payloads that a swap may have got in the way of.
fn remove_stranded(subpath: &VolumeSubpath, left_behind: &BTreeSet<String>) {
    if left_behind.is_empty() {
        return;
    }
    let held = HeldSubpath::hold(subpath.clone());
    let Some(volume) = held.volume_of_kubelet() else { return };
    for payload in left_behind.iter().filter_map(|name| TimestampDirectory::from_name(name.as_ref())) {
        // What stays costs a little disk and is told apart by the judge; the container does not wait for it.
        let _ = stranded::remove_payload(volume, &payload);
    }
}

fn not_rebound(error: impl std::error::Error) -> NotRebound {
    NotRebound::Impossible(in_full(error))
}

fn swap_failed(error: SwapError) -> NotRebound {
    NotRebound::Impossible(error.in_full())
}
