//! Refreshes the mounts of a running container that show a replaced file.
//!
//! ```text
//!    open the mount namespace once, compare its owner with the spec ─ another one? ─► refused
//! ┌► read the mount table, find stale mounts ─ none? ─► done
//! │    open each current file on the host, clone its mount
//! │    enter: open every mount point ─ read the mount table again: are they still the same mounts?
//! │    attach every new mount, then detach every stale one ──┐
//! └──────────────────────────────────────────────────────────┘   until nothing is stale
//! ```
//!
//! Files of a volume change together as nearly as possible: every new mount is attached before the
//! first stale mount is detached. Each round judges anew, so an update meanwhile, another refresh,
//! and a refresh that was killed half way are only states to continue from.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::evidence::FileKind;
use bindguard_core::judge::Verdict;
use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{KeptMounts, Refused, RefusedReason, SubpathInContainer};
use bindguard_core::refresh_request::{Notify, NotifySignal};
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{
    ContainerNamespace, Entered, HeldProcess, HelperProcess, MAX_REPLACEMENTS, MountsLock,
    Replacement, complete_tree,
};
use bindguard_sys::replace::{CloneError, NewMount, clone_like};
use bindguard_sys::require_calls;
use rustix::process::Signal;

use super::current_files::CurrentFiles;
use super::outcome::{AttachMethod, NotNotified, NotReplaced, RefreshError, Refreshed};
use super::records::TuckRecords;
use super::round::{Round, is_on_shared};
use crate::rebind::{Ended, REPLACE_TIMEOUT, repeat};
use crate::refresh::outcome::{into_report, not_replaced, stale_unless};
use crate::refresh::round::{ContainerRefresh, MountProgress, STEP_TIMEOUT};
use crate::refresh::running::refuse_sandbox;

/// Limit of mounts of a file in a container. The runtime makes a mount for each bind; a container
/// may bind the file thousands of times.
pub const MAX_MOUNTS_OF_FILE: usize = 16;

/// Time limit to find the program that gets a signal. A container may have any number of processes.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two tries to get the lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// The extent of a refresh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RefreshAct {
    /// Report stale mounts.
    Look,
    /// Replace them, then notify the application.
    Replace(Notify),
}

/// The mounts of a process that show these files and are stale, for a survey. Nothing is entered.
///
/// # Errors
/// If the process ended, its mount table cannot be read, or it is no process of a container.
pub fn find_stale(
    process: &HeldProcess,
    volumes: &dyn CurrentFiles,
) -> Result<Refreshed, RefreshError> {
    refuse_sandbox(process, &process.mount_namespace()?)?;
    let table = process.mounts()?;
    let (subpaths, overlooked) = limited(volumes.shown_in(&table), |_| false);
    let due: Vec<_> = subpaths.iter().filter(|subpath| subpath.is_due()).collect();
    let obstacles = obstacles(volumes, &due, &table).into_iter();
    let progress = obstacles.map(|(subpath, why)| {
        let place = subpath.mount.mount_point.clone();
        (place, MountProgress::of_failure(why))
    });
    let progress = progress.collect();
    let missing = volumes.missing_in(&table);
    let report = into_report(subpaths, progress, &missing, stale_unless);
    Ok(Refreshed {
        overlooked,
        ..report
    })
}

/// As [`refresh_container_within`], with the longest time.
///
/// # Errors
/// As there.
pub fn refresh_container(
    helper: &HelperProcess,
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    volumes: &dyn CurrentFiles,
    act: RefreshAct,
    records: &TuckRecords,
) -> Result<Refreshed, RefreshError> {
    refresh_container_within(
        helper,
        REPLACE_TIMEOUT,
        process,
        spec,
        volumes,
        act,
        records,
    )
}

/// Refreshes the mounts of these files in the container with this init process. `spec` is the
/// runtime's record of the container, `None` if unknown. `records` are the records of interrupted
/// refreshes.
///
/// # Errors
/// If the process ended, is no process of a container, or left the mount namespace that its runtime
/// made.
pub fn refresh_container_within(
    helper: &HelperProcess,
    time: Duration,
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    volumes: &dyn CurrentFiles,
    act: RefreshAct,
    records: &TuckRecords,
) -> Result<Refreshed, RefreshError> {
    if act != RefreshAct::Look {
        require_calls()?;
    }
    let namespace = process.mount_namespace()?;
    refuse_sandbox(process, &namespace)?;
    let spec = spec.ok_or(RefreshError::NoSpec)?;
    let namespace = namespace.accepted(process, spec.namespace())?;
    let mut refresh =
        ContainerRefresh::new(helper, process, &namespace, spec, volumes, records, time);
    let until = refresh.until;
    refresh.notify = match act {
        RefreshAct::Look => {
            let subpaths = refresh.find()?;
            refresh.look_for_obstacles(&subpaths);
            return Ok(refresh.into_report(subpaths, stale_unless));
        }
        RefreshAct::Replace(notify) => notify,
    };
    // Two refreshes at once could each attach a mount, and detach the newer mount first. The lock
    // comes before the mount table: a busy kernel needs longer to print a table than for all
    // remaining steps.
    let mut lock = namespace.try_lock()?;
    let mut subpaths = refresh.find()?;
    if refresh.due(&subpaths).is_empty() && !records.has(process) {
        return Ok(refresh.into_report(subpaths, not_replaced));
    }
    if lock.is_none() {
        lock = Some(wait_for_lock(&namespace, until)?);
        subpaths = refresh.find()?;
    }
    let ended = repeat(until, || {
        // A killed tuck leaves mounts shared, and shared mounts are refused. The end of this
        // refresh repeats a restore that fails here.
        if refresh.restore_propagation(false).unwrap_or(false) {
            subpaths = refresh.find()?;
        }
        let due = refresh.due(&subpaths);
        if due.is_empty() || refresh.abandoned.is_some() {
            return Ok::<_, RefreshError>(ControlFlow::Break(()));
        }
        refresh.replace(&due)?;
        subpaths = refresh.find()?;
        Ok(ControlFlow::Continue(()))
    });
    let is_out_of_time = Instant::now() >= until;
    match ended {
        Ok(Ended::Unfinished { rounds }) if is_out_of_time => {
            refresh.fail_late(&subpaths, rounds, time);
        }
        Ok(_) => {}
        Err(error) => refresh.interrupt(&mut subpaths, error)?,
    }
    if refresh.abandoned.is_none()
        && let Err(error) = refresh.restore_propagation(true)
    {
        refresh.note_left_shared(error)?;
    }
    refresh.settle_unanswered(&subpaths);
    refresh.note_attached(&subpaths);
    drop(lock);
    refresh.signal();
    let is_out_of_time = is_out_of_time && !refresh.due(&subpaths).is_empty();
    Ok(Refreshed {
        is_out_of_time,
        ..refresh.into_report(subpaths, not_replaced)
    })
}

/// Waits for the lock for at most [`STEP_TIMEOUT`].
pub(super) fn wait_for_lock(
    namespace: &ContainerNamespace,
    until: Instant,
) -> Result<MountsLock<'_>, RefreshError> {
    let start = Instant::now();
    let patience = STEP_TIMEOUT.min(until.saturating_duration_since(start));
    loop {
        if let Some(lock) = namespace.try_lock()? {
            return Ok(lock);
        }
        if start.elapsed() > patience {
            return Err(RefreshError::Locked(patience));
        }
        thread::sleep(LOCK_INTERVAL);
    }
}

/// The mounts to replace, the mounts below each, and the new mounts.
type Prepared<'s> = (
    Vec<&'s SubpathInContainer>,
    Vec<Option<KeptMounts>>,
    Vec<Replacement<'s>>,
);

impl ContainerRefresh<'_> {
    /// Notes the end of the time for the mounts that are still due. A mount without a failure in
    /// these rounds changes all the time.
    fn fail_late(&mut self, subpaths: &[SubpathInContainer], rounds: u32, time: Duration) {
        if self.abandoned.is_some() {
            return;
        }
        for subpath in self.due(subpaths) {
            let progress = self.progress.get(&subpath.mount.mount_point);
            let is_restless = rounds > 0 && progress.is_none_or(|it| it.failure.is_none());
            if !is_restless {
                self.fail(subpath, NotReplaced::OutOfTime(time));
            }
        }
    }

    /// Goes on to the report after an error. The mount table is read again; if that
    /// fails as well, the replaced mounts count as current.
    ///
    /// # Errors
    /// The error, if no mount was changed.
    fn interrupt(
        &mut self,
        subpaths: &mut Vec<SubpathInContainer>,
        error: RefreshError,
    ) -> Result<(), RefreshError> {
        let is_changed = |it: &MountProgress| it.replaced.is_some() || it.unanswered.is_some();
        if self.abandoned.is_none() && !self.progress.values().any(is_changed) {
            return Err(error);
        }
        if let Ok(now) = self.find() {
            *subpaths = now;
        } else {
            // The table has the ids of the old mounts.
            self.table = MountTable::default();
            for subpath in &mut *subpaths {
                let progress = self.progress.get(&subpath.mount.mount_point);
                if progress.is_some_and(|it| it.replaced.is_some()) {
                    subpath.verdict = Verdict::Current;
                    subpath.covers_its_equal = false;
                }
            }
        }
        let error = Arc::new(error);
        for subpath in self.due(subpaths) {
            self.fail(subpath, NotReplaced::Interrupted(Arc::clone(&error)));
        }
        Ok(())
    }

    /// Notes at each replaced mount that propagation was not restored. The record of the former
    /// propagation stays.
    ///
    /// # Errors
    /// The error, if no mount was replaced.
    fn note_left_shared(&mut self, error: RefreshError) -> Result<(), RefreshError> {
        let is_replaced = |it: &&mut MountProgress| it.replaced.is_some();
        let mut replaced = self.progress.values_mut().filter(is_replaced).peekable();
        if replaced.peek().is_none() {
            return Err(error);
        }
        let error = Arc::new(error);
        for progress in replaced {
            progress.failure = Some(NotReplaced::Interrupted(Arc::clone(&error)));
        }
        Ok(())
    }

    /// The table decides about a detach that gave no answer: the call may wait for a dead server
    /// after it has detached the old mount.
    fn settle_unanswered(&mut self, subpaths: &[SubpathInContainer]) {
        for subpath in subpaths.iter().filter(|subpath| subpath.is_current()) {
            let Some(progress) = self.progress.get_mut(&subpath.mount.mount_point) else {
                continue;
            };
            let Some(method) = progress.unanswered.take() else {
                continue;
            };
            let failure = progress.failure.take();
            progress.replace(method);
            if method == AttachMethod::Beneath && is_on_shared(subpath) {
                // No child has set the propagation of the new mount.
                progress.failure = failure;
            } else if let Some(NotReplaced::Enter(error)) = failure
                && self.notify == Notify::Touch
            {
                self.not_notified = Some(error.into());
            }
        }
    }

    /// Reports the new mounts to the kinds of files, which record the mounts below.
    fn note_attached(&self, subpaths: &[SubpathInContainer]) {
        let is_new = |subpath: &&SubpathInContainer| {
            let progress = self.progress.get(&subpath.mount.mount_point);
            subpath.is_current() && progress.is_some_and(|it| it.replaced.is_some())
        };
        for subpath in subpaths.iter().filter(is_new) {
            self.volumes.note_attached(subpath, &self.table);
        }
    }

    /// Sends a single signal for an update, after all files are new.
    fn signal(&mut self) {
        if self.progress.values().all(|it| it.replaced.is_none()) {
            return;
        }
        let sent = match &self.notify {
            Notify::None | Notify::Touch => return,
            Notify::Signal(signal) => self.process.signal(number_of(*signal)),
            Notify::SignalProgram(signal, program) => {
                let found = self
                    .process
                    .running(program, Instant::now() + SIGNAL_TIMEOUT);
                found.and_then(|found| found.signal(number_of(*signal)))
            }
        };
        self.not_notified = sent.err().map(NotNotified::from);
    }

    fn find(&mut self) -> Result<Vec<SubpathInContainer>, RefreshError> {
        let table = self.namespace.mounts()?;
        self.missing = self.volumes.missing_in(&table);
        let (subpaths, overlooked) = limited(self.volumes.shown_in(&table), |place| {
            self.spec.has_mount_at(place)
        });
        self.overlooked = overlooked;
        self.table = table;
        Ok(subpaths)
    }

    /// Records the stale mounts that no refresh can help.
    fn look_for_obstacles(&mut self, subpaths: &[SubpathInContainer]) {
        let due = self.due(subpaths);
        for (subpath, why) in obstacles(self.volumes, &due, &self.table) {
            self.fail(subpath, why);
        }
    }

    /// The stale mounts that a further round may replace.
    fn due<'s>(&self, subpaths: &'s [SubpathInContainer]) -> Vec<&'s SubpathInContainer> {
        let is_due = |subpath: &&SubpathInContainer| {
            let progress = self.progress.get(&subpath.mount.mount_point);
            subpath.is_due() && progress.is_none_or(MountProgress::may_try_again)
        };
        subpaths
            .iter()
            .filter(is_due)
            .take(MAX_REPLACEMENTS)
            .collect()
    }

    fn replace(&mut self, due: &[&SubpathInContainer]) -> Result<(), RefreshError> {
        let (subpaths, below, replacements) = self.prepared(due);
        if subpaths.is_empty() {
            return Ok(());
        }
        let entered = match Entered::enter(
            self.helper,
            self.namespace,
            replacements,
            STEP_TIMEOUT,
            self.until,
        ) {
            Ok(entered) => entered,
            Err(error) => {
                let error = Arc::new(error);
                let why = || NotReplaced::NotEntered(Arc::clone(&error));
                subpaths
                    .iter()
                    .for_each(|subpath| self.fail(subpath, why()));
                return Ok(());
            }
        };
        let mut round = Round {
            refresh: self,
            subpaths: &subpaths,
            below: &below,
            entered: &entered,
        };
        let is_silent = round.run()?;
        if is_silent {
            self.abandoned = Some(entered.abandon());
        }
        Ok(())
    }

    /// Prepares a new mount for each due subpath, except for subpaths whose key is gone.
    /// Directories come first: the old directories are empty.
    fn prepared<'s>(&mut self, due: &[&'s SubpathInContainer]) -> Prepared<'s> {
        let mut prepared = Vec::new();
        self.volumes.probe_sources(due);
        for subpath in due {
            let below = match self.volumes.mounts_below(subpath, &self.table) {
                Ok(below) => below,
                Err(why) => {
                    self.fail(subpath, why);
                    continue;
                }
            };
            let new = match subpath.covers_its_equal {
                true => None,
                false => match self.new_mount(subpath, below.as_ref()) {
                    Ok(Some(new)) => Some(new),
                    // The volume changed: judge again.
                    Ok(None) => continue,
                    Err(why) => {
                        self.fail(subpath, why);
                        continue;
                    }
                },
            };
            let (new, kind) = new.unzip();
            let is_directory = kind == Some(FileKind::Directory);
            let replacement = Replacement {
                stale: &subpath.mount,
                parent: subpath.parent.as_ref(),
                new,
            };
            prepared.push((is_directory, *subpath, below, replacement));
        }
        prepared.sort_by_key(|(is_directory, ..)| !is_directory);
        let mut sorted = Prepared::default();
        for (_, subpath, below, replacement) in prepared {
            sorted.0.push(subpath);
            sorted.1.push(below);
            sorted.2.push(replacement);
        }
        sorted
    }

    /// A mount of the current file, and its kind; `None` if the volume changed meanwhile.
    fn new_mount(
        &self,
        subpath: &SubpathInContainer,
        below: Option<&KeptMounts>,
    ) -> Result<Option<(NewMount, FileKind)>, NotReplaced> {
        refuse_peer_of_host(subpath)?;
        let file = self.volumes.open_current(subpath)?;
        self.refuse_unreadable(&file)?;
        let users = self.users_of(&subpath.mount)?;
        let kind = file
            .identity()
            .map_or(FileKind::File, |identity| identity.kind);
        let settings = self.volumes.clone_settings(subpath);
        let top = match clone_like(&file, &subpath.mount, users, settings) {
            Ok(top) => top,
            Err(CloneError::TargetGone) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let parts = match below {
            Some(below) => self.tree_parts(subpath, below)?,
            None => Vec::new(),
        };
        let new = complete_tree(
            self.helper,
            self.namespace,
            top,
            &parts,
            STEP_TIMEOUT,
            self.until,
        )?;
        self.volumes.note_replacement(subpath, &file, &new)?;
        Ok(Some((new, kind)))
    }
}

/// A limited number of mounts of each file, and the number of left-out mounts. The binds of the
/// spec come first, then current mounts, so that the limit keeps the mounts that an earlier round
/// replaced.
fn limited(
    mut subpaths: Vec<SubpathInContainer>,
    is_of_spec: impl Fn(&Path) -> bool,
) -> (Vec<SubpathInContainer>, usize) {
    subpaths.sort_by_key(|subpath| {
        (
            !is_of_spec(&subpath.mount.mount_point),
            !subpath.is_current(),
        )
    });
    let mut of_file: BTreeMap<(PathBuf, PathBuf), usize> = BTreeMap::new();
    let all = subpaths.len();
    subpaths.retain(|subpath| {
        let count = of_file
            .entry((subpath.volume.clone(), subpath.sub_path.clone()))
            .or_default();
        *count += 1;
        *count <= MAX_MOUNTS_OF_FILE
    });
    let overlooked = all - subpaths.len();
    (subpaths, overlooked)
}

/// The stale mounts that no refresh can help: the volume no longer has the file, or a rule keeps the
/// mount. The sources are probed together.
fn obstacles<'s>(
    volumes: &dyn CurrentFiles,
    due: &[&'s SubpathInContainer],
    table: &MountTable,
) -> Vec<(&'s SubpathInContainer, NotReplaced)> {
    volumes.probe_sources(due);
    let obstacle = |subpath: &&'s SubpathInContainer| {
        let opened = refuse_peer_of_host(subpath).and_then(|()| volumes.open_current(subpath));
        let why = match opened {
            Ok(_) => volumes.mounts_below(subpath, table).err()?,
            Err(why) => why,
        };
        why.is_refusal().then_some((*subpath, why))
    };
    due.iter().filter_map(obstacle).collect()
}

/// Refuses a place below a peer of a mount of the host: a new mount would arrive on the host as well.
fn refuse_peer_of_host(subpath: &SubpathInContainer) -> Result<(), NotReplaced> {
    let parent = subpath.parent.as_ref();
    let Some(group) = parent.and_then(|parent| parent.propagation.peer_group) else {
        return Ok(());
    };
    let host = bindguard_sys::read_mount_table().map_err(NotReplaced::HostMounts)?;
    let mut mounts = host.entries().iter();
    match mounts.any(|mount| mount.propagation.peer_group == Some(group)) {
        true => {
            let place = &subpath.mount.mount_point;
            Err(Refused::new(RefusedReason::ParentIsShared, place).into())
        }
        false => Ok(()),
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
