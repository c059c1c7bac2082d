//! `bindguard uninstall`: restores every file as it was before the first install.
//!
//! A file that is unchanged since the install gets its former bytes back. From an edited file only bindguard's additions are
//! removed, and the report says so. The programs go last: after the services that named them were restarted, and when no
//! container needs them.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};

use super::change::{self, Change};
use super::programs::{beside_this_one, needed_by};
use super::record::{Entry, Owner, Record};
use super::show::Shown;
use super::{How, containerd, crio, docker, drop_in, name, root};

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
    how: How,
}

impl Uninstall {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        if self.on_signal {
            wait_for_the_end()?;
        }
        root::enter(self.how.root.as_deref())?;
        let _lock = if self.how.dry_run { None } else { Some(root::lock()?) };
        let mut record = Record::load()?;
        let mut shown = Shown::default();
        let is_meant = |entry: &&Entry| self.runtimes.is_empty() || self.runtimes.contains(&entry.owner);
        let (programs, files): (Vec<_>, Vec<_>) =
            record.files().iter().filter(is_meant).cloned().partition(|entry| entry.owner == Owner::Bindguard);
        let mut work = take_off(&files, &mut record, &mut shown, &self.how)?;
        shown.restart(&self.how)?;
        // all of them or none: a second run of uninstall needs this very program
        let held = programs.iter().find_map(|entry| Some((name(&entry.path), needed(&entry.path)?)));
        if shown.waits_for_a_restart() && !programs.is_empty() {
            shown.unfinished("the programs stay until a restarted service names them no more: run this again then");
        } else if let Some((path, who)) = held {
            shown.unfinished(&format!("the programs stay: {who} cannot end without {path}: run this again later"));
        } else {
            work.extend(take_off(&programs, &mut record, &mut shown, &self.how)?);
        }
        if self.runtimes.is_empty() && programs.is_empty() {
            may_a_package_go(&record, &mut shown);
        }
        shown.finish(&work, &self.how)
    }
}

/// A package removes its own programs. It runs this check first.
fn may_a_package_go(record: &Record, shown: &mut Shown) {
    let programs: Vec<_> = beside_this_one().into_iter().filter(|program| record.entry(program).is_none()).collect();
    for (program, who) in programs.iter().filter_map(|program| Some((program, needed(program)?))) {
        shown.unfinished(&format!("{} has to stay: {who} cannot end without it", program.display()));
    }
    if shown.waits_for_a_restart() && !programs.is_empty() {
        shown.unfinished("the programs have to stay until a restarted service names them no more: run this again then");
    }
}

/// Undoes these entries, and returns the files that changed.
fn take_off(entries: &[Entry], record: &mut Record, shown: &mut Shown, how: &How) -> Result<Vec<(Owner, Change)>> {
    let mut work = Vec::new();
    for entry in entries {
        let change = backwards(entry, shown)?;
        if !how.dry_run {
            change.apply()?;
            record.forget(&entry.path)?;
        }
        if !change.is_none() {
            shown.command(command_for(entry.owner, &change));
            work.push((entry.owner, change));
        }
    }
    Ok(work)
}

/// The change that undoes one entry.
fn backwards(entry: &Entry, shown: &mut Shown) -> Result<Change> {
    let (original, now) = (entry.original()?, change::read(&entry.path)?);
    let path = name(&entry.path);
    let after = match &now {
        None => {
            shown.note(format!("{path} is gone already"));
            None
        }
        Some(bytes) if entry.is_as_written(bytes) => original,
        Some(_) if now == original => original,
        Some(bytes) => {
            let cleaned = cleaned(entry.owner, bytes, original.as_deref())
                .with_context(|| format!("take bindguard out of {path}"))?;
            shown.note(match entry.owner {
                Owner::Bindguard => format!("{path} was changed since the install: it stays"),
                _ => format!("{path} was changed since the install: only bindguard's own lines are taken out"),
            });
            cleaned
        }
    };
    Ok(Change { path: entry.path.clone(), before: now, after, mode: 0o644 })
}

/// The users of a program, in a few words.
fn needed(program: &Path) -> Option<String> {
    let by = needed_by(program);
    let first = by.first()?;
    Some(if by.len() == 1 { first.clone() } else { format!("{first} and {} more", by.len() - 1) })
}

/// The content of an edited file without bindguard; `None` if nothing is left.
pub fn cleaned(owner: Owner, bytes: &[u8], original: Option<&[u8]>) -> Result<Option<Vec<u8>>> {
    if owner == Owner::Bindguard {
        return Ok(Some(bytes.to_vec()));
    }
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| anyhow!("it is not text"));
    let (now, before) = (text(bytes)?, text(original.unwrap_or_default())?);
    let places = match owner {
        Owner::Docker => return Ok(Some(docker::cleaned(&now, &before)?.into_bytes())),
        Owner::Containerd => containerd::places().to_vec(),
        Owner::Podman => vec![drop_in::podman_place()],
        Owner::Crio => vec![crio::place()],
        Owner::Bindguard => Vec::new(),
    };
    let out = places.iter().try_fold(now, |text, place| place.without_runtime(&text, "bindguard", &before))?;
    Ok(Some(out.into_bytes()))
}

/// When dockerd reads its file again, it keeps a default runtime that the file no longer names.
fn command_for(owner: Owner, change: &Change) -> Option<&'static str> {
    let was_default = || docker::is_default(change.before.as_deref().unwrap_or_default());
    match owner {
        Owner::Containerd => Some("systemctl restart containerd"),
        Owner::Docker if was_default() => Some("systemctl restart docker"),
        Owner::Docker => Some("systemctl reload docker"),
        Owner::Crio => Some("systemctl restart crio"),
        Owner::Podman | Owner::Bindguard => None,
    }
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
