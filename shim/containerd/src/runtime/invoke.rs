//! One run of the runtime: its arguments, its streams, and what came of it.
//!
//! What the runtime prints goes to memory files, not to pipes. A container's init inherits the streams of the `create`
//! that made it, so a pipe would stay open as long as the container lives, and waiting for its end would wait for that.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Arc,
};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Pid, Signal, kill_process_group},
};
use tokio::process::{Child, Command};

use super::{Runtime, log_file::LogFile};
use crate::{exits::Exits, io::Wiring};

/// So much of a talkative runtime's stderr is kept for the error.
const STDERR_TAIL: u64 = 2048;

/// A run of the runtime that did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuntimeError {
    /// There is no such program.
    #[error("exec: {binary:?}: executable file not found in $PATH")]
    Missing {
        /// The name that was looked for.
        binary: String,
    },
    /// The program could not be run.
    #[error("run {program}: {source}")]
    Spawn {
        /// What was run.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// The runtime says no; the text is its own.
    #[error("{message}")]
    Failed {
        /// Its last error, or the end of its stderr, or its exit status.
        message: String,
    },
    /// The guard's policy says no.
    #[error("refused by bindguard: {reason}")]
    Refused {
        /// The policy's reason.
        reason: String,
    },
    /// The runtime succeeded and its answer makes no sense.
    #[error("read the answer of {verb}: {why}")]
    Answer {
        /// What was asked.
        verb: &'static str,
        /// What is wrong with it.
        why: String,
    },
}

/// Where a run's streams go.
pub(crate) enum Ends<'a> {
    /// To the shim.
    Caught,
    /// To the process that the runtime makes.
    Process(&'a Wiring),
}

/// A run of the runtime, not started yet.
pub(crate) struct Call {
    program: OsString,
    verb: &'static str,
    command: Command,
    log: LogFile,
    exits: Arc<Exits>,
}

/// A run that goes on.
pub(crate) struct Running {
    /// The process.
    pub(crate) child: Child,
    verb: &'static str,
    log: LogFile,
    stdout: File,
    stderr: File,
}

impl Call {
    /// `PROGRAM --root R --log L --log-format json [--systemd-cgroup] VERB ARGS`
    pub(crate) fn new(runtime: &Runtime, program: OsString, verb: &'static str, args: Vec<OsString>) -> Self {
        let log = LogFile::in_bundle(runtime.bundle.path(), verb);
        let mut command = Command::new(&program);
        command.arg("--root").arg(&runtime.root).arg("--log").arg(log.path()).args(["--log-format", "json"]);
        if runtime.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.arg(verb).args(args).current_dir(runtime.bundle.path()).stdin(Stdio::null());
        crate::kernel::die_with_parent(&mut command);
        Self { program, verb, command, log, exits: Arc::clone(&runtime.exits) }
    }

    /// Adds to the program's environment.
    pub(crate) fn env(&mut self, name: &str, value: impl Into<OsString>) {
        self.command.env(name, value.into());
    }

    /// Gives it a process group, so that `kill_group` reaches what it forked, too.
    pub(crate) fn lead_group(&mut self) {
        self.command.process_group(0);
    }

    /// Runs it to its end; the answer is what it printed.
    pub(crate) async fn run(self, ends: Ends<'_>) -> Result<Vec<u8>, RuntimeError> {
        let _hold = self.exits.hold();
        self.spawn(ends)?.finish().await
    }

    /// Starts it. The caller holds off the orphans' reaper.
    pub(crate) fn spawn(mut self, ends: Ends<'_>) -> Result<Running, RuntimeError> {
        let program = PathBuf::from(self.program).display().to_string();
        let failed = |source: io::Error| RuntimeError::Spawn { program: program.clone(), source };
        let (stdout, stderr) = (memory_file().map_err(failed)?, memory_file().map_err(failed)?);
        match ends {
            Ends::Caught => {
                self.command.stdout(stdout.try_clone().map_err(failed)?).stderr(stderr.try_clone().map_err(failed)?);
            }
            Ends::Process(wiring) => {
                let [stdin, out, err] = wiring.child_stdio().map_err(failed)?;
                self.command.stdin(stdin).stdout(out).stderr(err);
                // With a terminal nobody else has the runtime's stderr; the process itself never sees it.
                if !wiring.has_stderr() && wiring.console_socket().is_some() {
                    self.command.stderr(stderr.try_clone().map_err(failed)?);
                }
            }
        }
        let child = self.command.spawn().map_err(failed)?;
        Ok(Running { child, verb: self.verb, log: self.log, stdout, stderr })
    }
}

impl Running {
    /// Waits for the end.
    pub(crate) async fn finish(mut self) -> Result<Vec<u8>, RuntimeError> {
        let waited = self.child.wait().await;
        let status = waited.map_err(|source| RuntimeError::Spawn { program: self.verb.to_owned(), source })?;
        let last_error = self.log.read();
        if status.success() {
            return Ok(read_from(&mut self.stdout, 0));
        }
        Err(RuntimeError::Failed { message: self.message(status, last_error) })
    }

    /// Kills it and what it forked; to be used for a run that leads a group.
    pub(crate) fn kill_group(&mut self) {
        let group = self.child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Passes on what the log holds so far, for a run that is not waited for.
    pub(crate) fn forward_log(&self) {
        self.log.read();
    }

    fn message(&mut self, status: ExitStatus, last_error: Option<String>) -> String {
        let tail = || {
            let length = self.stderr.metadata().map_or(0, |meta| meta.len());
            let bytes = read_from(&mut self.stderr, length.saturating_sub(STDERR_TAIL));
            Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|text| !text.is_empty())
        };
        last_error
            .filter(|message| !message.is_empty())
            .or_else(tail)
            .unwrap_or_else(|| format!("{}: {status}", self.verb))
    }
}

fn memory_file() -> io::Result<File> {
    Ok(memfd_create("runtime-output", MemfdFlags::CLOEXEC)?.into())
}

fn read_from(file: &mut File, start: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_to_end(&mut bytes));
    if let Err(error) = read {
        tracing::warn!(%error, "cannot read what the runtime printed");
    }
    bytes
}
