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
    /// There is no such program.
    #[error("exec: {binary:?}: executable file not found in $PATH")]
    Missing {
        /// The name that was searched.
        binary: String,
    },
    /// The program could not be run.
    #[error("run {program}: {source}")]
    Spawn {
        /// The program.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// The runtime reports an error, in its own text.
    #[error("{message}")]
    Failed {
        /// Its last error, or the end of its stderr.
        message: String,
    },
    /// The runtime failed, and neither its log nor a stderr that the shim captured gives a reason.
    #[error("{verb}: exit status {status}")]
    Unexplained {
        /// The verb.
        verb: &'static str,
        /// The exit status as in a shell.
        status: u32,
    },
    /// The runtime failed, and an unrepaired bind explains the failure.
    #[error("{failure}; bindguard: {reason}")]
    Unrepaired {
        /// The runtime's own error.
        failure: Box<RuntimeError>,
        /// The fault of the bind, and the next step.
        reason: String,
    },
    /// The guard's policy refuses the container.
    #[error("refused by bindguard: {reason}")]
    Refused {
        /// The policy's reason.
        reason: String,
    },
    /// The runtime succeeded but its output is invalid.
    #[error("read the answer of {verb}: {why}")]
    Answer {
        /// The verb.
        verb: &'static str,
        /// The parser's error.
        why: String,
    },
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
    environment: Vec<(&'static str, OsString)>,
    directory: PathBuf,
    inherited: Option<OwnedFd>,
    leads_group: bool,
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
        let log = LogFile::in_bundle(runtime.bundle.path(), verb);
        // containerd may have removed the bundle of a container whose create it gave up.
        let directory = match runtime.bundle.is_gone() {
            true => PathBuf::from("/"),
            false => runtime.bundle.path().to_owned(),
        };
        let mut arguments: Vec<OsString> = vec!["--root".into(), (&runtime.root).into()];
        arguments.extend([
            "--log".into(),
            log.path().into(),
            "--log-format".into(),
            "json".into(),
        ]);
        arguments.extend(runtime.systemd_cgroup.then(|| "--systemd-cgroup".into()));
        arguments.push(verb.into());
        arguments.extend(args);
        let exits = Arc::clone(&runtime.exits);
        Self {
            program,
            verb,
            arguments,
            environment: vec![],
            directory,
            inherited: None,
            leads_group: false,
            log,
            exits,
        }
    }

    /// Adds to the program's environment.
    pub fn env(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.environment.push((name, value.into()));
    }

    /// Passes a descriptor to the child, under the same number. No other child inherits the
    /// descriptor.
    pub fn inherit(&mut self, fd: OwnedFd) {
        self.inherited = Some(fd);
    }

    /// Gives the run a process group, so that `kill_group` also reaches forked processes.
    pub fn lead_group(&mut self) {
        self.leads_group = true;
    }

    /// Runs the runtime to its end; returns the output with `RunStreams::CapturedStdout`.
    pub async fn run(self, streams: RunStreams<'_>) -> Result<Vec<u8>, RuntimeError> {
        self.spawn(streams)?.finish().await
    }

    /// Starts it.
    pub fn spawn(self, streams: RunStreams<'_>) -> Result<Running, RuntimeError> {
        let program = self.program.display().to_string();
        let failed = |source| RuntimeError::Spawn {
            program: program.clone(),
            source,
        };
        let (stdout_file, stderr_file) = match &streams {
            RunStreams::Captured => (None, Some(memory_file().map_err(failed)?)),
            RunStreams::CapturedStdout => (
                Some(memory_file().map_err(failed)?),
                Some(memory_file().map_err(failed)?),
            ),
            // With a terminal the runtime's stderr has no reader, and the container's process does
            // not get this stderr.
            RunStreams::Process(prepared_io) => {
                let is_free = !prepared_io.has_stderr() && prepared_io.console_socket().is_some();
                (None, is_free.then(memory_file).transpose().map_err(failed)?)
            }
        };
        let [stdin, stdout, stderr] = match streams {
            RunStreams::Captured | RunStreams::CapturedStdout => [None; 3],
            RunStreams::Process(prepared_io) => prepared_io.child_streams(),
        };
        let captured = stderr_file.as_ref().map(AsFd::as_fd);
        let stdout = match streams {
            RunStreams::Captured => captured,
            RunStreams::CapturedStdout => stdout_file.as_ref().map(AsFd::as_fd),
            RunStreams::Process(_) => stdout,
        };
        let mut command = Command::new(&self.program);
        command
            .args(self.arguments)
            .envs(self.environment)
            .current_dir(self.directory);
        command.stdin(stdio(stdin).map_err(failed)?);
        command.stdout(stdio(stdout).map_err(failed)?);
        command.stderr(stdio(stderr.or(captured)).map_err(failed)?);
        if self.leads_group {
            command.process_group(0);
        }
        kernel::die_with_this_thread(&mut command);
        kernel::with_default_signals(&mut command);
        if let Some(fd) = self.inherited {
            kernel::inherit(&mut command, fd);
        }
        let child = command
            .spawn()
            .and_then(|child| Watched::child(child.id(), &self.exits))
            .map_err(failed)?;
        Ok(Running {
            child,
            verb: self.verb,
            log: self.log,
            stdout_file,
            stderr_file,
        })
    }
}

/// /dev/null in place of a missing stream.
fn stdio(fd: Option<BorrowedFd<'_>>) -> io::Result<Stdio> {
    fd.map_or_else(
        || Ok(Stdio::null()),
        |fd| fd.try_clone_to_owned().map(Stdio::from),
    )
}

impl Running {
    /// Waits for the end.
    pub async fn finish(self) -> Result<Vec<u8>, RuntimeError> {
        let exit = self.ended().await;
        self.result(exit)
    }

    /// Waits for the end for at most `limit`. `None` if the run had to be killed; it must lead a
    /// group.
    pub async fn finish_within(self, limit: Duration) -> Option<Result<Vec<u8>, RuntimeError>> {
        let ended = tokio::time::timeout(limit, self.ended()).await;
        match ended {
            Ok(exit) => Some(self.result(exit)),
            Err(_) => {
                self.kill_group();
                // Passes on its current content.
                self.log.read();
                // In the kernel it may hang for as long as a server does.
                tokio::spawn(async move { self.ended().await });
                None
            }
        }
    }

    fn result(self, exit: Exit) -> Result<Vec<u8>, RuntimeError> {
        let last_error = self.log.read();
        if exit.status == 0 {
            return Ok(self
                .stdout_file
                .map(|file| read_from(file, 0))
                .unwrap_or_default());
        }
        let unexplained = RuntimeError::Unexplained {
            verb: self.verb,
            status: exit.status,
        };
        Err(unexplained.explained_by(
            last_error
                .filter(|text| !text.is_empty())
                .or_else(|| self.stderr_file.and_then(tail)),
        ))
    }

    /// Resolves once, when it has ended.
    async fn ended(&self) -> Exit {
        self.child.exit().await
    }

    /// Kills the runtime and its forked processes. Call before the end of a run that leads a group.
    pub fn kill_group(&self) {
        let group = i32::try_from(self.child.pid()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
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
        match (self, unrepaired) {
            (Self::Unrepaired { failure, .. }, Some(reason)) => {
                Self::Unrepaired { failure, reason }
            }
            (error, Some(reason)) => Self::Unrepaired {
                failure: Box::new(error),
                reason,
            },
            (error, None) => error,
        }
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
