//! `bindguard install` and `bindguard uninstall`: put bindguard onto a node, and remove it, byte for byte.
//!
//! ```text
//!   wishes ──► plan a runtime ──► changes, as diffs ──► record ──► programs, then files ──► the command that is left to run
//! ```
//!
//! All changes are planned before the first byte is written; those to containerd are also tried out. Only `--restart` restarts
//! a service: the operator of two thousand nodes chooses the moment.

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
    /// The runtimes to configure (default: containerd).
    #[arg(value_enum, value_name = "RUNTIME")]
    runtimes: Vec<Owner>,
    /// Guard every container of the node, not only those that request the runtime `bindguard`.
    #[arg(long)]
    default: bool,
    /// containerd: keep its own shim, and let it call bindguard-runtime.
    #[arg(long)]
    wrapper: bool,
    /// The folder for the programs (default: the folder in which a package put them, else /usr/local/bin).
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// The containerd program that evaluates the edited files (default: the one on PATH).
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
    /// Print the planned changes and do nothing. The exit code is 1 if there is something to do.
    #[arg(long)]
    dry_run: bool,
    /// Work in another root file system: of an image, or of a node as a pod sees it. Every other path is in it.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Run the command that activates the changes, if there were any.
    #[arg(long)]
    restart: bool,
    /// Print the changes as JSON.
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

/// Records a change, then makes it. Uninstall restores the content from before the *first* install. If the file was edited
/// since then, uninstall restores the edited file without bindguard in it.
fn put(record: &mut Record, owner: Owner, change: &Change) -> Result<()> {
    let original = match (record.entry(&change.path), &change.before) {
        (Some(entry), Some(before)) if entry.is_as_written(before) => entry.original()?,
        (Some(entry), Some(before)) => uninstall::cleaned(owner, before, entry.original()?.as_deref())?,
        (_, before) => before.clone(),
    };
    record.note(owner, change, original.as_deref())?;
    change.apply()
}

/// A file's name in messages.
fn name(path: &Path) -> String {
    path.display().to_string()
}
