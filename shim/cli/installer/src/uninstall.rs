//! `bindguard uninstall`: restores every file as it was before the first install.
//!
//! A file that is unchanged since the install gets its former bytes back. From an edited file only
//! bindguard's additions are removed, and the report says so. The programs go last: after the
//! services that named them were restarted, and when no container needs them.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::slice;

use anyhow::{Context, Result};
use bindguard_core::program_names::CLI;
use bindguard_operator::terminal::print_remark;
use clap::Args;

use crate::change::{self, Change, Content, NewAttributes, name, stays, sweep};
use crate::options::{CommonOptions, InstallReport, Owner, PlannedChange, Progress, bytes_after};
use crate::process::{Stay, enter, lock};
use crate::programs::CURRENT;
use crate::record::{Entry, PendingRemoval, Record, Removal};
use crate::removal::{
    KeptHandler, KeptName, counted, is_meant, keep, kept_handlers, kept_names, pods_of,
    programs_to_go,
};
use crate::restart::{self, NodeLabel, RestartSlot};
use crate::running::{
    ProgramUser, daemon_that_names, is_in_text, leave_own_sandbox, sees_processes, users_of,
};
use crate::runtimes;

/// Arguments of `uninstall`.
#[derive(Debug, Args)]
pub struct Uninstall {
    /// The runtimes to remove bindguard from (default: all, and the programs).
    #[arg(value_enum, value_name = "RUNTIME")]
    runtimes: Vec<Owner>,
    /// Remove the entries that are bindguard's by their content, if the record of the installation
    /// is lost.
    #[arg(long)]
    by_content: bool,
    /// Finish an uninstall that kept parts for running pods, and do nothing if there is none. The
    /// exit code is 0 while pods need them.
    #[arg(long, conflicts_with_all = ["runtimes", "by_content"])]
    pending: bool,
    /// With --dry-run, the exit code is 1 also while parts stay for running pods.
    #[arg(long, requires = "dry_run")]
    complete: bool,
    /// Also remove the runtime's name from Docker's and Podman's files while containers have it:
    /// such a container no longer starts or stops.
    #[arg(long)]
    forget_name: bool,
    #[command(flatten)]
    common: CommonOptions,
}

impl Uninstall {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        let mut slot = RestartSlot::start(&self.common)?;
        let mut label = NodeLabel::start(&self.common)?;
        let stay = self.common.stay.then(Stay::prepare).transpose()?;
        enter(self.common.root.as_deref())?;
        let mut uninstall = || {
            // or the cluster would go on to send pods of the handler here
            if let Some(Err(error)) = label.as_mut().map(NodeLabel::remove) {
                print_remark(format_args!("nothing is removed yet: {error:#}"));
                return Ok(Progress::Unfinished);
            }
            if self.common.stay {
                self.uninstall_from_a_pod(slot.as_mut())
            } else {
                self.uninstall(slot.as_mut())
            }
        };
        let progress = match stay {
            Some(stay) => stay.after(uninstall, || ()),
            None => uninstall(),
        }?;
        Ok(progress.exit_code(self.common.dry_run && !self.complete || self.pending))
    }

    /// A pod that was created while bindguard was the default needs the programs itself.
    fn uninstall_from_a_pod(&self, slot: Option<&mut RestartSlot>) -> Result<Progress> {
        let progress = self.uninstall(slot)?;
        if progress == Progress::KeptForPods {
            leave_own_sandbox()?;
        }
        Ok(progress)
    }

    fn uninstall(&self, slot: Option<&mut RestartSlot>) -> Result<Progress> {
        let _lock = if self.common.dry_run {
            None
        } else {
            Some(lock()?)
        };
        let mut record = Record::load(runtimes::may_write)?;
        let mut report = InstallReport::default();
        record
            .refused()
            .for_each(|refused| report.unfinished(refused));
        let runtimes = match &record.removal {
            _ if !self.pending => self.runtimes.clone(),
            Some(removal) => removal.runtimes.clone(),
            None => return report.finish(&[], &self.common),
        };
        let (mut programs, files): (Vec<_>, Vec<_>) = record
            .files
            .iter()
            .filter(|entry| is_meant(&runtimes, entry.owner))
            .cloned()
            .partition(|entry| entry.owner == Owner::Bindguard);
        programs.sort_by_key(removal_rank);
        let handlers = kept_handlers(files.iter().map(|entry| entry.owner));
        let has_kept = |entry: &Entry| handlers.iter().any(|kept| kept.owner == entry.owner);
        let mut files: Vec<_> = files.into_iter().filter(|entry| !has_kept(entry)).collect();
        // containerd's main file before the drop-in that it imports: the former default is effective at
        // once, and healed
        files.reverse();
        let mut unread = Vec::new();
        let kept = kept_names(
            &files,
            self.forget_name,
            &mut record,
            &mut report,
            &self.common,
            &mut unread,
        )?;
        let (names, mut kept_steps): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
        files.retain(|entry| {
            names.iter().all(|kept| kept.path() != entry.path) && !unread.contains(&entry.path)
        });
        let mut read: Vec<PathBuf> = Vec::new();
        for (_, file, _) in runtimes::files(&record) {
            read.push(file);
        }
        read.extend(
            record
                .removal
                .as_ref()
                .map(|old| old.named_in.clone())
                .unwrap_or_default(),
        );
        let mut work = removals(&files, &record, &mut report);
        work.extend(self.unrecorded(&runtimes, &mut record, &mut report)?);
        keep_defaults(&mut work, &record, &mut report)?;
        take_off(&work, &mut record, &mut report, &self.common)?;
        kept_steps.retain(|step| !step.change.is_none());
        keep_defaults(&mut kept_steps, &record, &mut report)?;
        for step in kept_steps {
            if names.iter().any(|kept| kept.path() == step.change.path) {
                keep(&step, &mut record, &mut report, &self.common)?;
            } else {
                // a default in another file of the engine
                take_off(
                    slice::from_ref(&step),
                    &mut record,
                    &mut report,
                    &self.common,
                )?;
            }
            work.push(step);
        }
        for kept in &handlers {
            match kept.without_default(&mut record, &mut report, &self.common) {
                Ok(steps) => work.extend(steps),
                Err(error) => report.unfinished(format!(
                    "{} keeps its default runtime: {error:#}",
                    kept.owner.name()
                )),
            }
        }
        let is_left = |entry: &Entry| record.entry(&entry.path).is_some();
        let is_left = !unread.is_empty() || !self.common.dry_run && files.iter().any(is_left);
        let restarted = restart::restart(&mut record, &mut report, &self.common, None, slot);
        for kept in names {
            work.extend(self.finish_name(kept, &mut record, &mut report)?);
        }
        let mut named_in = Vec::new();
        if is_left {
            report.note("the programs stay: a runtime's file that stays may name them".to_owned());
        } else if restarted.is_ok() {
            // all programs or none: a second run of uninstall needs this very program
            let paths = programs_to_go(&runtimes, &record);
            let can_go = are_unused(&paths, &handlers, &mut report);
            named_in = files_that_name(&paths, &read, &work);
            if let Some(file) = named_in.first().filter(|_| can_go) {
                report.unfinished(format!(
                    "the programs stay: {} names one of them, or cannot be read; remove the runtime with this program from the file, then run this again",
                    name(file)
                ));
            } else if can_go {
                let steps = removals(&programs, &record, &mut report);
                take_off(&steps, &mut record, &mut report, &self.common)?;
                work.extend(steps);
            }
            if self.common.root.is_some() && !sees_processes() {
                report.note(
                    "this root has no /proc: only its files were checked, not running daemons"
                        .to_owned(),
                );
            }
        }
        if !self.common.dry_run {
            let is_pending = match report.progress() {
                Progress::Done | Progress::NameKept => restarted.is_err(),
                Progress::KeptForPods => true,
                // entries of a lost record are not in this record
                Progress::Unfinished => !record.is_empty() || !named_in.is_empty(),
            };
            let pending = is_pending.then(|| PendingRemoval {
                kept: Removal::of(&handlers, &programs_to_go(&runtimes, &record)),
                runtimes: runtimes.clone(),
                named_in,
            });
            let is_wider = |old: &PendingRemoval| old.is_wider(&runtimes);
            if record.removal != pending && !record.removal.as_ref().is_some_and(is_wider) {
                record.removal = pending;
                record.save()?;
            }
            record.remove_if_empty()?;
        }
        work.retain(|step| !step.change.is_none());
        let progress = report.finish(&work, &self.common)?;
        restart::progress_after(restarted, progress, &self.common)
    }

    /// The removal of entries without a record, or the names of such entries. A node image or a
    /// separate `/var` may lose the record.
    fn unrecorded(
        &self,
        runtimes: &[Owner],
        record: &mut Record,
        report: &mut InstallReport,
    ) -> Result<Vec<PlannedChange>> {
        let mut steps = Vec::new();
        for step in runtimes::unrecorded(record) {
            if !is_meant(runtimes, step.owner) {
                continue;
            }
            let kept = KeptName::of(step.owner, &step.change.path, record, &self.common)?;
            let Some(kept) = kept.filter(|kept| !self.forget_name && !kept.can_go()) else {
                steps.push(step);
                continue;
            };
            let step = kept.without_programs(None, record)?.unwrap_or(step);
            let is_done = step.change.is_none();
            if is_done || self.by_content {
                kept.report(report);
            }
            if !is_done {
                steps.push(step);
            }
        }
        if !self.by_content {
            for step in steps.drain(..) {
                let path = name(&step.change.path);
                report.unfinished(format!(
                    "{path} has entries of bindguard's, and the record of the installation is lost; remove them with bindguard uninstall --by-content"
                ));
            }
        }
        Ok(steps)
    }

    /// Reports a name that stays. Until its restart, dockerd gave the name to each new container:
    /// afterwards the name may go.
    fn finish_name(
        &self,
        mut kept: KeptName,
        record: &mut Record,
        report: &mut InstallReport,
    ) -> Result<Vec<PlannedChange>> {
        if kept.owner == Owner::Docker
            && report.has_restarted()
            && let Some(now) = KeptName::of(kept.owner, kept.path(), record, &self.common)?
        {
            kept = now;
        }
        let entry = record.entry(kept.path()).filter(|_| kept.can_go());
        let Some(entry) = entry.cloned() else {
            kept.report(report);
            return Ok(Vec::new());
        };
        let mut steps = removals(&[entry], record, report);
        keep_defaults(&mut steps, record, report)?;
        take_off(&steps, record, report, &self.common)?;
        Ok(steps)
    }
}

/// Adds edits after which the defaults of these runtimes start containers. Of a runtime without
/// such an edit nothing is removed.
fn keep_defaults(
    steps: &mut Vec<PlannedChange>,
    record: &Record,
    report: &mut InstallReport,
) -> Result<()> {
    for owner in [Owner::Containerd, Owner::Docker, Owner::Podman, Owner::Crio] {
        let Some(step) = steps.iter().find(|step| step.owner == owner) else {
            continue;
        };
        let command = step.command.clone();
        let healing = match runtimes::default_after_removal(owner, steps, record) {
            Ok(healing) => healing,
            Err(error) => {
                report.unfinished(format!("{error:#}"));
                steps.retain(|step| step.owner != owner);
                continue;
            }
        };
        healing.notes.into_iter().for_each(|note| report.note(note));
        for (path, text) in healing.edits {
            let edit = Change::of(&path, Some(text.into_bytes()), 0o644)?;
            match steps.iter_mut().find(|step| step.change.path == edit.path) {
                Some(step) => step.change = edit,
                // before the default that takes its place for now is removed
                None => steps.insert(
                    0,
                    PlannedChange {
                        owner,
                        change: edit,
                        command: command.clone(),
                    },
                ),
            }
        }
    }
    Ok(())
}

/// The files among `read` that name one of these programs after `steps`. Another tool may have
/// copied bindguard's runtime into one of its own: without the programs no container of that runtime
/// would start.
fn files_that_name(
    programs: &[PathBuf],
    read: &[PathBuf],
    steps: &[PlannedChange],
) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for file in read {
        let file = change::resolved(file);
        let Ok(bytes) = bytes_after(&file, steps) else {
            // the file may name a program
            found.push(file);
            continue;
        };
        let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        if programs.iter().any(|program| is_in_text(&text, program)) && !found.contains(&file) {
            found.push(file);
        }
    }
    found
}

/// Reports why these programs cannot be removed: a restart is owed, a running daemon names one, or
/// a container needs one. Returns true if they can be removed.
fn are_unused(programs: &[PathBuf], handlers: &[KeptHandler], report: &mut InstallReport) -> bool {
    if programs.is_empty() {
        return true;
    }
    // a handler that is kept for pods names them, and no restart changes that
    let is_kept = handlers.iter().any(|kept| kept.pods.is_ok());
    let waits = if report.waits_for_a_restart() {
        Some(
            "they are needed until a restarted service names them no more; run this again then"
                .to_owned(),
        )
    } else if is_kept {
        None
    } else {
        needed_by_a_daemon(programs)
    };
    if let Some(why) = waits {
        report.unfinished(format!("the programs stay: {why}"));
        return false;
    }
    let users = users_of(programs);
    if users.is_empty() && handlers.is_empty() {
        return true;
    }
    report.kept_for_pods(needed_by(&users));
    false
}

fn needed_by_a_daemon(programs: &[PathBuf]) -> Option<String> {
    match daemon_that_names(programs) {
        Ok(found) => found.map(|(daemon, program)| {
            let program = name(program);
            format!("the active configuration of {daemon} names {program}; restart {daemon}, then run this again")
        }),
        Err(error) => Some(format!("{error:#}; start or restart the daemon, then run this again")),
    }
}

/// Names the pods that need the programs; containers outside pods, and a shim that is about to end,
/// have no pod name.
fn needed_by(users: &[ProgramUser]) -> String {
    const REASON: &str = "cannot end without them; run this again later";
    let pods = pods_of(users);
    match (pods.is_empty(), users) {
        (false, _) => format!(
            "programs kept for {}: containers {REASON}",
            counted(&pods, "pod")
        ),
        (true, []) => format!("programs kept for the handler: containers {REASON}"),
        (true, [only]) => format!("the programs stay: {only} {REASON}"),
        (true, [first, more @ ..]) => {
            format!(
                "the programs stay: {first} and {} more {REASON}",
                more.len()
            )
        }
    }
}

/// The changes that undo the entries. If an entry cannot be undone, the report names the entry and
/// the other entries are still undone.
fn removals(entries: &[Entry], record: &Record, report: &mut InstallReport) -> Vec<PlannedChange> {
    let mut steps = Vec::new();
    for entry in entries {
        let change = match backwards(entry, record, report) {
            Ok(change) => change,
            Err(error) => {
                report.unfinished(stays(&entry.path, &error));
                continue;
            }
        };
        let before = change.before.as_ref().and_then(Content::bytes);
        steps.push(PlannedChange {
            owner: entry.owner,
            command: runtimes::removal_command(entry.owner, entry.command.as_deref(), before),
            change,
        });
    }
    steps
}

/// Makes these changes, and forgets their entries.
fn take_off(
    steps: &[PlannedChange],
    record: &mut Record,
    report: &mut InstallReport,
    common: &CommonOptions,
) -> Result<()> {
    if !common.dry_run {
        // a folder with the file of a killed installer would stay
        steps
            .iter()
            .filter_map(|step| step.change.path.parent())
            .for_each(|folder| sweep(change::temporary_folder(folder)));
    }
    for step in steps {
        let command = step.command.as_deref().filter(|_| !step.change.is_none());
        if !common.dry_run {
            record.owe(step.owner, command)?;
            if let Err(error) = step.change.apply() {
                report.unfinished(stays(&step.change.path, &error));
                continue;
            }
            record.forget(&step.change.path)?;
        }
        report.command(command);
    }
    Ok(())
}

/// The order in which programs are removed: `bindguard` last, because an operator continues a
/// killed uninstall with it.
fn removal_rank(entry: &Entry) -> u8 {
    match entry.path.file_name().and_then(OsStr::to_str) {
        Some(CLI) if !entry.is_link() => 2,
        Some(CLI | CURRENT) => 1,
        _ => 0,
    }
}

/// The change that undoes an entry of the record.
fn backwards(entry: &Entry, record: &Record, report: &mut InstallReport) -> Result<Change> {
    let (original, now) = (entry.original()?, change::content(&entry.path)?);
    let path = name(&entry.path);
    let after = match &now {
        None => {
            report.note(format!("{path} is gone already"));
            None
        }
        Some(present) => runtimes::without_bindguard(entry.owner, &entry.path, present, record)
            .with_context(|| format!("remove bindguard from {path}"))?,
    };
    let is_original = after == original;
    if let Some(present) = now.as_ref().filter(|_| !is_original) {
        let was_edited = !entry.is_as_written(present);
        report.note(match was_edited {
            true if after == now => format!("{path} was changed since the install: it stays"),
            true => format!(
                "{path} was changed since the install: only bindguard's own lines are removed"
            ),
            false => format!("{path} keeps the import of a folder in which other tools have files"),
        });
    }
    let attributes = match entry.attributes.clone().filter(|_| is_original) {
        Some(attributes) => NewAttributes::Former(attributes),
        None => NewAttributes::Present(0o644),
    };
    Ok(Change {
        path: entry.path.clone(),
        before: now,
        after,
        attributes,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn bindguard_itself_is_removed_last() {
        let entry = |(path, written): (&str, &str)| -> Entry {
            let json = serde_json::json!({
                "owner": "bindguard", "path": path, "original": null, "written": written,
            });
            serde_json::from_value(json).unwrap()
        };
        let mut programs = [
            ("/usr/local/lib/bindguard/1/bindguard", "1f"),
            ("/usr/local/lib/bindguard/1/bindguard-runtime", "2f"),
            ("/usr/local/lib/bindguard/current", "link to 1"),
            ("/usr/local/bin/bindguard", "link to x/bindguard"),
            ("/usr/local/bin/bindguard-runtime", "link to x"),
            ("/etc/bindguard/config.toml", "3f"),
        ]
        .map(entry);
        programs.sort_by_key(removal_rank);
        let ranked = programs
            .each_ref()
            .map(|entry| entry.path.to_str().unwrap());
        assert_eq!(
            ranked[3..],
            [
                "/usr/local/lib/bindguard/current",
                "/usr/local/bin/bindguard",
                "/usr/local/lib/bindguard/1/bindguard",
            ]
        );
    }
}
