//! `bindguard install`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use bindguard_config::keep_valid;
use bindguard_core::error_chain;
use clap::Args;

use crate::change::{Content, Owner};
use crate::drift;
use crate::own_files::{NodeConfig, Programs, plan_config, remove_unneeded, store};
use crate::record::{InstallOptions, Installed, Record};
use crate::removal::make;
use crate::restart::{self, NodeLabel, RestartSlot, SandboxFailed, run_trial_sandbox};
use crate::running::{AGENT_RESTART, find};
use crate::runtimes;
use crate::session::{CommonOptions, Progress, Session, Stay, enter};

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
        let mut label = NodeLabel::start(&self.common)?;
        let stay = Stay::prepare(&self.common)?;
        let mut programs = Programs::beside_this_one(self.agent)?;
        // in another root there may be no /proc
        programs.check_run()?;
        let options = InstallOptions {
            prefix: match &self.prefix {
                Some(prefix) => prefix.clone(),
                None => programs.usual_prefix(self.common.root.is_some()),
            },
            default: self.default,
            wrapper: self.wrapper,
            containerd: self.containerd.clone(),
            containerd_config: self.containerd_config.clone(),
        };
        let node_config = match &self.node_config {
            Some(file) => Some(NodeConfig::read(file, self.force_node_config)?),
            None => None,
        };
        enter(self.common.root.as_deref())?;
        let mut reported = Vec::new();
        let progress = stay.after(|is_done| {
            let progress = if is_done {
                drift::report(&mut reported);
                Ok(Progress::Done)
            } else {
                self.install(&mut programs, &options, node_config.as_ref(), slot.as_mut())
            };
            if let Some(label) = &mut label {
                label.follow();
            }
            progress
        })?;
        Ok(progress.exit_code(self.common.dry_run))
    }

    fn install(
        &self,
        programs: &mut Programs,
        options: &InstallOptions,
        node_config: Option<&NodeConfig>,
        slot: Option<&mut RestartSlot>,
    ) -> Result<Progress> {
        let prefix = &options.prefix;
        programs.check_folder(prefix)?;
        programs.check_folder(&store(prefix))?;
        let mut owners = self.runtimes.clone();
        if owners.is_empty() {
            owners.push(Owner::Containerd);
        }
        if self.agent {
            owners.push(Owner::Agent);
        }
        let mut session = Session::begin(&self.common)?;
        let (record, report) = (&mut session.record, &mut session.report);
        // a version without its program would end the agent
        programs.with_agent = self.agent || record.has_files_of(Owner::Agent);
        report.notes.extend(record.refused());
        let mut changes = Vec::new();
        let mut done = Vec::new();
        for owner in owners {
            let (installed, plan) = runtimes::plan(owner, options, record)?;
            report.take(&plan);
            done.push(installed);
            changes.extend(plan.changes);
        }
        let runtime = runtime_of_all(&done, record)?;
        let settings = plan_config(runtime, node_config, record)?;
        report.notes.extend(settings.mistakes);
        if let Some(kept) = settings.kept {
            report.unfinished(kept);
        }
        let (folder, mut work) = programs.in_prefix(prefix)?;
        let has_new_programs = work.iter().any(|change| !change.is_none());
        let restarts_agent = programs.with_agent && has_new_programs;
        if restarts_agent {
            report.command(Some(AGENT_RESTART));
        }
        work.extend(settings.change);
        work.extend(changes);
        work.retain(|change| !change.is_none());
        if !self.common.dry_run {
            for change in &work {
                change.check_writable()?;
            }
            if restarts_agent {
                record.owe(Owner::Agent, Some(AGENT_RESTART))?;
            }
            let first_other = work.iter().position(|change| {
                change.owner != Owner::Bindguard || !matches!(change.after, Some(Content::File(_)))
            });
            let (files, others) = work.split_at(first_other.unwrap_or(work.len()));
            runtimes::put(record, files)?;
            // before a link selects them, or a runtime's file names them
            programs.check_installed(&folder)?;
            // It would take this installation away if a later step fails.
            record.removal = None;
            record.save()?;
            runtimes::put(record, others)?;
            record.remember_docker_root()?;
            remove_unneeded(record, prefix)?;
            keep_valid().map_err(|error| anyhow!(error_chain(&error)))?;
            record.node_config = settings.wanted;
            for planned in done {
                record.verify(planned);
            }
            record.save()?;
        } else if !has_new_programs {
            programs.check_installed(&folder)?;
        }
        session.work = work;
        let mut restarted = restart::restart(&mut session, true, slot);
        let installed = session.record.verified(Owner::Containerd);
        if let (Err(error), Some(installed)) = (&restarted, installed.cloned())
            && installed.options.default
            && error.is::<SandboxFailed>()
        {
            let back = take_default_back(installed, &mut session);
            restarted = restarted.context(match back {
                Ok(()) => "the former default runtime is back".to_owned(),
                Err(stays) => format!(
                    "the default runtime starts no pod, and stays: {stays:#}; run bindguard uninstall --restart"
                ),
            });
        }
        session.finish(restarted)
    }
}

/// Makes the former default runtime the default again, and keeps the handler: a node must not have
/// a default under which no pod starts.
fn take_default_back(installed: Installed, session: &mut Session) -> Result<()> {
    let options = installed.without_default();
    let (installed, plan) = runtimes::plan(Owner::Containerd, &options, &session.record)?;
    let command = plan.command.clone();
    make(installed, plan, session)?;
    if let Some(command) = command {
        restart::run(&command).with_context(|| format!("run {command}"))?;
        session.record.restarted(&command)?;
    }
    Ok(())
}

/// The OCI runtime of the planned installations. bindguard-runtime calls one runtime for all of
/// them, and for the recorded ones.
fn runtime_of_all<'p>(planned: &'p [Installed], record: &Record) -> Result<Option<&'p Path>> {
    let replaced = |old: &&Installed| planned.iter().any(|new| new.owner == old.owner);
    let recorded = record.installed.iter().filter(|old| !replaced(old));
    let program = |runtime: &Path| find(runtime).unwrap_or_else(|| runtime.to_owned());
    let mut first = planned
        .iter()
        .filter_map(|new| Some((new.owner, new.needs_runtime.as_deref()?)));
    let Some((owner, runtime)) = first.next() else {
        return Ok(None);
    };
    for installed in planned.iter().chain(recorded) {
        if let Some(another) = installed.needs_runtime.as_deref()
            && program(another) != program(runtime)
        {
            bail!(
                "bindguard-runtime would call one OCI runtime for both: {} uses {}, and {} uses {}; install for one of them",
                owner,
                runtime.display(),
                installed.owner,
                another.display()
            );
        }
    }
    Ok(Some(runtime))
}
