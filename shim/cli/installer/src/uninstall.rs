//! `bindguard uninstall`: restores every file as it was before the first install.
//!
//! A file that is unchanged since the install gets its former bytes back. From an edited file only
//! bindguard's additions are removed, and the report says so. The programs go last: after the
//! services that named them were restarted, and when no container needs them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use bindguard_core::program_names::CLI;
use clap::Args;

use crate::change::{self, Change, Content, NewAttributes, name};
use crate::options::CommonOptions;
use crate::owner::Owner;
use crate::plan::PlannedChange;
use crate::program_users::{ProgramUser, users_of};
use crate::record::{Entry, PendingRemoval, Record, Removal};
use crate::removal::{KeptHandler, counted, is_meant, kept_handlers, pods_of, programs_to_go};
use crate::report::{InstallReport, Progress};
use crate::restart_slot::RestartSlot;
use crate::running::{daemon_that_names, leave_own_sandbox, sees_processes};
use crate::stay::Stay;
use crate::versions::CURRENT;
use crate::{lock, restart, root, runtimes, scratch};

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
    #[command(flatten)]
    common: CommonOptions,
}

impl Uninstall {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        let mut slot = self.common.start_slot()?;
        let stay = self.common.stay.then(Stay::prepare).transpose()?;
        root::enter(self.common.root.as_deref())?;
        let progress = match stay {
            Some(stay) => stay.after(|| self.uninstall_from_a_pod(slot.as_mut()), || ()),
            None => self.uninstall(slot.as_mut()),
        }?;
        Ok(progress.exit_code(self.common.dry_run || self.pending))
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
            Some(lock::lock()?)
        };
        let mut record = Record::load()?;
        let mut report = InstallReport::default();
        let runtimes = match record.removal() {
            _ if !self.pending => self.runtimes.clone(),
            Some(removal) => removal.runtimes.clone(),
            None => return report.finish(&[], &self.common),
        };
        let (mut programs, files): (Vec<_>, Vec<_>) = record
            .files()
            .iter()
            .filter(|entry| is_meant(&runtimes, entry.owner))
            .cloned()
            .partition(|entry| entry.owner == Owner::Bindguard);
        programs.sort_by_key(removal_rank);
        let handlers = kept_handlers(files.iter().map(|entry| entry.owner));
        let has_kept = |entry: &Entry| handlers.iter().any(|kept| kept.owner == entry.owner);
        let files: Vec<_> = files.into_iter().filter(|entry| !has_kept(entry)).collect();
        let mut work = take_off(&files, &mut record, &mut report, &self.common)?;
        for kept in &handlers {
            work.extend(kept.without_default(&mut record, &mut report, &self.common)?);
        }
        work.extend(self.take_off_unrecorded(&runtimes, &mut record, &mut report)?);
        let restarted = restart::restart(&mut record, &mut report, &self.common, slot);
        if restarted.is_ok() {
            // all programs or none: a second run of uninstall needs this very program
            let paths = programs_to_go(&runtimes, &record);
            if are_unused(&paths, &handlers, &mut report) {
                work.extend(take_off(&programs, &mut record, &mut report, &self.common)?);
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
                Progress::Done => restarted.is_err(),
                Progress::KeptForPods => true,
                // entries of a lost record are not in this record
                Progress::Unfinished => !record.is_empty(),
            };
            let pending = is_pending.then(|| PendingRemoval {
                kept: Removal::of(&handlers, &programs_to_go(&runtimes, &record)),
                runtimes: runtimes.clone(),
            });
            if !record.removal().is_some_and(|old| old.is_wider(&runtimes)) {
                record.set_removal(pending)?;
            }
            record.remove_if_empty()?;
        }
        let progress = report.finish(&work, &self.common)?;
        restarted.map(|()| progress)
    }
}

impl Uninstall {
    /// Removes entries without a record, or names such entries. A node image or a separate
    /// `/var` may lose the record.
    fn take_off_unrecorded(
        &self,
        runtimes: &[Owner],
        record: &mut Record,
        report: &mut InstallReport,
    ) -> Result<Vec<PlannedChange>> {
        let steps: Vec<_> = runtimes::unrecorded(record)
            .into_iter()
            .filter(|step| is_meant(runtimes, step.owner))
            .collect();
        if !self.by_content {
            for step in &steps {
                let path = name(&step.change.path);
                report.unfinished(format!(
                    "{path} has entries of bindguard's, and the record of the installation is lost; remove them with bindguard uninstall --by-content"
                ));
            }
            return Ok(Vec::new());
        }
        for step in &steps {
            report.command(step.command.as_deref());
            if !self.common.dry_run {
                record.owe(step.owner, step.command.as_deref())?;
                step.change.apply()?;
            }
        }
        Ok(steps)
    }
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
        (false, _) => format!("programs kept for {}: containers {REASON}", counted(&pods)),
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

/// Undoes these entries, and returns the files that changed.
fn take_off(
    entries: &[Entry],
    record: &mut Record,
    report: &mut InstallReport,
    common: &CommonOptions,
) -> Result<Vec<PlannedChange>> {
    if !common.dry_run {
        // a folder with the file of a killed installer would stay
        entries
            .iter()
            .filter_map(|entry| entry.path.parent())
            .for_each(|folder| scratch::sweep(change::temporary_folder(folder)));
    }
    let mut work = Vec::new();
    for entry in entries {
        let change = backwards(entry, report)?;
        let command = runtimes::removal_command(entry.owner, entry.command.as_deref());
        let command = command.filter(|_| !change.is_none());
        if !common.dry_run {
            record.owe(entry.owner, command.as_deref())?;
            change.apply()?;
            record.forget(&entry.path)?;
        }
        report.command(command.as_deref());
        if !change.is_none() {
            work.push(PlannedChange {
                owner: entry.owner,
                change,
                command,
            });
        }
    }
    Ok(work)
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

/// The mode of a restored file whose record has none: an older version wrote the record. A program
/// must stay executable.
fn mode_of(entry: &Entry) -> u32 {
    let folder = entry.path.parent().and_then(Path::file_name);
    let is_program = entry.owner == Owner::Bindguard
        && folder.is_some_and(|folder| folder == "bin" || folder == "sbin");
    if is_program { 0o755 } else { 0o644 }
}

/// The change that undoes an entry of the record.
fn backwards(entry: &Entry, report: &mut InstallReport) -> Result<Change> {
    let (original, now) = (entry.original()?, change::content(&entry.path)?);
    let path = name(&entry.path);
    let after = match &now {
        None => {
            report.note(format!("{path} is gone already"));
            None
        }
        Some(content) if entry.is_as_written(content) => original,
        Some(_) if now == original => original,
        Some(Content::File(bytes)) if !matches!(entry.owner, Owner::Agent | Owner::Bindguard) => {
            let cleaned = runtimes::cleaned(
                entry.owner,
                bytes,
                original.as_ref().and_then(Content::bytes),
            )
            .with_context(|| format!("remove bindguard from {path}"))?;
            report.note(format!(
                "{path} was changed since the install: only bindguard's own lines are removed"
            ));
            Some(Content::File(cleaned))
        }
        Some(_) => {
            report.note(format!("{path} was changed since the install: it stays"));
            now.clone()
        }
    };
    let is_original = after == entry.original()?;
    let attributes = match entry.attributes.clone().filter(|_| is_original) {
        Some(attributes) => NewAttributes::Former(attributes),
        None => NewAttributes::Present(mode_of(entry)),
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
