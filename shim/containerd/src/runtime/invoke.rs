//! A run of the runtime: arguments, streams and result.
//!
//! The runtime's output goes to memory files, not to pipes. A container's init inherits the streams
//! of its `create`. So a pipe would stay open, and a wait for its end would last, as long as the
//! container lives.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process_group};

use super::Runtime;
use super::log_file::LogFile;
use crate::exits::{Exit, Exits, Watched};
use crate::io::PreparedIo;
use crate::kernel;

/// The limit of the runtime's stderr that is kept for the error.
const STDERR_TAIL: u64 = 2048;

/// A run of the runtime that failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The runtime reports an error, in its own text, or could not be run, or its output is invalid.
    #[error("{message}")]
    Failed { message: String },
    /// The runtime failed, and neither its log nor a stderr that the shim captured gives a reason.
    #[error("{verb}: exit status {status}")]
    Unexplained {
        verb: &'static str,
        /// The exit status as in a shell.
        status: u32,
    },
    /// The runtime failed, and an unrepaired bind explains the failure.
    #[error("{failure}; bindguard: {reason}")]
    Unrepaired {
        failure: Box<RuntimeError>,
        /// The fault of the bind, and the next step.
        reason: String,
    },
    /// The guard's policy refuses the container.
    #[error("refused by bindguard: {reason}")]
    Refused { reason: String },
}

/// The destinations of a run's streams.
pub enum RunStreams<'a> {
    /// To the shim, which needs them only for an error.
    Captured,
    /// To the shim, which needs the output on stdout.
    CapturedStdout,
    /// To the process that the runtime makes.
    Process(&'a PreparedIo),
}

/// A run of the runtime, not started yet.
pub struct RuntimeCall {
    program: PathBuf,
    verb: &'static str,
    arguments: Vec<OsString>,
    /// Added to the program's environment.
    pub environment: Vec<(&'static str, OsString)>,
    directory: PathBuf,
    /// Passed to the child, under the same number. No other child inherits the descriptor.
    pub inherited: Option<OwnedFd>,
    /// The run gets a process group, so that `kill_group` also reaches forked processes.
    pub leads_group: bool,
    log: LogFile,
    exits: Arc<Exits>,
}

/// A run that has started.
pub struct Running {
    child: Watched,
    verb: &'static str,
    log: LogFile,
    stdout_file: Option<File>,
    stderr_file: Option<File>,
}

impl RuntimeCall {
    /// `PROGRAM --root R --log L --log-format json [--systemd-cgroup] VERB ARGS`
    pub fn new(
        runtime: &Runtime,
        program: PathBuf,
        verb: &'static str,
        args: Vec<OsString>,
    ) -> Self {
        let log = LogFile::in_bundle(&runtime.bundle.path, verb);
        // containerd may have removed the bundle of a container whose create it gave up.
        let directory = if runtime.bundle.is_gone() {
            PathBuf::from("/")
        } else {
            runtime.bundle.path.clone()
        };
        let mut arguments: Vec<OsString> = vec!["--root".into(), (&runtime.root).into()];
        arguments.extend(["--log".into(), (&log.path).into()]);
        arguments.extend(["--log-format".into(), "json".into()]);
        if runtime.systemd_cgroup {
            arguments.push("--systemd-cgroup".into());
        }
        arguments.push(verb.into());
        arguments.extend(args);
        Self {
            program,
            verb,
            arguments,
            environment: vec![],
            directory,
            inherited: None,
            leads_group: false,
            log,
            exits: Arc::clone(&runtime.exits),
        }
    }

    /// Runs the runtime to its end; returns the output with `RunStreams::CapturedStdout`.
    pub async fn run(self, streams: RunStreams<'_>) -> Result<Vec<u8>, RuntimeError> {
        self.spawn(streams)?.finish().await
    }

    pub fn spawn(self, streams: RunStreams<'_>) -> Result<Running, RuntimeError> {
        let program = self.program.display().to_string();
        self.try_spawn(streams)
            .map_err(|error| RuntimeError::Failed {
                message: format!("run {program}: {error}"),
            })
    }

    fn try_spawn(self, streams: RunStreams<'_>) -> io::Result<Running> {
        let (mut stdout_file, mut stderr_file) = (None, None);
        let mut command = Command::new(&self.program);
        match streams {
            RunStreams::Captured | RunStreams::CapturedStdout => {
                let stderr = &*stderr_file.insert(memory_file()?);
                let mut stdout = stderr;
                if matches!(streams, RunStreams::CapturedStdout) {
                    stdout = stdout_file.insert(memory_file()?);
                }
                command.stdin(Stdio::null());
                command.stdout(stdio(Some(stdout.as_fd()))?);
                command.stderr(stdio(Some(stderr.as_fd()))?);
            }
            RunStreams::Process(prepared_io) => {
                let [stdin, stdout, stderr] = prepared_io.child_streams();
                // With a terminal the runtime's stderr has no reader, and the container's process
                // does not get this stderr.
                if stderr.is_none() && prepared_io.console_socket().is_some() {
                    stderr_file = Some(memory_file()?);
                }
                let captured = stderr_file.as_ref().map(AsFd::as_fd);
                command.stdin(stdio(stdin)?);
                command.stdout(stdio(stdout)?);
                command.stderr(stdio(stderr.or(captured))?);
            }
        }
        command
            .args(self.arguments)
            .envs(self.environment)
            .current_dir(self.directory);
        if self.leads_group {
            command.process_group(0);
        }
        kernel::die_with_this_thread(&mut command);
        kernel::with_default_signals(&mut command);
        if let Some(fd) = self.inherited {
            kernel::inherit(&mut command, fd);
        }
        let child = command.spawn()?;
        Ok(Running {
            child: Watched::child(child.id(), &self.exits)?,
            verb: self.verb,
            log: self.log,
            stdout_file,
            stderr_file,
        })
    }
}

/// /dev/null in place of a missing stream.
fn stdio(fd: Option<BorrowedFd<'_>>) -> io::Result<Stdio> {
    match fd {
        Some(fd) => Ok(fd.try_clone_to_owned()?.into()),
        None => Ok(Stdio::null()),
    }
}

impl Running {
    /// Waits for the end.
    pub async fn finish(self) -> Result<Vec<u8>, RuntimeError> {
        let exit = self.child.exit().await;
        self.result(exit)
    }

    /// Waits for the end for at most `limit`. `None` if the run had to be killed; it must lead a
    /// group.
    pub async fn finish_within(self, limit: Duration) -> Option<Result<Vec<u8>, RuntimeError>> {
        if let Ok(exit) = tokio::time::timeout(limit, self.child.exit()).await {
            return Some(self.result(exit));
        }
        self.kill_group();
        // Passes on its current content.
        self.log.read();
        // In the kernel it may hang for as long as a server does.
        tokio::spawn(async move { self.child.exit().await });
        None
    }

    fn result(self, exit: Exit) -> Result<Vec<u8>, RuntimeError> {
        let last_error = self.log.read();
        if exit.status == 0 {
            let stdout = self.stdout_file.map(|file| read_from(file, 0));
            return Ok(stdout.unwrap_or_default());
        }
        let unexplained = RuntimeError::Unexplained {
            verb: self.verb,
            status: exit.status,
        };
        let message = last_error.filter(|text| !text.is_empty());
        Err(unexplained.explained_by(message.or_else(|| self.stderr_file.and_then(tail))))
    }

    /// Kills the runtime and its forked processes. Call before the end of a run that leads a group.
    pub fn kill_group(&self) {
        if let Some(group) = i32::try_from(self.child.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl RuntimeError {
    /// The error of the last try. Some runtimes explain an error only on the process's stderr, as
    /// crun does for a missing program: then the error quotes the end of this output. A log file
    /// gets the whole output.
    pub fn into_final(self, prepared_io: &PreparedIo) -> Self {
        let message = prepared_io.last_output();
        prepared_io.write_failure();
        self.explained_by(message)
    }

    /// Adds the guard's reason. The reason of the latest check wins.
    pub fn with_unrepaired(self, unrepaired: Option<String>) -> Self {
        let Some(reason) = unrepaired else {
            return self;
        };
        let failure = match self {
            Self::Unrepaired { failure, .. } => failure,
            error => Box::new(error),
        };
        Self::Unrepaired { failure, reason }
    }

    /// Uses this text as the reason, if the error has none.
    fn explained_by(self, message: Option<String>) -> Self {
        match (self, message) {
            (Self::Unexplained { .. }, Some(message)) => Self::Failed { message },
            (Self::Unrepaired { failure, reason }, message) => Self::Unrepaired {
                failure: Box::new(failure.explained_by(message)),
                reason,
            },
            (error, _) => error,
        }
    }
}

fn tail(file: File) -> Option<String> {
    let length = file.metadata().map_or(0, |meta| meta.len());
    let bytes = read_from(file, length.saturating_sub(STDERR_TAIL));
    Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|text| !text.is_empty())
}

fn memory_file() -> io::Result<File> {
    Ok(memfd_create("runtime-output", MemfdFlags::CLOEXEC)?.into())
}

fn read_from(mut file: File, start: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = file
        .seek(SeekFrom::Start(start))
        .and_then(|_| file.read_to_end(&mut bytes));
    if let Err(error) = read {
        tracing::warn!(%error, "cannot read what the runtime printed");
    }
    bytes
}
