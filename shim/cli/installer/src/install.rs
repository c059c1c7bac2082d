//! `bindguard install`.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bindguard_config::DEFAULT_PATH;
use clap::Args;

use crate::change::Content;
use crate::drift::DriftReporter;
use crate::options::{
    CommonOptions, InstallOptions, InstallReport, Owner, PlannedChange, Progress,
};
use crate::process::{Stay, enter, lock};
use crate::programs::{Programs, remove_unneeded, store};
use crate::record::{Installed, Record};
use crate::removal::remember_docker_root;
use crate::restart::{
    self, NodeLabel, RestartSlot, SandboxFailed, run_trial_sandbox, try_restarted,
};
use crate::running::AGENT_RESTART;
use crate::settings::{self, NodeConfig};
use crate::{runtimes, search_path};

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
    /// Only run a sandbox through the handler, and remove it.
    #[arg(long, hide = true, num_args = 3, value_names = ["SOCKET", "IMAGE", "CGROUP"])]
    try_sandbox: Vec<String>,
    #[command(flatten)]
    common: CommonOptions,
}

impl Install {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        if !self.try_sandbox.is_empty() {
            run_trial_sandbox(&self.try_sandbox)?;
            return Ok(ExitCode::SUCCESS);
        }
        // before signals are blocked, which a child inherits
        let mut slot = RestartSlot::start(&self.common)?;
        let label = RefCell::new(NodeLabel::start(&self.common)?);
        let stay = self.common.stay.then(Stay::prepare).transpose()?;
        let programs = Programs::beside_this_one()?;
        // in another root there may be no /proc
        programs.check_run(self.agent)?;
        let prefix = self
            .prefix
            .clone()
            .unwrap_or_else(|| programs.usual_prefix(self.common.root.is_some()));
        let node_config = self
            .node_config
            .as_deref()
            .map(|file| NodeConfig::read(file, self.force_node_config))
            .transpose()?;
        enter(self.common.root.as_deref())?;
        let options = InstallOptions {
            prefix,
            default: self.default,
            wrapper: self.wrapper,
            containerd: self.containerd.clone(),
            containerd_config: self.containerd_config.clone(),
        };
        let follow = || {
            if let Some(label) = label.borrow_mut().as_mut() {
                label.follow(try_sandbox);
            }
        };
        let mut install = || {
            let done = self.install(&programs, &options, node_config.as_ref(), slot.as_mut());
            follow();
            done
        };
        let mut reporter = DriftReporter::default();
        let check = || {
            reporter.report();
            follow();
        };
        let progress = match stay {
            Some(stay) => stay.after(install, check),
            None => install(),
        }?;
        Ok(progress.exit_code(self.common.dry_run))
    }

    fn install(
        &self,
        programs: &Programs,
        options: &InstallOptions,
        node_config: Option<&NodeConfig>,
        slot: Option<&mut RestartSlot>,
    ) -> Result<Progress> {
        programs.check_folder(&options.prefix, self.agent)?;
        programs.check_folder(&store(&options.prefix), self.agent)?;
        let owners = if self.runtimes.is_empty() {
            &[Owner::Containerd][..]
        } else {
            &self.runtimes
        };
        let _lock = if self.common.dry_run {
            None
        } else {
            Some(lock()?)
        };
        let mut record = Record::load(runtimes::may_write)?;
        // a version without its program would end the agent
        let with_agent = self.agent || record.has_files_of(Owner::Agent);
        let mut report = InstallReport::default();
        record.refused().for_each(|refused| report.note(refused));
        let mut work = Vec::new();
        let mut done = Vec::new();
        for owner in owners
            .iter()
            .copied()
            .chain(self.agent.then_some(Owner::Agent))
        {
            let plan = runtimes::plan(owner, options, &record)?;
            report.take(&plan);
            done.push(Installed::planned(owner, options, &plan));
            work.extend(plan.into_steps(owner));
        }
        let planned = done
            .iter()
            .filter_map(|new| Some((new.owner, new.needs_runtime.as_deref()?)));
        let recorded = record
            .installed
            .iter()
            .filter(|old| done.iter().all(|new| new.owner != old.owner))
            .filter_map(|old| Some((old.owner, old.needs_runtime.as_deref()?)));
        let runtime = runtime_of_all(planned, recorded)?;
        let settings = settings::plan(runtime, node_config, &record)?;
        settings
            .mistakes
            .into_iter()
            .for_each(|mistake| report.note(mistake));
        if let Some(kept) = settings.kept {
            report.unfinished(kept);
        }
        let own = programs
            .in_prefix(&options.prefix, with_agent)?
            .into_iter()
            .chain(settings.change)
            .map(PlannedChange::own);
        let own: Vec<PlannedChange> = own.collect();
        let has_new_programs = own
            .iter()
            .any(|step| !step.change.is_none() && step.change.path != Path::new(DEFAULT_PATH));
        let restarts_agent = with_agent && has_new_programs;
        if restarts_agent {
            report.command(Some(AGENT_RESTART));
        }
        let work: Vec<PlannedChange> = own
            .into_iter()
            .chain(work)
            .filter(|step| !step.change.is_none())
            .collect();
        if self.common.dry_run && !has_new_programs {
            programs.check_installed(&options.prefix, with_agent)?;
        }
        if !self.common.dry_run {
            work.iter()
                .try_for_each(|step| step.change.check_writable())?;
            if restarts_agent {
                record.owe(Owner::Agent, Some(AGENT_RESTART))?;
            }
            let is_file = |step: &&PlannedChange| {
                step.owner == Owner::Bindguard
                    && matches!(step.change.after, Some(Content::File(_)))
            };
            let files = work.iter().take_while(is_file).count();
            for step in &work[..files] {
                runtimes::put(&mut record, step)?;
            }
            // before a link selects them, or a runtime's file names them
            programs.check_installed(&options.prefix, with_agent)?;
            for step in &work[files..] {
                runtimes::put(&mut record, step)?;
            }
            record.removal = None;
            remember_docker_root(&mut record, &self.common)?;
            remove_unneeded(&mut record, &options.prefix)?;
            settings::keep()?;
            record.node_config = settings.wanted;
            for planned in done {
                record.verify(planned);
            }
            record.save()?;
        }
        let installed = record.verified(Owner::Containerd);
        let installed = installed.map(|installed| installed.options.clone());
        let restarted = restart::restart(
            &mut record,
            &mut report,
            &self.common,
            installed.as_ref(),
            slot,
        );
        let restarted =
            match (restarted, installed) {
                (Err(error), Some(installed))
                    if installed.default && error.is::<SandboxFailed>() =>
                {
                    match take_default_back(installed, &mut record, &mut report) {
                    Ok(()) => Err(error.context("the former default runtime is back")),
                    Err(stays) => Err(error.context(format!(
                        "the default runtime starts no pod, and stays: {stays:#}; run bindguard uninstall --restart"
                    ))),
                }
                }
                (restarted, _) => restarted,
            };
        let progress = report.finish(&work, &self.common)?;
        restart::progress_after(restarted, progress, &self.common)
    }
}

/// Runs a sandbox through the handler, if containerd has it.
///
/// # Errors
/// If no pod of the handler starts.
fn try_sandbox() -> Result<()> {
    let record = Record::load(runtimes::may_write)?;
    match record.verified(Owner::Containerd) {
        Some(installed) => {
            let mut report = InstallReport::default();
            try_restarted(&[], &installed.options, &record, &mut report)
        }
        None => Ok(()),
    }
}

/// Makes the former default runtime the default again, and keeps the handler: a node must not have
/// a default under which no pod starts.
fn take_default_back(
    installed: InstallOptions,
    record: &mut Record,
    report: &mut InstallReport,
) -> Result<()> {
    let options = InstallOptions {
        default: false,
        ..installed
    };
    let plan = runtimes::plan(Owner::Containerd, &options, record)?;
    report.take(&plan);
    let command = plan.command.clone();
    let planned = Installed::planned(Owner::Containerd, &options, &plan);
    for step in plan.into_steps(Owner::Containerd) {
        if !step.change.is_none() {
            runtimes::put(record, &step)?;
        }
    }
    record.verify(planned);
    record.save()?;
    if let Some(command) = command {
        restart::run(&command).with_context(|| format!("run {command}"))?;
        record.restarted(&command)?;
    }
    Ok(())
}

/// The OCI runtime of the planned installations. bindguard-runtime calls one runtime for all of
/// them, and for the recorded ones.
fn runtime_of_all<'p>(
    mut planned: impl Iterator<Item = (Owner, &'p Path)>,
    recorded: impl Iterator<Item = (Owner, &'p Path)>,
) -> Result<Option<&'p Path>> {
    let Some((owner, runtime)) = planned.next() else {
        return Ok(None);
    };
    let program = |runtime: &Path| search_path::find(runtime).unwrap_or_else(|| runtime.to_owned());
    if let Some((other, another)) = planned
        .chain(recorded)
        .find(|(_, another)| program(another) != program(runtime))
    {
        bail!(
            "bindguard-runtime would call one OCI runtime for both: {} uses {}, and {} uses {}; install for one of them",
            owner.name(),
            runtime.display(),
            other.name(),
            another.display()
        );
    }
    Ok(Some(runtime))
}
