//! The commands that activate changed files. A restart is owed, in the record, until its command
//! succeeds or the daemon that read the former files has ended.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_operator::root_program::{RootProgram, status_within};
use bindguard_operator::terminal::print_remark;

use crate::options::CommonOptions;
use crate::owner::Owner;
use crate::plan::InstallOptions;
use crate::record::Record;
use crate::report::{InstallReport, Progress};
use crate::restart_slot::RestartSlot;
use crate::running::{AGENT_RESTART, containerds, wait_until_healthy};
use crate::runtimes::agent;
use crate::trial_sandbox::try_restarted;

/// The time limit for a command: systemd waits longer for a service that never reports its start, and
/// another installer waits for the lock meanwhile.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);

/// Adds the owed restarts to the report, and runs all of its commands if `--restart` is set. With
/// `--restart-slot` it runs them only with a slot, which a healthy runtime frees. A restarted
/// containerd is healthy only if a sandbox of `installed`, the present installation, starts.
///
/// # Errors
/// If a command or the sandbox fails. The restart stays owed, so print the report before the error.
pub fn restart(
    record: &mut Record,
    report: &mut InstallReport,
    common: &CommonOptions,
    installed: Option<&InstallOptions>,
    slot: Option<&mut RestartSlot>,
) -> Result<()> {
    record
        .owed()
        .iter()
        .for_each(|owed| report.command(Some(&owed.command)));
    let restarts_agent = |command: &String| command == AGENT_RESTART;
    if report.commands().iter().any(restarts_agent) {
        report.command_before(agent::RELOAD);
    }
    if common.dry_run && common.restart && !report.commands().is_empty() {
        report.unfinished("a restart is owed: a daemon has not read its changed file".to_owned());
    }
    if !common.restart || common.dry_run {
        return Ok(());
    }
    let Some(slot) = slot else {
        return run_all(record, report, installed);
    };
    if report.commands().is_empty() {
        // an earlier process of this node may have left the slot
        return after_restart(slot, report);
    }
    if let Some(reason) = slot.take()? {
        report.unfinished(format!("the restart waits for a slot: {reason}"));
        return Ok(());
    }
    if let Err(error) = run_all(record, report, installed).and_then(|()| wait_until_healthy()) {
        return match slot.fail() {
            Ok(()) => Err(error),
            Err(unmarked) => Err(error.context(unmarked)),
        };
    }
    after_restart(slot, report)
}

/// The state after the restarts. The process of a pod tries again after a failure, with longer and
/// longer pauses: a new container would start at once.
///
/// # Errors
/// If a restart failed, without `--stay`.
pub fn progress_after(
    restarted: Result<()>,
    progress: Progress,
    common: &CommonOptions,
) -> Result<Progress> {
    match restarted {
        Ok(()) => Ok(progress),
        Err(error) if common.stay => {
            print_remark(format_args!("{error:#}"));
            Ok(Progress::Unfinished)
        }
        Err(error) => Err(error),
    }
}

fn after_restart(slot: &mut RestartSlot, report: &mut InstallReport) -> Result<()> {
    wait_until_healthy()?;
    if let Some(reason) = slot.free()? {
        report.unfinished(format!("the slot of this node is not free yet: {reason}"));
    }
    Ok(())
}

fn run_all(
    record: &mut Record,
    report: &mut InstallReport,
    installed: Option<&InstallOptions>,
) -> Result<()> {
    let owed = record.owed();
    let of_containerd = owed.iter().find(|owed| owed.owner == Owner::Containerd);
    let former = containerds();
    for command in report.commands().to_vec() {
        run(&command).with_context(|| {
            format!("activate the changes: {command}; run it, or this command again")
        })?;
        record.restarted(&command)?;
    }
    report.ran_commands();
    if let (Some(owed), Some(options)) = (of_containerd, installed)
        && former.iter().any(|daemon| !daemon.still_runs())
    {
        // until a sandbox ran: this process may be killed, or the sandbox may fail
        record.owe(Owner::Containerd, Some(&owed.command))?;
        try_restarted(&former, options, record, report)?;
        record.restarted(&owed.command)?;
    }
    Ok(())
}

/// Runs a command that activates changes.
///
/// # Errors
/// If the command fails, or does not end in time.
pub fn run(line: &str) -> Result<()> {
    let mut words = line.split(' ');
    let name = words.next().unwrap_or_default();
    // a pod's PATH is that of its image, and the program is the node's
    let program = RootProgram::find(Path::new(name), None)?;
    let program = program.with_context(|| format!("find {name}"))?;
    let mut command = program.command();
    // an image or a pod may have no /dev/null
    command.args(words).stdin(Stdio::inherit());
    let status = status_within(COMMAND_TIMEOUT, command).context("run it")?;
    ensure!(status.success(), "{status}");
    Ok(())
}
