//! Refreshes the mounts of one running container that show a replaced file.
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
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::evidence::FileKind;
use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{SpecBind, SubpathInContainer, SubpathState};
use bindguard_core::refresh_request::{Notify, NotifySignal};
use bindguard_sys::enter::{
    AT_A_TIME, Abandoned, CloneError, Entered, HeldProcess, MountsLock, NewMount, Replacement, clone_like,
};
use rustix::process::Signal;

use super::current_files::CurrentFiles;
use super::outcome::{AttachMethod, MountRefresh, NotNotified, NotReplaced, RefreshError, RefreshOutcome, Refreshed};
use super::records::TuckRecords;
use super::round::Round;
use super::sandbox::refuse_sandbox;

/// Limit of rounds. A volume that is updated without a pause needed 12 for a re-bind on the host.
const ROUNDS: u32 = 64;

/// Limit of rounds in which one mount could not be replaced, other than by an update of its volume.
const FAILURES: u32 = 3;

/// The pause between two tries to get the lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Time limit of one step in the container.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// The extent of a refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefreshAct {
    /// Report stale mounts.
    Look,
    /// Replace them, then notify the application.
    Replace(Notify),
}

/// Refreshes the container with this init process, as far as it shows these files. `records` are those of interrupted refreshes.
///
/// # Errors
/// If the process ended, its mount table cannot be read, or it is no process of a container.
pub fn refresh_container(
    process: &HeldProcess,
    volumes: &dyn CurrentFiles,
    act: RefreshAct,
    records: &TuckRecords,
) -> Result<Refreshed, RefreshError> {
    refuse_sandbox(process)?;
    let mut refresh = ContainerRefresh::new(process, volumes, records);
    refresh.notify = match act {
        RefreshAct::Look => {
            let subpaths = refresh.find()?;
            refresh.look_for_keys(&subpaths);
            return Ok(refresh.into_report(subpaths, |_| RefreshOutcome::Stale));
        }
        RefreshAct::Replace(notify) => notify,
    };
    // Two refreshes at once could each attach a mount, and detach the newer one first. The lock comes before the mount table: a busy
    // kernel needs longer to print a table than for all other steps.
    let mut lock = process.try_lock_mounts()?;
    let mut subpaths = refresh.find()?;
    if refresh.due(&subpaths).is_empty() && !records.has(process) {
        return Ok(refresh.into_report(subpaths, not_replaced));
    }
    if lock.is_none() {
        lock = Some(wait_for_lock(process)?);
        subpaths = refresh.find()?;
    }
    for _ in 0..ROUNDS {
        let due = refresh.due(&subpaths);
        if due.is_empty() || refresh.abandoned.is_some() {
            break;
        }
        refresh.replace(&due)?;
        subpaths = refresh.find()?;
    }
    if refresh.abandoned.is_none() {
        refresh.restore_propagation()?;
    }
    refresh.signal();
    drop(lock);
    Ok(refresh.into_report(subpaths, not_replaced))
}

fn not_replaced(failure: Option<NotReplaced>) -> RefreshOutcome {
    RefreshOutcome::NotReplaced(failure.unwrap_or(NotReplaced::Restless(ROUNDS)))
}

/// Waits for the lock for at most [`PATIENCE`].
fn wait_for_lock(process: &HeldProcess) -> Result<MountsLock, RefreshError> {
    let start = Instant::now();
    loop {
        if let Some(lock) = process.try_lock_mounts()? {
            return Ok(lock);
        }
        if start.elapsed() > PATIENCE {
            return Err(RefreshError::Locked(PATIENCE));
        }
        thread::sleep(PAUSE);
    }
}

pub(super) struct ContainerRefresh<'a> {
    pub(super) process: &'a HeldProcess,
    volumes: &'a dyn CurrentFiles,
    pub(super) records: &'a TuckRecords,
    /// The method that replaced the mount at each mount point.
    pub(super) methods: BTreeMap<PathBuf, AttachMethod>,
    /// The failures at each mount point, and the last reason.
    failures: BTreeMap<PathBuf, (u32, Failure)>,
    pub(super) notify: Notify,
    pub(super) not_notified: Option<NotNotified>,
    pub(super) abandoned: Option<Abandoned>,
    /// The binds of the spec that are gone.
    missing: Vec<SpecBind>,
}

/// The reason for which a mount is not replaced in this round.
#[derive(Debug)]
pub(super) enum Failure {
    KeyGone,
    NotReplaced(NotReplaced),
}

impl<'a> ContainerRefresh<'a> {
    fn new(process: &'a HeldProcess, volumes: &'a dyn CurrentFiles, records: &'a TuckRecords) -> Self {
        let (methods, failures, missing) = Default::default();
        Self {
            process,
            volumes,
            records,
            methods,
            failures,
            notify: Notify::None,
            not_notified: None,
            abandoned: None,
            missing,
        }
    }

    /// One signal for one update, after all files are new.
    fn signal(&mut self) {
        if let (Notify::Signal(signal), false) = (self.notify, self.methods.is_empty()) {
            self.not_notified = self.process.signal(number_of(signal)).err().map(NotNotified::from);
        }
    }

    fn find(&mut self) -> Result<Vec<SubpathInContainer>, RefreshError> {
        let table = self.process.mounts()?;
        self.missing = self.volumes.missing_in(&table);
        Ok(self.shown_in(&table))
    }

    /// Records the stale mounts whose key is gone: no refresh can help them.
    fn look_for_keys(&mut self, subpaths: &[SubpathInContainer]) {
        for subpath in self.due(subpaths) {
            let opened = self.volumes.open_current(subpath);
            if opened.is_none_or(|opened| opened.is_ok_and(|opened| opened.file.is_none())) {
                self.fail(subpath, Failure::KeyGone);
            }
        }
    }

    pub(super) fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.volumes.shown_in(table)
    }

    /// The stale mounts that are worth another round.
    fn due<'s>(&self, subpaths: &'s [SubpathInContainer]) -> Vec<&'s SubpathInContainer> {
        let is_due = |subpath: &&SubpathInContainer| {
            let is_stale = match subpath.state {
                SubpathState::Stale | SubpathState::Covering(_) => true,
                SubpathState::Current | SubpathState::Hidden | SubpathState::Occupied => false,
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

    /// A new mount for each of these, but for those whose key is gone. Directories come first: the old ones are empty.
    fn prepared<'s>(&mut self, due: &[&'s SubpathInContainer]) -> (Vec<&'s SubpathInContainer>, Vec<Replacement<'s>>) {
        let mut prepared = Vec::new();
        for subpath in due {
            let new = match subpath.state {
                SubpathState::Covering(_) => None,
                SubpathState::Stale | SubpathState::Current | SubpathState::Hidden | SubpathState::Occupied => {
                    match self.new_mount(subpath) {
                        Ok(Some(new)) => Some(new),
                        // The volume changed: judge again.
                        Ok(None) => continue,
                        Err(why) => {
                            self.fail(subpath, why);
                            continue;
                        }
                    }
                }
            };
            let (new, kind) = new.unzip();
            let is_directory = kind == Some(FileKind::Directory);
            let replacement = Replacement { stale: &subpath.mount, parent: subpath.parent.as_ref(), new };
            prepared.push((is_directory, *subpath, replacement));
        }
        prepared.sort_by_key(|(is_directory, ..)| !is_directory);
        prepared.into_iter().map(|(_, subpath, replacement)| (subpath, replacement)).unzip()
    }

    /// A mount of the current file, and its kind; `None` if the volume changed meanwhile.
    fn new_mount(&self, subpath: &SubpathInContainer) -> Result<Option<(NewMount, FileKind)>, Failure> {
        let opened = self.volumes.open_current(subpath);
        let opened = opened.ok_or(Failure::KeyGone)?.map_err(Failure::NotReplaced)?;
        let file = opened.file.ok_or(Failure::KeyGone)?;
        let kind = file.identity().map_or(FileKind::File, |identity| identity.kind);
        match clone_like(&file, &subpath.mount, self.process) {
            Ok(new) => Ok(Some((new, kind))),
            Err(CloneError::TargetGone) => Ok(None),
            Err(error) => Err(Failure::NotReplaced(error.into())),
        }
    }

    pub(super) fn fail(&mut self, subpath: &SubpathInContainer, why: Failure) {
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
                SubpathState::Current => RefreshOutcome::Replaced(*self.methods.get(place)?),
                SubpathState::Hidden => RefreshOutcome::Hidden,
                SubpathState::Occupied => RefreshOutcome::Occupied,
                SubpathState::Stale | SubpathState::Covering(_) => match self.failures.remove(place) {
                    Some((_, Failure::KeyGone)) => RefreshOutcome::KeyGone,
                    Some((_, Failure::NotReplaced(why))) => otherwise(Some(why)),
                    None => otherwise(None),
                },
            };
            let SubpathInContainer { mount, volume, sub_path, .. } = subpath;
            Some(MountRefresh { destination: mount.mount_point, volume, sub_path, outcome })
        });
        let missing = self.missing.iter().map(MountRefresh::of_missing);
        Refreshed {
            mounts: mounts.chain(missing).collect(),
            subpaths: count,
            not_notified: self.not_notified,
            abandoned: self.abandoned,
        }
    }
}

fn number_of(signal: NotifySignal) -> Signal {
    match signal {
        NotifySignal::Hup => Signal::HUP,
        NotifySignal::Usr1 => Signal::USR1,
        NotifySignal::Usr2 => Signal::USR2,
        NotifySignal::Winch => Signal::WINCH,
    }
}
