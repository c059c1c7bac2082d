//! `bindguard install` and `bindguard uninstall`: put bindguard onto a node, and remove it, byte
//! for byte.
//!
//! ```text
//!   options ──► plan a runtime ──► changes, as diffs ──► record ──► programs, then files ──► the command that is left to run
//! ```
//!
//! All changes are planned before the first byte is written; those to containerd are also tried
//! out. Only `--restart` restarts a service: the operator of two thousand nodes chooses the moment.

mod attributes;
mod change;
pub mod drift;
mod json_text;
mod lock;
mod own_program;
mod owner;
mod plan;
mod program_users;
mod programs;
pub mod record;
pub mod removal;
mod report;
mod restart;
mod restart_slot;
pub mod root;
pub mod running;
mod scratch;
mod search_path;
mod settings;
mod stay;
mod target;
mod toml_text;
mod uninstall;
mod versions;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bindguard_config::DEFAULT_PATH;
use clap::Args;

pub use self::uninstall::Uninstall;

use self::change::{Change, Content};
use self::drift::DriftReporter;
use self::owner::Owner;
use self::plan::{InstallOptions, PlannedChange};
use self::programs::Programs;
use self::record::{Installed, Record};
use self::report::{InstallReport, Progress};
use self::restart_slot::RestartSlot;
use self::settings::NodeConfig;
use self::stay::Stay;

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
    /// Install the node agent as a service of systemd, which starts at boot.
    #[arg(long)]
    agent: bool,
    /// The folder in which services find the programs (default: the folder in which a package put
    /// them, else /usr/local/bin). The programs of each version go to `lib/bindguard` beside a
    /// folder `bin`, or below another one.
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// The containerd program that evaluates the edited files (default: the running one, or the one
    /// on PATH).
    #[arg(long, value_name = "PROGRAM")]
    containerd: Option<PathBuf>,
    /// containerd's main file (default: the one that the running containerd, its unit or its
    /// distribution names).
    #[arg(long, value_name = "FILE")]
    containerd_config: Option<PathBuf>,
    /// Make this file the node's /etc/bindguard/config.toml, if it is valid. A file that was edited
    /// on the node stays, and the installation counts as unfinished.
    #[arg(long, value_name = "FILE")]
    node_config: Option<PathBuf>,
    /// With --node-config, replace a file that was edited on the node.
    #[arg(long, requires = "node_config")]
    force_node_config: bool,
    #[command(flatten)]
    common: CommonOptions,
}

/// Arguments of both verbs.
#[derive(Debug, Args)]
pub struct CommonOptions {
    /// Print the planned changes and do nothing. The exit code is 1 if there is something to do.
    #[arg(long)]
    dry_run: bool,
    /// Work in another root file system: of an image, or of a node as a pod sees it. Every other
    /// path is in it.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Run the command that activates the changes, if there were any.
    #[arg(long)]
    restart: bool,
    /// Restart only while this command grants a slot, such as `bindguard-agent restart-slot`: it
    /// limits the nodes that restart at the same time.
    #[arg(long, value_name = "COMMAND", requires = "restart")]
    restart_slot: Option<String>,
    /// Print the changes as JSON.
    #[arg(long)]
    json: bool,
    /// Wait for SIGTERM afterwards, which changes nothing: for the pod of a DaemonSet. Unfinished
    /// work is tried again.
    #[arg(long, conflicts_with = "dry_run")]
    stay: bool,
}

impl CommonOptions {
    fn start_slot(&self) -> Result<Option<RestartSlot>> {
        let line = self.restart_slot.as_deref().filter(|_| !self.dry_run);
        line.map(RestartSlot::start).transpose()
    }
}

impl Install {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        // before signals are blocked, which a child inherits
        let slot = self.common.start_slot()?;
        let stay = self.common.stay.then(Stay::prepare).transpose()?;
        let programs = Programs::beside_this_one(self.agent)?;
        let prefix = self
            .prefix
            .clone()
            .unwrap_or_else(|| programs.usual_prefix(self.common.root.is_some()));
        let node_config = self
            .node_config
            .as_deref()
            .map(|file| NodeConfig::read(file, self.force_node_config))
            .transpose()?;
        root::enter(self.common.root.as_deref())?;
        let options = InstallOptions {
            prefix,
            default: self.default,
            wrapper: self.wrapper,
            containerd: self.containerd.clone(),
            containerd_config: self.containerd_config.clone(),
        };
        let install = || self.install(&programs, &options, node_config.as_ref(), slot.as_ref());
        let mut reporter = DriftReporter::default();
        let progress =
            stay.map_or_else(install, |stay| stay.after(install, || reporter.report()))?;
        Ok(progress.exit_code(self.common.dry_run))
    }

    fn install(
        &self,
        programs: &Programs,
        options: &InstallOptions,
        node_config: Option<&NodeConfig>,
        slot: Option<&RestartSlot>,
    ) -> Result<Progress> {
        programs.check_folder(&options.prefix)?;
        programs.check_folder(&versions::store(&options.prefix))?;
        let owners = if self.runtimes.is_empty() {
            &[Owner::Containerd][..]
        } else {
            &self.runtimes
        };
        let _lock = if self.common.dry_run {
            None
        } else {
            Some(lock::lock()?)
        };
        let mut record = Record::load()?;
        let mut report = InstallReport::default();
        let mut work = Vec::new();
        let mut done = Vec::new();
        for owner in owners
            .iter()
            .copied()
            .chain(self.agent.then_some(Owner::Agent))
        {
            let plan = target::plan(owner, options, &record)?;
            report.take(&plan);
            done.push((owner, plan.needs_runtime.clone(), plan.notes.clone()));
            work.extend(plan.into_steps(owner));
        }
        let mut needed = done.iter().filter_map(|(_, runtime, _)| runtime.as_deref());
        let runtime = needed.next();
        if let Some(other) = needed.find(|other| Some(*other) != runtime) {
            let runtime = runtime.map(name).unwrap_or_default();
            bail!(
                "install for these runtimes: one calls {runtime} and one {}; install for one of them",
                name(other)
            );
        }
        let settings = settings::plan(runtime, node_config, &record)?;
        settings
            .mistakes
            .into_iter()
            .for_each(|mistake| report.note(mistake));
        if let Some(kept) = settings.kept {
            report.unfinished(kept);
        }
        let own = programs
            .in_prefix(&options.prefix)?
            .into_iter()
            .chain(settings.change)
            .map(PlannedChange::own);
        let own: Vec<PlannedChange> = own.collect();
        let has_new_programs = own
            .iter()
            .any(|step| !step.change.is_none() && step.change.path != Path::new(DEFAULT_PATH));
        if self.agent && has_new_programs {
            report.command(Some(target::agent::RESTART));
        }
        if report
            .commands()
            .iter()
            .any(|command| command == target::agent::RESTART)
        {
            report.command_before(target::agent::RELOAD);
        }
        let work: Vec<PlannedChange> = own
            .into_iter()
            .chain(work)
            .filter(|step| !step.change.is_none())
            .collect();
        if !self.common.dry_run {
            work.iter()
                .try_for_each(|step| step.change.check_writable())?;
            work.iter().try_for_each(|step| put(&mut record, step))?;
            record.set_removal(None)?;
            versions::remove_unneeded(&mut record, &options.prefix)?;
            settings::keep()?;
            record.set_node_config(settings.wanted)?;
            for (owner, needs_runtime, notes) in done {
                let inputs = target::inputs_now(owner, options, &record)?.unwrap_or_default();
                record.verify(Installed {
                    owner,
                    options: options.clone(),
                    inputs,
                    notes,
                    needs_runtime,
                })?;
            }
        }
        let restarted = restart::restart(&mut record, &mut report, &self.common, slot);
        if self.common.restart && !self.common.dry_run {
            verify_generated_files(&mut record)?;
        }
        let progress = report.finish(&work, &self.common)?;
        restarted.map(|()| progress)
    }
}

/// k3s and its kin generate containerd's file when they start. What they made of the edited
/// template is the next plan's input.
fn verify_generated_files(record: &mut Record) -> Result<()> {
    for installed in record.installed().to_vec() {
        let Some(inputs) = target::inputs_now(installed.owner, &installed.options, record)? else {
            continue;
        };
        let is_new = inputs != installed.inputs;
        if is_new
            && target::plan(installed.owner, &installed.options, record)?
                .changes
                .iter()
                .all(Change::is_none)
        {
            record.verify(Installed {
                inputs,
                ..installed
            })?;
        }
    }
    Ok(())
}

/// Records a change, then makes it. Uninstall restores the content from before the *first* install.
/// If the file was edited since then, uninstall restores the edited file without bindguard in it.
fn put(record: &mut Record, step: &PlannedChange) -> Result<()> {
    let (owner, change) = (step.owner, &step.change);
    let original = match (record.entry(&change.path), &change.before) {
        (Some(entry), Some(before)) if entry.is_as_written(before) => entry.original()?,
        (Some(entry), Some(Content::File(before))) => {
            let original = entry.original()?;
            let bytes = target::cleaned(owner, before, original.as_ref().and_then(Content::bytes))?;
            Some(Content::File(bytes))
        }
        (_, before) => before.clone(),
    };
    let is_new = record.entry(&change.path).is_none();
    record.note(step, original.as_ref())?;
    record.owe(owner, step.command.as_deref())?;
    let applied = change.apply();
    let is_gone = applied.is_ok() && change.after.is_none();
    if is_gone || applied.is_err() && is_new {
        record.forget(&change.path)?;
    }
    applied
}

/// A file's name in messages.
fn name(path: &Path) -> String {
    path.display().to_string()
}
