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
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::judge::Verdict;
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::places::KindName;
use bindguard_core::refresh::{Refused, RefusedReason, SpecBind, SubpathInContainer};
use bindguard_core::refresh_request::{Notify, NotifySignal};
use bindguard_core::report::{AttachMethod, MountResult, Notification, RefreshedMount};
use bindguard_core::spec::SpecUsers;
use bindguard_core::text::join;
use bindguard_sys::enter::{Abandoned, HeldProcess, HelperProcess, MAX_REPLACEMENTS};
use bindguard_sys::require_calls;
use rustix::process::Signal;

use crate::rebind::{Ended, MAX_FAILURES, repeat};
use crate::refresh::{Container, RefreshError, TuckRecords, refuse_sandbox};
use crate::refresh::{CurrentFiles, failed, mounts_of_host};

/// Limit of mounts of a file in a container. The runtime makes a mount for each bind; a container
/// may bind the file thousands of times.
pub const MAX_MOUNTS_OF_FILE: usize = 16;

/// Time limit to find the program that gets a signal. A container may have any number of processes.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The extent of a refresh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RefreshAct {
    /// Report stale mounts.
    Look,
    /// Replace them, then notify the application.
    Replace(Notify),
}

/// The refresh of a container.
#[derive(Debug, Default)]
pub struct Refreshed {
    /// The container's stale mounts, and the binds of its spec that are gone. Current mounts are left
    /// out.
    pub mounts: Vec<RefreshedMount>,
    /// The number of its mounts that show a part of a kubelet-written volume.
    pub subpaths: usize,
    /// The number of further mounts of the same files, which are left as they are.
    pub overlooked: usize,
    /// True if the time was over before all of it was done.
    pub is_out_of_time: bool,
    /// The requested notification, if a mount was replaced or the notification failed.
    pub notification: Option<Notification>,
    /// A child that hangs in the container: no second child may enter.
    pub abandoned: Option<Abandoned>,
}

impl Refreshed {
    /// True if every stale mount was replaced.
    pub fn is_current(&self) -> bool {
        self.mounts.iter().all(|mount| mount.outcome.is_replaced())
    }

    /// The number of mounts that were replaced.
    pub fn replaced(&self) -> usize {
        self.replaced_places().count()
    }

    /// The places in the container of the mounts that were replaced.
    pub fn replaced_places(&self) -> impl Iterator<Item = &Path> {
        let mounts = self.mounts.iter();
        let replaced = mounts.filter(|mount| mount.outcome.is_replaced());
        replaced.map(|mount| Path::new(&mount.destination))
    }
}

/// The mounts of a process that show these files and are stale, for a survey. Nothing is entered.
///
/// # Errors
/// If the process ended, its mount table cannot be read, or it is no process of a container.
pub fn find_stale(
    process: &HeldProcess,
    files: &[&dyn CurrentFiles],
) -> Result<Refreshed, RefreshError> {
    refuse_sandbox(process, &process.mount_namespace()?)?;
    Ok(Look::at(process.mounts()?, files, None).report_stale(files))
}

/// Refreshes the mounts of these files in the container with this init process, for at most `time`.
/// `spec` is the runtime's record of the container, `None` if unknown. `records` are the records of
/// interrupted refreshes.
///
/// # Errors
/// If the process ended, is no process of a container, or left the mount namespace that its runtime
/// made.
pub fn refresh_container(
    helper: &HelperProcess,
    time: Duration,
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    files: &[&dyn CurrentFiles],
    act: RefreshAct,
    records: &TuckRecords,
) -> Result<Refreshed, RefreshError> {
    if act != RefreshAct::Look {
        require_calls()?;
    }
    let container = Container::open(process, spec)?;
    let until = Instant::now() + time;
    let RefreshAct::Replace(notify) = act else {
        let table = container.namespace.mounts()?;
        return Ok(Look::at(table, files, spec).report_stale(files));
    };
    let mut refresh = ContainerRefresh {
        helper,
        container: &container,
        files,
        records,
        notify,
        until,
        progress: Progress::new(),
        not_notified: None,
        abandoned: None,
    };
    // Two refreshes at once could each attach a mount, and detach the newer mount first. The lock
    // comes before the mount table: a busy kernel needs longer to print a table than for all
    // remaining steps.
    let mut lock = container.namespace.try_lock()?;
    let mut look = refresh.look()?;
    if look.due(&refresh.progress).is_empty() && !records.has(process) {
        return Ok(refresh.into_report(look));
    }
    if lock.is_none() {
        lock = Some(container.lock(until)?);
        look = refresh.look()?;
    }
    let ended = repeat(until, || {
        // A killed tuck leaves mounts shared, and shared mounts are refused. The end of this
        // refresh repeats a restore that fails here.
        if refresh.restore_propagation(false).unwrap_or(false) {
            look = refresh.look()?;
        }
        if look.due(&refresh.progress).is_empty() || refresh.abandoned.is_some() {
            return Ok::<_, RefreshError>(ControlFlow::Break(()));
        }
        refresh.replace(&look)?;
        look = refresh.look()?;
        Ok(ControlFlow::Continue(()))
    });
    let is_out_of_time = Instant::now() >= until;
    match ended {
        Ok(Ended::Unfinished { rounds }) if is_out_of_time && refresh.abandoned.is_none() => {
            for found in look.due(&refresh.progress) {
                let progress = refresh.progress.get(found.place());
                // A mount without a failure in these rounds changes all the time.
                if rounds == 0 || progress.is_some_and(|it| it.failure.is_some()) {
                    let error = format!(
                        "the refresh of the container took longer than {} ms",
                        time.as_millis()
                    );
                    refresh.fail(found, MountResult::Failed { error });
                }
            }
        }
        Ok(_) => {}
        Err(error) => refresh.interrupt(&mut look, error)?,
    }
    if refresh.abandoned.is_none()
        && let Err(error) = refresh.restore_propagation(true)
    {
        // The record of the former propagation stays.
        let replaced = refresh.progress.values_mut();
        let mut replaced = replaced.filter(|it| it.replaced.is_some()).peekable();
        if replaced.peek().is_none() {
            return Err(error);
        }
        for progress in replaced {
            progress.failure = Some(failed(&error));
        }
    }
    refresh.settle_unanswered(&look);
    for found in &look.found {
        let progress = refresh.progress.get(found.place());
        if found.shown.is_current() && progress.is_some_and(|it| it.replaced.is_some()) {
            found.files.note_attached(&found.shown, &look.table);
        }
    }
    drop(lock);
    refresh.signal();
    let is_out_of_time = is_out_of_time && !look.due(&refresh.progress).is_empty();
    Ok(Refreshed {
        is_out_of_time,
        ..refresh.into_report(look)
    })
}

/// A mount of the container that shows one of these files.
pub(super) struct Found<'a> {
    pub(super) files: &'a dyn CurrentFiles,
    pub(super) shown: SubpathInContainer,
}

impl Found<'_> {
    /// The mount point in the container.
    pub(super) fn place(&self) -> &Path {
        &self.shown.mount.mount_point
    }

    pub(super) fn refused(&self, reason: RefusedReason) -> MountResult {
        Refused::new(reason, self.place()).into()
    }

    /// True if a new mount at the same place becomes shared.
    pub(super) fn is_on_shared(&self) -> bool {
        self.shown
            .parent
            .as_ref()
            .is_some_and(MountEntry::is_shared)
    }

    /// Refuses a place below a peer of a mount of the host: a new mount would arrive on the host as
    /// well.
    pub(super) fn refuse_peer_of_host(&self) -> Result<(), MountResult> {
        let parent = self.shown.parent.as_ref();
        let Some(group) = parent.and_then(|parent| parent.propagation.peer_group) else {
            return Ok(());
        };
        let host = mounts_of_host().map_err(failed)?;
        let mut mounts = host.entries().iter();
        if mounts.any(|mount| mount.propagation.peer_group == Some(group)) {
            return Err(self.refused(RefusedReason::ParentIsShared));
        }
        Ok(())
    }
}

/// The mounts of a table that show these files, judged at this moment.
pub(super) struct Look<'a> {
    pub(super) table: MountTable,
    pub(super) found: Vec<Found<'a>>,
    overlooked: usize,
    /// The binds of the spec that are gone.
    missing: Vec<SpecBind>,
}

impl<'a> Look<'a> {
    /// A limited number of mounts of each file. The binds of the spec come first, then current
    /// mounts, so that the limit keeps the mounts that an earlier round replaced.
    fn at(table: MountTable, files: &[&'a dyn CurrentFiles], spec: Option<&SpecUsers>) -> Self {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for files in files.iter().copied() {
            let shown = files.shown_in(&table);
            missing.extend(files.missing_in(&table, &shown));
            found.extend(shown.into_iter().map(|shown| Found { files, shown }));
        }
        let all = found.len();
        found.sort_by_key(|Found { shown, .. }| {
            let place = &shown.mount.mount_point;
            let is_of_spec = spec.is_some_and(|spec| spec.has_mount_at(place));
            (!is_of_spec, !shown.is_current())
        });
        let mut of_file: BTreeMap<(PathBuf, PathBuf), usize> = BTreeMap::new();
        found.retain(|Found { shown, .. }| {
            let file = (shown.volume.clone(), shown.sub_path.clone());
            let count = of_file.entry(file).or_default();
            *count += 1;
            *count <= MAX_MOUNTS_OF_FILE
        });
        Self {
            overlooked: all - found.len(),
            table,
            found,
            missing,
        }
    }

    /// The stale mounts that a further round may replace.
    pub(super) fn due(&self, progress: &Progress) -> Vec<&Found<'a>> {
        let mut due = Vec::new();
        for found in self.found.iter().filter(|found| found.shown.is_due()) {
            let progress = progress.get(found.place());
            let may_try = progress.is_none_or(|it| {
                it.failures < MAX_FAILURES && it.failure != Some(MountResult::KeyGone)
            });
            if may_try && due.len() < MAX_REPLACEMENTS {
                due.push(found);
            }
        }
        due
    }

    /// The report of a look. The failures are those that no refresh can help: the volume no longer has
    /// the file, or a rule keeps the mount. The sources are probed together.
    fn report_stale(self, files: &[&dyn CurrentFiles]) -> Refreshed {
        let mut progress = Progress::new();
        let due = self.due(&progress);
        probe_sources(&due, files);
        for found in due {
            let opened = found
                .refuse_peer_of_host()
                .and_then(|()| found.files.open_current(&found.shown));
            let below = opened.and_then(|_| found.files.mounts_below(&found.shown, &self.table));
            if let Err(why @ (MountResult::KeyGone | MountResult::Refused(_))) = below {
                let place = found.place().to_owned();
                let progress: &mut MountProgress = progress.entry(place).or_default();
                progress.failure = Some(why);
            }
        }
        self.report(progress, &MountResult::Stale)
    }

    /// A line for each stale mount, with the attach method if the mount is current now, and a line
    /// for each missing bind. `unreplaced` is the result of a stale mount without a failure.
    fn report(self, mut progress: Progress, unreplaced: &MountResult) -> Refreshed {
        let mut report = Refreshed {
            subpaths: self.found.len(),
            overlooked: self.overlooked,
            ..Refreshed::default()
        };
        for Found { shown, .. } in self.found {
            let progress = progress.get_mut(&shown.mount.mount_point);
            let outcome = match &shown.verdict {
                _ if shown.is_due() => {
                    let failure = progress.and_then(|it| it.failure.take());
                    failure.unwrap_or_else(|| unreplaced.clone())
                }
                Verdict::Current => {
                    let Some(progress) = progress else { continue };
                    let Some(method) = progress.replaced else {
                        continue;
                    };
                    match progress.failure.take() {
                        Some(MountResult::KeyGone) | None => MountResult::Replaced { method },
                        Some(failure) => failure,
                    }
                }
                Verdict::Foreign => MountResult::Hidden,
                Verdict::Stale { .. } => MountResult::Occupied,
                Verdict::Orphaned { .. }
                | Verdict::Unmounted(_)
                | Verdict::Pinning(_)
                | Verdict::Wrong(_)
                | Verdict::Dead(_)
                | Verdict::NotProbed
                | Verdict::Unknown(_) => unreplaced.clone(),
            };
            let is_host_root = matches!(shown.verdict, Verdict::Pinning(_));
            let source = join(shown.volume, &shown.sub_path);
            report.mounts.push(RefreshedMount {
                kind: is_host_root.then_some(KindName::HostRoot),
                ..RefreshedMount::new(&shown.mount.mount_point, &source, outcome)
            });
        }
        for SpecBind {
            source,
            destination,
            ..
        } in &self.missing
        {
            let missing = RefreshedMount::new(destination, source, MountResult::Missing);
            report.mounts.push(missing);
        }
        report
    }
}

/// Probes the sources of these mounts together: each silent source takes time.
pub(super) fn probe_sources(due: &[&Found<'_>], files: &[&dyn CurrentFiles]) {
    let due: Vec<_> = due.iter().map(|found| &found.shown).collect();
    for files in files {
        files.probe_sources(&due);
    }
}

/// The progress at each mount point at which something was done or failed.
pub(super) type Progress = BTreeMap<PathBuf, MountProgress>;

/// The progress of the replacement at a mount point.
#[derive(Debug, Default)]
pub(super) struct MountProgress {
    /// The method that replaced the mount.
    pub(super) replaced: Option<AttachMethod>,
    /// The method that attached the new mount, if the call that detaches the old mount gave no
    /// answer.
    pub(super) unanswered: Option<AttachMethod>,
    /// The last failure since the mount was replaced.
    failure: Option<MountResult>,
    /// The number of failures since the mount was replaced.
    failures: u32,
}

impl MountProgress {
    /// The new mount is there, and the old mount is not.
    pub(super) fn replace(&mut self, method: AttachMethod) {
        self.replaced = Some(method);
        self.failure = None;
        self.failures = 0;
    }
}

/// A running refresh of a container.
pub(super) struct ContainerRefresh<'a> {
    pub(super) helper: &'a HelperProcess,
    pub(super) container: &'a Container<'a>,
    pub(super) files: &'a [&'a dyn CurrentFiles],
    pub(super) records: &'a TuckRecords,
    pub(super) notify: Notify,
    pub(super) until: Instant,
    pub(super) progress: Progress,
    /// Why the application was not notified.
    pub(super) not_notified: Option<String>,
    pub(super) abandoned: Option<Abandoned>,
}

impl<'a> ContainerRefresh<'a> {
    fn look(&self) -> Result<Look<'a>, RefreshError> {
        let table = self.container.namespace.mounts()?;
        Ok(Look::at(table, self.files, Some(self.container.spec)))
    }

    pub(super) fn progress_of(&mut self, found: &Found<'_>) -> &mut MountProgress {
        let place = found.place().to_owned();
        self.progress.entry(place).or_default()
    }

    /// A failure after the end of the time is not counted: the mount may be replaced in the next
    /// turn.
    pub(super) fn fail(&mut self, found: &Found<'_>, why: MountResult) {
        let is_in_time = Instant::now() < self.until;
        let progress = self.progress_of(found);
        progress.failures += u32::from(is_in_time);
        progress.failure = Some(why);
    }

    /// Goes on to the report after an error. The mount table is read again; if that
    /// fails as well, the replaced mounts count as current.
    ///
    /// # Errors
    /// The error, if no mount was changed.
    fn interrupt(&mut self, look: &mut Look<'a>, error: RefreshError) -> Result<(), RefreshError> {
        let is_changed = |it: &MountProgress| it.replaced.is_some() || it.unanswered.is_some();
        if self.abandoned.is_none() && !self.progress.values().any(is_changed) {
            return Err(error);
        }
        if let Ok(now) = self.look() {
            *look = now;
        } else {
            // The table has the ids of the old mounts.
            look.table = MountTable::default();
            for Found { shown, .. } in &mut look.found {
                let progress = self.progress.get(&shown.mount.mount_point);
                if progress.is_some_and(|it| it.replaced.is_some()) {
                    shown.verdict = Verdict::Current;
                    shown.covers_its_equal = false;
                }
            }
        }
        for found in look.due(&self.progress) {
            self.fail(found, failed(&error));
        }
        Ok(())
    }

    /// The table decides about a detach that gave no answer: the call may wait for a dead server
    /// after it has detached the old mount.
    fn settle_unanswered(&mut self, look: &Look<'_>) {
        for found in look.found.iter().filter(|found| found.shown.is_current()) {
            let Some(progress) = self.progress.get_mut(found.place()) else {
                continue;
            };
            let Some(method) = progress.unanswered.take() else {
                continue;
            };
            let failure = progress.failure.take();
            progress.replace(method);
            if method == AttachMethod::Beneath && found.is_on_shared() {
                // No child has set the propagation of the new mount.
                progress.failure = failure;
            } else if let Some(MountResult::Failed { error }) = failure
                && self.notify == Notify::Touch
            {
                self.not_notified = Some(error);
            }
        }
    }

    /// Sends a single signal for an update, after all files are new.
    fn signal(&mut self) {
        if self.progress.values().all(|it| it.replaced.is_none()) {
            return;
        }
        let process = self.container.process;
        let sent = match &self.notify {
            Notify::None | Notify::Touch => return,
            Notify::Signal(signal) => process.signal(number_of(*signal)),
            Notify::SignalProgram(signal, program) => {
                let found = process.running(program, Instant::now() + SIGNAL_TIMEOUT);
                found.and_then(|found| found.signal(number_of(*signal)))
            }
        };
        self.not_notified = sent.err().map(|error| error_chain(&error));
    }

    fn into_report(self, look: Look<'_>) -> Refreshed {
        let report = look.report(self.progress, &MountResult::Restless);
        let (error, request) = (self.not_notified, self.notify);
        let is_due = request != Notify::None && (report.replaced() > 0 || error.is_some());
        Refreshed {
            notification: is_due.then_some(Notification { request, error }),
            abandoned: self.abandoned,
            ..report
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
