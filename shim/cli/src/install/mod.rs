//! `bindguard install` and `bindguard uninstall`: onto a node, and off it again, byte for byte.
//!
//! ```text
//!   wishes ──► plan a runtime ──► changes, as diffs ──► record ──► programs, then files ──► the command that is left to run
//! ```
//!
//! Everything is planned, and for containerd tried out, before the first byte is written. A service is restarted only by
//! `--restart`: whoever has two thousand nodes chooses the moment.

mod change;
mod containerd;
mod crio;
mod docker;
mod drop_in;
mod json_text;
mod planned;
mod programs;
mod record;
mod root;
mod settings;
mod show;
mod toml_text;
mod uninstall;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

pub use self::uninstall::Uninstall;

use self::change::Change;
use self::planned::{Planned, Wishes};
use self::programs::Programs;
use self::record::{Owner, Record};
use self::show::Shown;

/// Arguments of `install`.
#[derive(Debug, Args)]
pub struct Install {
    /// The runtimes to tell. containerd when none is named.
    #[arg(value_enum, value_name = "RUNTIME")]
    runtimes: Vec<Owner>,
    /// For every container of the node, not only for those that ask for the runtime `bindguard`.
    #[arg(long)]
    default: bool,
    /// containerd: keep its own shim, and have it call bindguard-runtime.
    #[arg(long)]
    wrapper: bool,
    /// Where the programs go. Without it they stay where a package put them, or go to /usr/local/bin.
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// The containerd to ask what it makes of its files; without it, the one on PATH.
    #[arg(long, value_name = "PROGRAM")]
    containerd: Option<PathBuf>,
    /// containerd's main file.
    #[arg(long, value_name = "FILE", default_value = containerd::CONFIG)]
    containerd_config: PathBuf,
    #[command(flatten)]
    how: How,
}

/// Arguments of both verbs.
#[derive(Debug, Args)]
pub struct How {
    /// Say what would be done, and do nothing. The exit code is 1 when there is something to do.
    #[arg(long)]
    dry_run: bool,
    /// Another root file system: of an image that is being made, or a node's as a pod sees it. Every other path is in it.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Run the command that makes the change count, if there was one.
    #[arg(long)]
    restart: bool,
    /// Print what is done as JSON.
    #[arg(long)]
    json: bool,
}

impl Install {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        let programs = Programs::beside_this_one()?;
        let prefix = self.prefix.unwrap_or_else(|| programs.usual_place(self.how.root.is_some()));
        root::enter(self.how.root.as_deref())?;
        let owners = if self.runtimes.is_empty() { vec![Owner::Containerd] } else { self.runtimes };
        let wishes = Wishes {
            prefix,
            default: self.default,
            wrapper: self.wrapper,
            containerd: self.containerd,
            containerd_config: self.containerd_config,
        };
        let mut shown = Shown::default();
        let mut work = Vec::new();
        for owner in owners {
            let planned = plan(owner, &wishes)?;
            shown.take(&planned);
            work.extend(settings::plan(planned.needs_runtime.as_deref())?.map(|change| (Owner::Bindguard, change)));
            work.extend(planned.changes.into_iter().map(|change| (owner, change)));
        }
        let programs = programs.into_prefix(&wishes.prefix)?.into_iter().map(|change| (Owner::Bindguard, change));
        let work: Vec<_> = programs.chain(work).filter(|(_, change)| !change.is_none()).collect();
        if !self.how.dry_run {
            let _lock = root::lock()?;
            let mut record = Record::load()?;
            work.iter().try_for_each(|(owner, change)| put(&mut record, *owner, change))?;
        }
        shown.restart(&self.how)?;
        shown.finish(&work, &self.how)
    }
}

fn plan(owner: Owner, wishes: &Wishes) -> Result<Planned> {
    match owner {
        Owner::Containerd => containerd::plan(wishes),
        Owner::Docker => docker::plan(wishes),
        Owner::Podman => drop_in::podman(wishes),
        Owner::Crio => crio::crio(wishes),
        Owner::Bindguard => Ok(Planned::default()),
    }
}

/// Notes a change, then makes it. What an uninstall gives back is what was there before the *first* install; where
/// somebody has edited the file since, it is their file without bindguard in it.
fn put(record: &mut Record, owner: Owner, change: &Change) -> Result<()> {
    let original = match (record.entry(&change.path), &change.before) {
        (Some(entry), Some(before)) if entry.is_as_written(before) => entry.original()?,
        (Some(entry), Some(before)) => uninstall::cleaned(owner, before, entry.original()?.as_deref())?,
        (_, before) => before.clone(),
    };
    record.note(owner, change, original.as_deref())?;
    change.apply()
}

/// A file's name for messages.
fn name(path: &Path) -> String {
    path.display().to_string()
}
