//! The commands that activate changed files, and what depends on them: the slot of a fleet, a sandbox
//! through the handler, and the node's label. A restart is owed, in the record, until its command
//! succeeds or the daemon that read the former files has ended.

use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::program_names::RUNTIME;
use bindguard_operator::cri::trial::{self, LIMIT};
use bindguard_operator::root_program::{RootProgram, output_within, status_within};
use bindguard_operator::terminal::print_remark;
use bindguard_sys::write_new_file;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::options::{CommonOptions, InstallOptions, InstallReport, Owner, Progress};
use crate::record::Record;
use crate::running::{
    AGENT_RESTART, Daemon, active_config, containerds, has_handler, socket_of, wait_until_healthy,
};
use crate::runtimes::{agent, sandbox_image};

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

    /// Takes a slot. Returns why there is none.
    pub fn take(&mut self) -> Result<Option<String>> {
        self.is_freed = false;
        let answer = self.helper.answer("take")?;
        Ok((answer != "granted").then(|| reason(&answer)))
    }

    /// Frees the slot. Returns why it is not free.
    pub fn free(&mut self) -> Result<Option<String>> {
        if self.is_freed {
            return Ok(None);
        }
        let answer = self.helper.answer("done")?;
        self.is_freed = answer == "ok";
        Ok((!self.is_freed).then(|| reason(&answer)))
    }

    /// Keeps the slot, and marks it.
    pub fn fail(&mut self) -> Result<()> {
        let answer = self.helper.answer("failed")?;
        if answer == "ok" {
            Ok(())
        } else {
            bail!("mark the restart slot: {}", reason(&answer))
        }
    }
}

/// The time limit for an answer of the helper, which calls the API server: another installer waits
/// for this one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// The time that the helper has to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Helper {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
}

impl Helper {
    /// Starts the helper: before the root changes.
    pub fn start(line: &str) -> Result<Self> {
        let mut words = line.split(' ');
        let name = Path::new(words.next().unwrap_or_default());
        let program = RootProgram::find(name, None)?;
        let program = program.with_context(|| format!("find {}", name.display()))?;
        let mut process = program
            .command()
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {line}"))?;
        let stdin = process.stdin.take();
        let stdout = process.stdout.take().context("the helper's stdout")?;
        Ok(Self {
            process,
            stdin,
            stdout,
        })
    }

    /// The answer to a request.
    pub fn answer(&mut self, request: &str) -> Result<String> {
        let stdin = self.stdin.as_mut().context("the helper's stdin")?;
        writeln!(stdin, "{request}").context("write to the installer's helper")?;
        let line = self.line().context("read from the installer's helper")?;
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    fn line(&mut self) -> Result<Vec<u8>> {
        let (start, mut line) = (Instant::now(), Vec::new());
        while line.last() != Some(&b'\n') {
            let left = Timespec::try_from(ANSWER_TIMEOUT.saturating_sub(start.elapsed()))?;
            let ready = poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&left))?;
            ensure!(ready > 0, "no answer within {} s", ANSWER_TIMEOUT.as_secs());
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

/// The reason in an answer that is not the expected one.
pub fn reason(answer: &str) -> String {
    answer.strip_prefix("wait ").unwrap_or(answer).to_owned()
}

/// The line of node-feature-discovery's file, which is the label.
const FEATURE: &str = "feature.node.kubernetes.io/bindguard=true\n";

#[derive(Debug)]
enum Way {
    /// A helper that patches the node.
    Helper(Helper),
    /// A file that node-feature-discovery reads.
    Feature(PathBuf),
}

/// The label of this node.
#[derive(Debug)]
pub struct NodeLabel {
    way: Way,
    /// `None` until this process has set or removed the label.
    is_set: Option<bool>,
}

impl NodeLabel {
    /// The label that the options name. Starts the helper: before the root changes.
    pub fn start(common: &CommonOptions) -> Result<Option<Self>> {
        let way = match (&common.node_label, &common.node_feature) {
            _ if common.dry_run => return Ok(None),
            (Some(line), _) => Way::Helper(Helper::start(line)?),
            (None, Some(file)) => Way::Feature(file.clone()),
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { way, is_set: None }))
    }

    /// Sets or removes the label by the running daemon's active configuration, and by a sandbox before
    /// the label is set. A daemon that starts or does not answer changes nothing.
    pub fn follow(&mut self, try_sandbox: impl FnOnce() -> Result<()>) {
        let followed = match has_handler() {
            None => Ok(()),
            Some(false) => self.set(false),
            Some(true) if self.is_set == Some(true) => Ok(()),
            Some(true) => match try_sandbox() {
                Ok(()) => self.set(true),
                Err(error) => self.set(false).and(Err(error)),
            },
        };
        if let Err(error) = followed {
            print_remark(format_args!("this node is not labelled: {error:#}"));
        }
    }

    pub fn remove(&mut self) -> Result<()> {
        self.set(false)
    }

    fn set(&mut self, is_active: bool) -> Result<()> {
        if self.is_set == Some(is_active) {
            return Ok(());
        }
        let doing = if is_active { "set" } else { "remove" };
        let done = match &mut self.way {
            Way::Helper(helper) => helper.answer(doing).and_then(|answer| match &*answer {
                "ok" => Ok(()),
                other => bail!("{}", reason(other)),
            }),
            Way::Feature(file) => write_feature(file, is_active),
        };
        done.with_context(|| format!("{doing} the node's label for the handler {RUNTIME}"))?;
        self.is_set = Some(is_active);
        Ok(())
    }
}

fn write_feature(file: &Path, is_active: bool) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", file.display()));
        }
        Ok(()) | Err(_) => {}
    }
    if is_active {
        write_new_file(file, FEATURE.as_bytes(), 0o644)
            .with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// The hidden option of the process that runs the sandbox.
pub const OPTION: &str = "try-sandbox";

/// No pod starts through the handler.
#[derive(Debug, thiserror::Error)]
#[error("{0}; no pod starts through the handler {RUNTIME}")]
pub struct SandboxFailed(String);

/// Tries a sandbox in each containerd that is not one of `former`.
///
/// # Errors
/// If no pod starts ([`SandboxFailed`]), or containerd does not answer.
pub fn try_restarted(
    former: &[Daemon],
    options: &InstallOptions,
    record: &Record,
    report: &mut InstallReport,
) -> Result<()> {
    wait_until_healthy()?;
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
            Some(format!(
                "containerd, process {}, has no such handler",
                containerd.pid
            ))
        } else {
            // runc refuses a cgroup that is in no slice
            let is_systemd = handler["options"]["SystemdCgroup"] == true;
            let parent = if is_systemd { "system.slice" } else { "" };
            match sandbox_image(options, record) {
                Ok(Some(image)) => try_sandbox(&socket_of(&containerd), &image, parent)?,
                Ok(None) => Some("containerd's config names no image of a sandbox".to_owned()),
                Err(error) => Some(format!("{error:#}")),
            }
        };
        if let Some(why) = untried {
            report.note(format!(
                "a sandbox of the handler {RUNTIME} was not tried: {why}"
            ));
        }
    }
    Ok(())
}

fn try_sandbox(socket: &Path, image: &str, parent: &str) -> Result<Option<String>> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["install", &format!("--{OPTION}")]);
    command.arg(socket).args([image, parent]);
    match output_within(LIMIT, command) {
        Ok(said) => Ok(Some(said.trim_end().to_owned()).filter(|said| !said.is_empty())),
        Err(error) => Err(SandboxFailed(format!("{error:#}")).into()),
    }
}

/// Runs the sandbox, and removes it: the separate process.
pub fn run_trial_sandbox(words: &[String]) -> Result<()> {
    let [socket, image, parent] = words else {
        anyhow::bail!("--{OPTION} needs SOCKET IMAGE CGROUP");
    };
    let untried = trial::try_sandbox(Path::new(socket), RUNTIME, image, parent)
        .with_context(|| format!("try a sandbox by {socket}"))?;
    if let Some(why) = untried {
        println!("{why}");
    }
    Ok(())
}
