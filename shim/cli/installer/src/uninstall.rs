//! `bindguard uninstall`: restores every file as it was before the first install.
//!
//! A file that is unchanged since the install gets its former bytes back. From an edited file only
//! bindguard's additions are removed, and the report says so. The programs go last: after the
//! services that named them were restarted, and when no container needs them.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::slice;

use anyhow::Result;
use bindguard_core::handover::CLI;
use bindguard_operator::terminal::print_remark;
use clap::Args;

use crate::change::{self, Change, Doing, Owner, bytes_after, stays, sweep};
use crate::own_files::CURRENT;
use crate::record::{Entry, PendingRemoval, Record, Removal};
use crate::removal::{
    KeptHandler, KeptName, counted, is_meant, kept_handlers, kept_names, pods_of, programs_to_go,
};
use crate::restart::{self, NodeLabel, RestartSlot};
use crate::running::{daemon_that_names, is_in_text, leave_own_sandbox, sees_processes, users_of};
use crate::runtimes;
use crate::session::{CommonOptions, InstallReport, Progress, Session, Stay, enter};

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
        let stay = Stay::prepare(&self.common)?;
        enter(self.common.root.as_deref())?;
        let progress = stay.after(|is_done| {
            if is_done {
                return Ok(Progress::Done);
            }
            // or the cluster would go on to send pods of the handler here
            if let Some(Err(error)) = label.as_mut().map(|label| label.set(false)) {
                print_remark(format_args!("nothing is removed yet: {error:#}"));
                return Ok(Progress::Unfinished);
            }
            let progress = self.uninstall(slot.as_mut())?;
            // a pod that was created while bindguard was the default needs the programs itself
            if self.common.stay && progress == Progress::KeptForPods {
                leave_own_sandbox()?;
            }
            Ok(progress)
        })?;
        Ok(progress.exit_code(self.common.dry_run && !self.complete || self.pending))
    }

    fn uninstall(&self, slot: Option<&mut RestartSlot>) -> Result<Progress> {
        let common = &self.common;
        let session = &mut Session::begin(common)?;
        for refused in session.record.refused() {
            session.report.unfinished(refused);
        }
        let runtimes = match &session.record.removal {
            _ if !self.pending => self.runtimes.clone(),
            Some(removal) => removal.runtimes.clone(),
            None => return session.finish(Ok(())),
        };
        let mut files = session.record.files.clone();
        files.retain(|entry| is_meant(&runtimes, entry.owner));
        let mut programs = files.clone();
        programs.retain(|entry| entry.owner == Owner::Bindguard);
        files.retain(|entry| entry.owner != Owner::Bindguard);
        programs.sort_by_key(removal_rank);
        let handlers = kept_handlers(files.iter().map(|entry| entry.owner));
        files.retain(|entry| handlers.iter().all(|kept| kept.owner != entry.owner));
        // containerd's main file before the drop-in that it imports: the former default is effective at
        // once, and healed
        files.reverse();
        let mut unread = Vec::new();
        let kept = kept_names(&files, self.forget_name, session, &mut unread)?;
        let (names, mut kept): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
        files.retain(|entry| {
            names.iter().all(|kept| kept.path != entry.path) && !unread.contains(&entry.path)
        });
        let mut read = Vec::new();
        for (_, file, _) in runtimes::files(&session.record) {
            read.push(file);
        }
        if let Some(old) = &session.record.removal {
            read.extend_from_slice(&old.named_in);
        }
        let mut changes = removals(&files, session);
        changes.extend(self.unrecorded(&runtimes, session)?);
        keep_defaults(&mut changes, session);
        take_off(changes, session)?;
        kept.retain(|change| !change.is_none());
        keep_defaults(&mut kept, session);
        for change in kept {
            if names.iter().all(|kept| kept.path != change.path) {
                // a default in another file of the engine
                take_off(vec![change], session)?;
                continue;
            }
            let record = &mut session.record;
            session.report.command(change.command.as_deref());
            if !common.dry_run {
                record.installed.retain(|it| it.owner != change.owner);
                record.save()?;
                runtimes::put(record, slice::from_ref(&change))?;
            }
            session.work.push(change);
        }
        for kept in &handlers {
            if let Err(error) = kept.without_default(session) {
                session.report.unfinished(format!(
                    "{} keeps its default runtime: {error:#}",
                    kept.owner
                ));
            }
        }
        let is_left = |entry: &Entry| session.record.entry(&entry.path).is_some();
        let is_left = !unread.is_empty() || !common.dry_run && files.iter().any(is_left);
        let restarted = restart::restart(session, false, slot);
        for kept in names {
            finish_name(kept, session)?;
        }
        let mut named_in = Vec::new();
        if is_left {
            let note = "the programs stay: a runtime's file that stays may name them";
            session.report.notes.push(note.to_owned());
        } else if restarted.is_ok() {
            // all programs or none: a second run of uninstall needs this very program
            let paths = programs_to_go(&runtimes, &session.record);
            let can_go = are_unused(&paths, &handlers, &mut session.report);
            // Another tool may have copied bindguard's runtime into a file of its own: without the
            // programs no container of that runtime would start.
            for file in read {
                let file = change::resolved(&file);
                // a file that cannot be read may name a program
                let names_one = bytes_after(&file, &session.work).map_or(true, |bytes| {
                    let text = String::from_utf8_lossy(bytes.as_deref().unwrap_or_default());
                    paths.iter().any(|program| is_in_text(&text, program))
                });
                if names_one && !named_in.contains(&file) {
                    named_in.push(file);
                }
            }
            if let Some(file) = named_in.first().filter(|_| can_go) {
                session.report.unfinished(format!(
                    "the programs stay: {} names one of them, or cannot be read; remove the runtime with this program from the file, then run this again",
                    file.display()
                ));
            } else if can_go {
                let changes = removals(&programs, session);
                take_off(changes, session)?;
            }
            if common.root.is_some() && !sees_processes() {
                let note =
                    "this root has no /proc: only its files were checked, not running daemons";
                session.report.notes.push(note.to_owned());
            }
        }
        if !common.dry_run {
            let record = &mut session.record;
            let is_pending = match session.report.progress {
                Progress::Done | Progress::NameKept => restarted.is_err(),
                Progress::KeptForPods => true,
                // entries of a lost record are not in this record
                Progress::Unfinished => !record.is_empty() || !named_in.is_empty(),
            };
            let pending = is_pending.then(|| PendingRemoval {
                kept: Removal::of(&handlers, &programs_to_go(&runtimes, record)),
                runtimes: runtimes.clone(),
                named_in,
            });
            // a removal of all runtimes goes on after that of some
            let old = record.removal.as_ref();
            let is_wider = old.is_some_and(|old| old.runtimes.is_empty()) && !runtimes.is_empty();
            if record.removal != pending && !is_wider {
                record.removal = pending;
                record.save()?;
            }
            record.remove_if_empty()?;
        }
        session.finish(restarted)
    }

    /// The removal of entries without a record, or the names of such entries. A node image or a
    /// separate `/var` may lose the record.
    fn unrecorded(&self, runtimes: &[Owner], session: &mut Session) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        for change in runtimes::unrecorded(&session.record) {
            if !is_meant(runtimes, change.owner) {
                continue;
            }
            let kept = KeptName::of(change.owner, &change.path, session)?;
            let Some(kept) = kept.filter(|kept| !self.forget_name && !kept.can_go()) else {
                changes.push(change);
                continue;
            };
            let with_name = kept.without_programs(&session.record)?;
            let change = with_name.unwrap_or(change);
            let is_done = change.is_none();
            if is_done || self.by_content {
                kept.report(&mut session.report);
            }
            if !is_done {
                changes.push(change);
            }
        }
        if !self.by_content {
            for change in changes.drain(..) {
                let path = change.path.display();
                session.report.unfinished(format!(
                    "{path} has entries of bindguard's, and the record of the installation is lost; remove them with bindguard uninstall --by-content"
                ));
            }
        }
        Ok(changes)
    }
}

/// Reports a name that stays. Until its restart, dockerd gave the name to each new container:
/// afterwards the name may go.
fn finish_name(mut kept: KeptName, session: &mut Session) -> Result<()> {
    if kept.owner == Owner::Docker
        && session.report.restarted
        && let Some(now) = KeptName::of(kept.owner, &kept.path, session)?
    {
        kept = now;
    }
    let entry = session.record.entry(&kept.path).filter(|_| kept.can_go());
    let Some(entry) = entry.cloned() else {
        kept.report(&mut session.report);
        return Ok(());
    };
    let mut changes = removals(&[entry], session);
    keep_defaults(&mut changes, session);
    take_off(changes, session)
}

/// Adds edits after which the defaults of these runtimes start containers. Of a runtime without
/// such an edit nothing is removed.
fn keep_defaults(changes: &mut Vec<Change>, session: &mut Session) {
    for owner in [Owner::Containerd, Owner::Docker, Owner::Podman, Owner::Crio] {
        let Some(first) = changes.iter().find(|change| change.owner == owner) else {
            continue;
        };
        let command = first.command.clone();
        let healing = match runtimes::default_after_removal(owner, changes, &session.record) {
            Ok(healing) => healing,
            Err(error) => {
                session.report.unfinished(format!("{error:#}"));
                changes.retain(|change| change.owner != owner);
                continue;
            }
        };
        session.report.notes.extend(healing.notes);
        for mut edit in healing.changes {
            match changes.iter_mut().find(|it| it.path == edit.path) {
                Some(change) => {
                    edit.command = change.command.take();
                    *change = edit;
                }
                // before the default that takes its place for now is removed
                None => {
                    edit.command.clone_from(&command);
                    changes.insert(0, edit);
                }
            }
        }
    }
}

/// Reports why these programs cannot be removed: a restart is owed, a running daemon names one, or
/// a container needs one. Returns true if they can be removed.
fn are_unused(programs: &[PathBuf], handlers: &[KeptHandler], report: &mut InstallReport) -> bool {
    if programs.is_empty() {
        return true;
    }
    let mut waits = None;
    if report.waits_for_a_restart() {
        let why =
            "they are needed until a restarted service names them no more; run this again then";
        waits = Some(why.to_owned());
    } else if handlers.iter().all(|kept| kept.pods.is_err()) {
        // a handler that is kept for pods names them, and no restart changes that
        waits = match daemon_that_names(programs) {
            Ok(None) => None,
            Ok(Some((daemon, program))) => {
                let program = program.display();
                Some(format!(
                    "the active configuration of {daemon} names {program}; restart {daemon}, then run this again"
                ))
            }
            Err(error) => Some(format!(
                "{error:#}; start or restart the daemon, then run this again"
            )),
        };
    }
    if let Some(why) = waits {
        report.unfinished(format!("the programs stay: {why}"));
        return false;
    }
    let users = users_of(programs);
    if users.is_empty() && handlers.is_empty() {
        return true;
    }
    // containers outside pods, and a shim that is about to end, have no pod name
    let pods = pods_of(&users);
    let needed = match &users[..] {
        _ if !pods.is_empty() => format!("programs kept for {}: containers", counted(&pods, "pod")),
        [] => "programs kept for the handler: containers".to_owned(),
        [only] => format!("the programs stay: {}", only.name),
        [first, more @ ..] => {
            format!("the programs stay: {} and {} more", first.name, more.len())
        }
    };
    report.left(
        Progress::KeptForPods,
        format!("{needed} cannot end without them; run this again later"),
    );
    false
}

/// The changes that undo the entries. If an entry cannot be undone, the report names the entry and
/// the other entries are still undone.
fn removals(entries: &[Entry], session: &mut Session) -> Vec<Change> {
    let mut changes = Vec::new();
    for entry in entries {
        match backwards(entry, &session.record, &mut session.report) {
            Ok(change) => changes.push(change),
            Err(error) => session.report.unfinished(stays(&entry.path, &error)),
        }
    }
    changes
}

/// Makes these changes, and forgets their entries.
fn take_off(changes: Vec<Change>, session: &mut Session) -> Result<()> {
    let is_dry = session.common.dry_run;
    if !is_dry {
        // a folder with the file of a killed installer would stay
        for folder in changes.iter().filter_map(|change| change.path.parent()) {
            sweep(change::temporary_folder(folder));
        }
    }
    for change in &changes {
        let command = change.command.as_deref().filter(|_| !change.is_none());
        if !is_dry {
            session.record.owe(change.owner, command)?;
            let (record, path) = (&session.record, &change.path);
            let is_restored = record.original(path).is_ok_and(|it| it == change.after);
            let restored = record.entry(path).filter(|_| is_restored);
            if let Err(error) = change.apply(restored.and_then(|it| it.attributes.as_ref())) {
                session.report.unfinished(stays(&change.path, &error));
                continue;
            }
            session.record.forget(&change.path)?;
        }
        session.report.command(command);
    }
    session.work.extend(changes);
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
    let mut change = Change::to(entry.owner, entry.path.clone(), None)?;
    let original = entry.original()?;
    let path = entry.path.display();
    match &change.before {
        None => report.notes.push(format!("{path} is gone already")),
        Some(present) => {
            change.after = runtimes::without_bindguard(entry.owner, &entry.path, present, record)
                .doing("remove bindguard from", &entry.path)?;
            if change.after != original {
                report.notes.push(if entry.is_as_written(present) {
                    format!("{path} keeps the import of a folder in which other tools have files")
                } else if change.is_none() {
                    format!("{path} was changed since the install: it stays")
                } else {
                    format!("{path} was changed since the install: only bindguard's own lines are removed")
                });
            }
        }
    }
    let before = change.before.as_ref();
    change.command = runtimes::removal_command(entry.owner, entry.command.as_deref(), before);
    Ok(change)
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
