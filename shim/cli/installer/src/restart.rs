//! The commands that activate changed files, and what depends on them: the slot of a fleet, a sandbox
//! through the handler, and the node's label. A restart is owed, in the record, until its command
//! succeeds or the daemon that read the former files has ended.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use bindguard_core::handover::RUNTIME;
use bindguard_operator::cri::{self, TRIAL_LIMIT};
use bindguard_operator::root_program::{RootProgram, output_within, status_within};
use bindguard_operator::terminal::print_remark;
use bindguard_sys::write_new_file;

use crate::change::{Doing, Owner};
use crate::record::{Record, remove_file};
use crate::running::{
    AGENT_RESTART, Daemon, active_config, containerds, has_handler, socket_of, wait_until_healthy,
};
use crate::runtimes::{RELOAD_UNITS, recorded, sandbox_image};
use crate::session::{CommonOptions, Session, is_readable};

/// The time limit for a command: systemd waits longer for a service that never reports its start, and
/// another installer waits for the lock meanwhile.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);

/// Adds the owed restarts to the report, and runs all of its commands if `--restart` is set. With
/// `--restart-slot` it runs them only with a slot, which a healthy runtime frees. With `tries_sandbox`
/// a restarted containerd is healthy only if a sandbox of the present installation starts.
///
/// # Errors
/// If a command or the sandbox fails. The restart stays owed, so print the report before the error.
pub fn restart(
    session: &mut Session,
    tries_sandbox: bool,
    slot: Option<&mut RestartSlot>,
) -> Result<()> {
    let (common, report) = (session.common, &mut session.report);
    for owed in session.record.owed() {
        report.command(Some(&owed.command));
    }
    let has = |command: &str| report.commands.iter().any(|it| it == command);
    if has(AGENT_RESTART) && !has(RELOAD_UNITS) {
        report.commands.insert(0, RELOAD_UNITS.to_owned());
    }
    let is_needed = !report.commands.is_empty();
    if common.dry_run && common.restart && is_needed {
        report.unfinished("a restart is owed: a daemon has not read its changed file".to_owned());
    }
    if !common.restart || common.dry_run {
        return Ok(());
    }
    let Some(slot) = slot else {
        return run_all(session, tries_sandbox);
    };
    // without a command: an earlier process of this node may have left the slot
    if is_needed {
        slot.is_freed = false;
        if let Some(reason) = slot.helper.refusal("take", "granted")? {
            report.unfinished(format!("the restart waits for a slot: {reason}"));
            return Ok(());
        }
        let restarted = run_all(session, tries_sandbox).and_then(|()| wait_until_healthy());
        if let Err(error) = restarted {
            // the slot is kept, and marked
            return Err(match slot.helper.refusal("failed", "ok") {
                Ok(None) => error,
                Ok(Some(reason)) => error.context(format!("mark the restart slot: {reason}")),
                Err(unmarked) => error.context(unmarked),
            });
        }
    }
    wait_until_healthy()?;
    if !slot.is_freed {
        match slot.helper.refusal("done", "ok")? {
            None => slot.is_freed = true,
            Some(reason) => session
                .report
                .unfinished(format!("the slot of this node is not free yet: {reason}")),
        }
    }
    Ok(())
}

fn run_all(session: &mut Session, tries_sandbox: bool) -> Result<()> {
    let mut owed = session.record.owed().into_iter();
    let owed = owed.find(|owed| owed.owner == Owner::Containerd);
    let former = containerds();
    for command in &session.report.commands {
        run(command).with_context(|| {
            format!("activate the changes: {command}; run it, or this command again")
        })?;
        session.record.restarted(command)?;
    }
    session.report.restarted = !session.report.commands.is_empty();
    if tries_sandbox
        && let Some(owed) = owed
        && session.record.verified(Owner::Containerd).is_some()
        && former.iter().any(|daemon| !daemon.still_runs())
    {
        // until a sandbox ran: this process may be killed, or the sandbox may fail
        session.record.owe(Owner::Containerd, Some(&owed.command))?;
        let notes = try_restarted(&former, &session.record)?;
        session.report.notes.extend(notes);
        session.record.restarted(&owed.command)?;
    }
    Ok(())
}

/// Runs a command that activates changes.
///
/// # Errors
/// If the command fails, or does not end in time.
pub fn run(line: &str) -> Result<()> {
    let (_program, mut command) = command_of(line)?;
    // an image or a pod may have no /dev/null
    command.stdin(Stdio::inherit());
    let status = status_within(COMMAND_TIMEOUT, command).context("run it")?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// The command of a line, which runs the open program.
fn command_of(line: &str) -> Result<(RootProgram, Command)> {
    let mut words = line.split(' ');
    let name = words.next().unwrap_or_default();
    // a pod's PATH is that of its image, and the program is the node's
    let program = RootProgram::find(Path::new(name), None)?;
    let program = program.with_context(|| format!("find {name}"))?;
    let mut command = program.command();
    command.args(words);
    Ok((program, command))
}

/// The slot of this node.
#[derive(Debug)]
pub struct RestartSlot {
    helper: Helper,
    /// False until this process knows that the node has no slot.
    is_freed: bool,
}

impl RestartSlot {
    /// The slot that the options name. Starts the helper: before the root changes.
    pub fn start(common: &CommonOptions) -> Result<Option<Self>> {
        let Some(line) = common.restart_slot.as_deref().filter(|_| !common.dry_run) else {
            return Ok(None);
        };
        Ok(Some(Self {
            helper: Helper::start(line)?,
            is_freed: false,
        }))
    }
}

/// The time limit for an answer of the helper, which calls the API server: another installer waits
/// for this one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// The time that the helper has to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A program of the image that calls the API server: started before the root changes.
#[derive(Debug)]
struct Helper {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
}

impl Helper {
    fn start(line: &str) -> Result<Self> {
        let (_program, mut command) = command_of(line)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().with_context(|| format!("start {line}"))?;
        Ok(Self {
            stdin: process.stdin.take(),
            stdout: process.stdout.take().context("the helper's stdout")?,
            process,
        })
    }

    /// The reason in an answer that is not the expected one.
    fn refusal(&mut self, request: &str, expected: &str) -> Result<Option<String>> {
        let stdin = self.stdin.as_mut().context("the helper's stdin")?;
        writeln!(stdin, "{request}").context("write to the installer's helper")?;
        let line = self.line().context("read from the installer's helper")?;
        let line = String::from_utf8_lossy(&line);
        let answer = line.trim_end();
        if answer == expected {
            return Ok(None);
        }
        let reason = answer.strip_prefix("wait ").unwrap_or(answer);
        Ok(Some(reason.to_owned()))
    }

    fn line(&mut self) -> Result<Vec<u8>> {
        let (start, mut line) = (Instant::now(), Vec::new());
        while line.last() != Some(&b'\n') {
            let left = ANSWER_TIMEOUT.saturating_sub(start.elapsed());
            let is_answered = is_readable(&self.stdout, left)?;
            ensure!(
                is_answered,
                "no answer within {} s",
                ANSWER_TIMEOUT.as_secs()
            );
            let mut byte = [0];
            if self.stdout.read(&mut byte)? == 0 {
                bail!("it has ended");
            }
            line.extend(byte);
        }
        Ok(line)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // the helper ends when its stdin ends
        drop(self.stdin.take());
        let start = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) {
            if start.elapsed() > END_TIMEOUT {
                let _ = self.process.kill();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The line of node-feature-discovery's file, which is the label.
const FEATURE: &str = "feature.node.kubernetes.io/bindguard=true\n";

/// The label of this node, by a helper that patches the node, or by a file that
/// node-feature-discovery reads.
#[derive(Debug)]
pub struct NodeLabel {
    helper: Option<Helper>,
    file: PathBuf,
    /// `None` until this process has set or removed the label.
    is_set: Option<bool>,
}

impl NodeLabel {
    /// The label that the options name. Starts the helper: before the root changes.
    pub fn start(common: &CommonOptions) -> Result<Option<Self>> {
        let (line, file) = (&common.node_label, &common.node_feature);
        if common.dry_run || line.is_none() && file.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            helper: line.as_deref().map(Helper::start).transpose()?,
            file: file.clone().unwrap_or_default(),
            is_set: None,
        }))
    }

    /// Sets or removes the label by the running daemon's active configuration, and by a sandbox before
    /// the label is set. A daemon that starts or does not answer changes nothing.
    pub fn follow(&mut self) {
        let followed = match has_handler() {
            None => Ok(()),
            Some(false) => self.set(false),
            Some(true) if self.is_set == Some(true) => Ok(()),
            Some(true) => match try_installed() {
                Ok(_) => self.set(true),
                Err(error) => self.set(false).and(Err(error)),
            },
        };
        if let Err(error) = followed {
            print_remark(format_args!("this node is not labelled: {error:#}"));
        }
    }

    pub fn set(&mut self, is_active: bool) -> Result<()> {
        if self.is_set == Some(is_active) {
            return Ok(());
        }
        let doing = if is_active { "set" } else { "remove" };
        let done = match &mut self.helper {
            Some(helper) => match helper.refusal(doing, "ok") {
                Ok(Some(reason)) => Err(Error::msg(reason)),
                other => other.map(drop),
            },
            None => remove_file(&self.file).and_then(|()| match is_active {
                true => {
                    write_new_file(&self.file, FEATURE.as_bytes(), 0o644).doing("write", &self.file)
                }
                false => Ok(()),
            }),
        };
        done.with_context(|| format!("{doing} the node's label for the handler {RUNTIME}"))?;
        self.is_set = Some(is_active);
        Ok(())
    }
}

/// The hidden option of the process that runs the sandbox.
const OPTION: &str = "try-sandbox";

/// No pod starts through the handler.
#[derive(Debug, thiserror::Error)]
#[error("{0}; no pod starts through the handler {RUNTIME}")]
pub struct SandboxFailed(String);

/// Tries a sandbox in each containerd that is not one of `former`. Returns why none was tried.
///
/// # Errors
/// If no pod starts ([`SandboxFailed`]), or containerd does not answer.
pub fn try_restarted(former: &[Daemon], record: &Record) -> Result<Vec<String>> {
    wait_until_healthy()?;
    let mut notes = Vec::new();
    for containerd in containerds() {
        if former.contains(&containerd) {
            continue;
        }
        // a containerd without CRI has no pods
        let Some(config) = active_config(&containerd)? else {
            continue;
        };
        let handler = &config["containerd"]["runtimes"][RUNTIME];
        let untried = if handler.is_null() {
            let pid = containerd.pid;
            format!("containerd, process {pid}, has no such handler")
        } else {
            // runc refuses a cgroup that is in no slice
            let is_systemd = handler["options"]["SystemdCgroup"] == true;
            let parent = if is_systemd { "system.slice" } else { "" };
            match sandbox_image(record) {
                Ok(Some(image)) => try_sandbox(&socket_of(&containerd), &image, parent)?,
                Ok(None) => "containerd's config names no image of a sandbox".to_owned(),
                Err(error) => format!("{error:#}"),
            }
        };
        if !untried.is_empty() {
            notes.push(format!(
                "a sandbox of the handler {RUNTIME} was not tried: {untried}"
            ));
        }
    }
    Ok(notes)
}

/// Tries a sandbox in each containerd of which an installation is recorded.
fn try_installed() -> Result<Vec<String>> {
    let record = recorded()?;
    match record.verified(Owner::Containerd) {
        Some(_) => try_restarted(&[], &record),
        None => Ok(Vec::new()),
    }
}

/// Runs a sandbox in a separate process, which prints why the sandbox was not tried.
fn try_sandbox(socket: &Path, image: &str, parent: &str) -> Result<String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["install", &format!("--{OPTION}")]);
    command.arg(socket).args([image, parent]);
    match output_within(TRIAL_LIMIT, command) {
        Ok(said) => Ok(said.trim_end().to_owned()),
        Err(error) => Err(SandboxFailed(format!("{error:#}")).into()),
    }
}

/// Runs the sandbox, and removes it: the separate process.
pub fn run_trial_sandbox(words: &[String]) -> Result<()> {
    let [socket, image, parent] = words else {
        bail!("--{OPTION} needs SOCKET IMAGE CGROUP");
    };
    let untried = cri::try_sandbox(Path::new(socket), RUNTIME, image, parent)
        .with_context(|| format!("try a sandbox by {socket}"))?;
    if let Some(why) = untried {
        println!("{why}");
    }
    Ok(())
}
