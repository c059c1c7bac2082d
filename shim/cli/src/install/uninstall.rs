//! `bindguard uninstall`: restores every file as it was before the first install.
//!
//! A file that is unchanged since the install gets its former bytes back. From an edited file only bindguard's additions are
//! removed, and the report says so. The programs go last: after the services that named them were restarted, and when no
//! container needs them.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};

use super::change::{self, Change};
use super::program_users::users_of;
use super::programs::beside_this_one;
use super::record::{Entry, Owner, Record};
use super::report::Report;
use super::{CommonOptions, lock, name, root, target};

/// Arguments of `uninstall`.
#[derive(Debug, Args)]
pub struct Uninstall {
    /// The runtimes to remove bindguard from (default: all, and the programs).
    #[arg(value_enum, value_name = "RUNTIME")]
    runtimes: Vec<Owner>,
    /// Wait for SIGTERM or SIGINT first: for a pod whose end removes bindguard from the node.
    #[arg(long)]
    on_signal: bool,
    #[command(flatten)]
    common: CommonOptions,
}

impl Uninstall {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        if self.on_signal {
            wait_for_the_end()?;
        }
        root::enter(self.common.root.as_deref())?;
        let _lock = if self.common.dry_run { None } else { Some(lock::lock()?) };
        let mut record = Record::load()?;
        let mut report = Report::default();
        let is_meant = |entry: &&Entry| self.runtimes.is_empty() || self.runtimes.contains(&entry.owner);
        let (programs, files): (Vec<_>, Vec<_>) =
            record.files().iter().filter(is_meant).cloned().partition(|entry| entry.owner == Owner::Bindguard);
        let mut work = take_off(&files, &mut record, &mut report, &self.common)?;
        report.restart(&self.common)?;
        // all of them or none: a second run of uninstall needs this very program
        let held = programs.iter().find_map(|entry| Some((name(&entry.path), needed(&entry.path)?)));
        if report.waits_for_a_restart() && !programs.is_empty() {
            report.unfinished("the programs stay until a restarted service names them no more: run this again then");
        } else if let Some((path, who)) = held {
            report.unfinished(&format!("the programs stay: {who} cannot end without {path}: run this again later"));
        } else {
            work.extend(take_off(&programs, &mut record, &mut report, &self.common)?);
        }
        if self.runtimes.is_empty() && programs.is_empty() {
            may_a_package_go(&record, &mut report);
        }
        report.finish(&work, &self.common)
    }
}

/// A package removes its own programs. It runs this check first.
fn may_a_package_go(record: &Record, report: &mut Report) {
    let programs: Vec<_> = beside_this_one().into_iter().filter(|program| record.entry(program).is_none()).collect();
    for (program, who) in programs.iter().filter_map(|program| Some((program, needed(program)?))) {
        report.unfinished(&format!("{} has to stay: {who} cannot end without it", program.display()));
    }
    if report.waits_for_a_restart() && !programs.is_empty() {
        report
            .unfinished("the programs have to stay until a restarted service names them no more: run this again then");
    }
}

/// Undoes these entries, and returns the files that changed.
fn take_off(
    entries: &[Entry],
    record: &mut Record,
    report: &mut Report,
    common: &CommonOptions,
) -> Result<Vec<(Owner, Change)>> {
    let mut work = Vec::new();
    for entry in entries {
        let change = backwards(entry, report)?;
        if !common.dry_run {
            change.apply()?;
            record.forget(&entry.path)?;
        }
        if !change.is_none() {
            report.command(target::restart(entry.owner, change.before.as_deref().unwrap_or_default()));
            work.push((entry.owner, change));
        }
    }
    Ok(work)
}

/// The change that undoes one entry.
fn backwards(entry: &Entry, report: &mut Report) -> Result<Change> {
    let (original, now) = (entry.original()?, change::read(&entry.path)?);
    let path = name(&entry.path);
    let after = match &now {
        None => {
            report.note(format!("{path} is gone already"));
            None
        }
        Some(bytes) if entry.is_as_written(bytes) => original,
        Some(_) if now == original => original,
        Some(bytes) => {
            let cleaned = target::cleaned(entry.owner, bytes, original.as_deref())
                .with_context(|| format!("remove bindguard from {path}"))?;
            report.note(match entry.owner {
                Owner::Bindguard => format!("{path} was changed since the install: it stays"),
                _ => format!("{path} was changed since the install: only bindguard's own lines are removed"),
            });
            Some(cleaned)
        }
    };
    Ok(Change { path: entry.path.clone(), before: now, after, mode: 0o644 })
}

/// The users of a program, in a few words.
fn needed(program: &Path) -> Option<String> {
    let by = users_of(program);
    let first = by.first()?;
    Some(if by.len() == 1 { first.clone() } else { format!("{first} and {} more", by.len() - 1) })
}

fn wait_for_the_end() -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("block the signals to wait for")?;
    // from here on no signal is lost
    eprintln!("bindguard: stays on this node until this process gets SIGTERM");
    signals.wait().context("wait for a signal").map(drop)
}
