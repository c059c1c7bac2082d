//! Refreshes the volume mounts of one running container.
//!
//! ```text
//! ┌► read the mount table, find stale mounts ─ none? ─► done
//! │    open each current file on the host, clone its mount
//! │    enter: open every mount point ─ read the mount table again: are they still the same mounts?
//! │    attach every new mount, then detach every stale one ──┐
//! └──────────────────────────────────────────────────────────┘   until nothing is stale
//! ```
//!
//! Files of one volume change together as nearly as possible: every new mount is attached before the first stale one is
//! detached. Each round judges anew, so an update meanwhile, another refresh, and one that was killed half way are only
//! states to continue from.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{State, SubpathInContainer, subpaths_in_container};
use bindguard_sys::enter::{
    AT_A_TIME, Abandoned, CloneError, EnterError, Entered, HeldProcess, Replacement, clone_like,
};
use bindguard_sys::fault;

use super::outcome::{MountRefresh, NotReplaced, RefreshError, RefreshOutcome, Refreshed, Way};
use super::volumes::PodVolumes;

/// Limit of rounds. A volume that is updated without a pause needed 12 for a re-bind on the host.
const ROUNDS: u32 = 64;

/// Limit of rounds in which one mount could not be replaced, other than by an update of its volume.
const FAILURES: u32 = 3;

/// Time limit of one step in the container.
const PATIENCE: Duration = Duration::from_secs(1);

/// The extent of a refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefreshAct {
    /// Report stale mounts.
    Look,
    /// Replace them.
    Replace,
}

/// Refreshes the container with this init process, as far as it shows these volumes.
///
/// # Errors
/// If the process ended, or its mount table cannot be read.
pub fn refresh_container(
    process: &HeldProcess,
    volumes: &PodVolumes,
    act: RefreshAct,
) -> Result<Refreshed, RefreshError> {
    let mut refresh = Refresh { process, volumes, ways: BTreeMap::new(), failures: BTreeMap::new(), abandoned: None };
    let mut subpaths = refresh.find()?;
    if act == RefreshAct::Look {
        return Ok(refresh.into_report(subpaths, |_| RefreshOutcome::Stale));
    }
    for _ in 0..ROUNDS {
        let due = refresh.due(&subpaths);
        if due.is_empty() || refresh.abandoned.is_some() {
            break;
        }
        refresh.replace(&due)?;
        subpaths = refresh.find()?;
    }
    Ok(refresh
        .into_report(subpaths, |failure| RefreshOutcome::NotReplaced(failure.unwrap_or(NotReplaced::Restless(ROUNDS)))))
}

struct Refresh<'a> {
    process: &'a HeldProcess,
    volumes: &'a PodVolumes,
    /// The way of each mount point that was replaced.
    ways: BTreeMap<PathBuf, Way>,
    /// The failures at each mount point, and the last reason.
    failures: BTreeMap<PathBuf, (u32, Failure)>,
    abandoned: Option<Abandoned>,
}

/// The reason for which a mount is not replaced in this round.
#[derive(Debug)]
enum Failure {
    KeyGone,
    NotReplaced(NotReplaced),
}

impl<'a> Refresh<'a> {
    fn find(&self) -> Result<Vec<SubpathInContainer>, RefreshError> {
        Ok(subpaths_in_container(&self.process.mounts()?, &self.volumes.observe()))
    }

    /// The stale mounts that are worth another round.
    fn due<'s>(&self, subpaths: &'s [SubpathInContainer]) -> Vec<&'s SubpathInContainer> {
        let is_due = |subpath: &&SubpathInContainer| {
            let is_stale = match subpath.state {
                State::Stale | State::Covering(_) => true,
                State::Current | State::Hidden => false,
            };
            let failed = self.failures.get(&subpath.mount.mount_point);
            is_stale && failed.is_none_or(|(times, why)| *times < FAILURES && !matches!(why, Failure::KeyGone))
        };
        subpaths.iter().filter(is_due).take(AT_A_TIME).collect()
    }

    fn replace(&mut self, due: &[&SubpathInContainer]) -> Result<(), RefreshError> {
        let (subpaths, replacements) = self.prepared(due);
        if subpaths.is_empty() {
            return Ok(());
        }
        let entered = match Entered::enter(self.process, replacements, PATIENCE) {
            Ok(entered) => entered,
            Err(error) => {
                let error = Arc::new(error);
                let why = || Failure::NotReplaced(NotReplaced::NotEntered(Arc::clone(&error)));
                subpaths.iter().for_each(|subpath| self.fail(subpath, why()));
                return Ok(());
            }
        };
        let mut round = Round { refresh: self, subpaths: &subpaths, entered: &entered };
        let is_silent = round.run()?;
        if is_silent {
            self.abandoned = Some(entered.abandon());
        }
        Ok(())
    }

    /// A new mount for each of these, but for those whose key is gone.
    fn prepared<'s>(&mut self, due: &[&'s SubpathInContainer]) -> (Vec<&'s SubpathInContainer>, Vec<Replacement<'s>>) {
        let mut prepared = (Vec::new(), Vec::new());
        for subpath in due {
            let new = match subpath.state {
                State::Covering(_) => None,
                State::Stale | State::Current | State::Hidden => match self.new_mount(subpath) {
                    Ok(Some(new)) => Some(new),
                    // The volume changed: judge again.
                    Ok(None) => continue,
                    Err(why) => {
                        self.fail(subpath, why);
                        continue;
                    }
                },
            };
            prepared.0.push(*subpath);
            prepared.1.push(Replacement { stale: &subpath.mount, parent: subpath.parent.as_ref(), new });
        }
        prepared
    }

    /// A mount of the current file; `None` if the volume changed meanwhile.
    fn new_mount(&self, subpath: &SubpathInContainer) -> Result<Option<OwnedFd>, Failure> {
        let opened = self.volumes.open_current(&subpath.volume, &subpath.sub_path);
        let opened = opened.ok_or(Failure::KeyGone)?.map_err(|error| Failure::NotReplaced(error.into()))?;
        let file = opened.file.ok_or(Failure::KeyGone)?;
        match clone_like(&file, &subpath.mount, self.process) {
            Ok(new) => Ok(Some(new)),
            Err(CloneError::TargetGone) => Ok(None),
            Err(error) => Err(Failure::NotReplaced(error.into())),
        }
    }

    fn fail(&mut self, subpath: &SubpathInContainer, why: Failure) {
        let place = subpath.mount.mount_point.clone();
        let times = self.failures.get(&place).map_or(0, |(times, _)| *times);
        self.failures.insert(place, (times + 1, why));
    }

    /// One line for each mount that was stale: its way if it is current now.
    fn into_report(
        mut self,
        subpaths: Vec<SubpathInContainer>,
        otherwise: impl Fn(Option<NotReplaced>) -> RefreshOutcome,
    ) -> Refreshed {
        let count = subpaths.len();
        let mounts = subpaths.into_iter().filter_map(|subpath| {
            let place = &subpath.mount.mount_point;
            let outcome = match subpath.state {
                State::Current => RefreshOutcome::Replaced(*self.ways.get(place)?),
                State::Hidden => RefreshOutcome::Hidden,
                State::Stale | State::Covering(_) => match self.failures.remove(place) {
                    Some((_, Failure::KeyGone)) => RefreshOutcome::KeyGone,
                    Some((_, Failure::NotReplaced(why))) => otherwise(Some(why)),
                    None => otherwise(None),
                },
            };
            let SubpathInContainer { mount, volume, sub_path, .. } = subpath;
            Some(MountRefresh { destination: mount.mount_point, volume, sub_path, outcome })
        });
        Refreshed { mounts: mounts.collect(), subpaths: count, abandoned: self.abandoned }
    }
}

/// One visit of a child to the container.
struct Round<'r, 'a, 's> {
    refresh: &'r mut Refresh<'a>,
    subpaths: &'r [&'s SubpathInContainer],
    entered: &'r Entered,
}

impl Round<'_, '_, '_> {
    /// Returns true if the child gave no answer.
    fn run(&mut self) -> Result<bool, RefreshError> {
        let mut open = Vec::new();
        for index in 0..self.subpaths.len() {
            match self.entered.open(index) {
                Ok(()) => open.push(index),
                Err(error) => {
                    let is_over = is_over(&error);
                    self.fail(index, error.into());
                    if is_over {
                        return Ok(true);
                    }
                }
            }
        }
        // The mounts are open by now and keep their ids: what the table says of an id is said of the open mount.
        let table = self.refresh.process.mounts()?;
        let (same, other): (Vec<usize>, Vec<usize>) =
            open.into_iter().partition(|index| is_same_mount(self.subpaths[*index], &table));
        other.into_iter().for_each(|index| self.fail(index, NotReplaced::Changed));
        let attached = self.attach(&same)?;
        attached.into_iter().for_each(|(index, way)| self.detach(index, way));
        Ok(false)
    }

    /// Attaches every new mount. Those of a volume that changed meanwhile are left to the next round.
    fn attach(&mut self, indices: &[usize]) -> Result<Vec<(usize, Way)>, RefreshError> {
        let mut attached = Vec::new();
        for index in indices.iter().copied() {
            let way = match self.subpaths[index].state {
                State::Covering(_) => Ok(Way::Finished),
                State::Stale | State::Current | State::Hidden => self.attach_one(index),
            };
            match way {
                Ok(way) => attached.push((index, way)),
                Err(error) if error.is_target_gone() => {}
                Err(error) => self.fail(index, error.into()),
            }
        }
        if attached.iter().any(|(_, way)| *way == Way::Tucked) {
            let table = self.refresh.process.mounts()?;
            let arrived = |subpath: &SubpathInContainer| {
                let stale = table.mount(subpath.mount.id);
                let parent = stale.and_then(|stale| table.mount(stale.parent));
                // A stale mount that is gone was detached by the kernel: the file beneath was removed.
                stale.is_none() || parent.is_some_and(|parent| parent.mount_point == subpath.mount.mount_point)
            };
            let lost = attached.extract_if(.., |(index, way)| *way == Way::Tucked && !arrived(self.subpaths[*index]));
            let lost: Vec<usize> = lost.map(|(index, _)| index).collect();
            lost.into_iter().for_each(|index| self.fail(index, NotReplaced::DidNotArrive));
        }
        Ok(attached)
    }

    /// The kernel's own way first; which kernels have it is found by trying.
    fn attach_one(&self, index: usize) -> Result<Way, EnterError> {
        let tucked = || self.entered.tuck(index).map(|()| Way::Tucked);
        if fault::denies_beneath() {
            return tucked();
        }
        match self.entered.attach_beneath(index) {
            Ok(()) => Ok(Way::Beneath),
            Err(error) if error.is_not_possible() => tucked(),
            Err(error) => Err(error),
        }
    }

    fn detach(&mut self, index: usize, way: Way) {
        // What is attached to a shared mount becomes shared.
        let on_shared = self.subpaths[index].parent.as_ref().is_some_and(|it| it.propagation.peer_group.is_some());
        let done = self.entered.detach(index).and_then(|()| match way {
            Way::Beneath if !on_shared => Ok(()),
            Way::Finished => Ok(()),
            Way::Beneath | Way::Tucked => self.entered.set_propagation(index),
        });
        match done {
            Ok(()) => drop(self.refresh.ways.insert(self.subpaths[index].mount.mount_point.clone(), way)),
            Err(error) => self.fail(index, error.into()),
        }
    }

    fn fail(&mut self, index: usize, why: NotReplaced) {
        self.refresh.fail(self.subpaths[index], Failure::NotReplaced(why));
    }
}

/// True if the child serves no further request.
fn is_over(error: &EnterError) -> bool {
    matches!(error, EnterError::Silent(_) | EnterError::Ended)
}

/// True if the mount of this id still shows the same part of the same volume at the same place.
fn is_same_mount(subpath: &SubpathInContainer, table: &MountTable) -> bool {
    table.mount(subpath.mount.id).is_some_and(|now| {
        let (was, now) = (&subpath.mount, now);
        was.device == now.device && was.root.path == now.root.path && was.mount_point == now.mount_point
    })
}
