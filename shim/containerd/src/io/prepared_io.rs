//! Everything that a process's streams need before the process exists.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::Interest;

use super::console::ConsoleSocket;
use super::fifo::{Input, OutputTarget};
use super::logger::Logger;
use super::open::OpenedStreams;
use super::pending_log::PendingLog;
use super::pipes::{StreamOwner, WATCH, nonblocking, owned_pipe, unread, watched};
use super::stream::LogProgram;
use super::{IoError, LoggedProcess, RunningIo, Sink, StreamCopy, Streams};
use crate::step::failed;

/// The number of bytes of a failed try's output that an error quotes.
const LAST_OUTPUT: usize = 2048;

/// The opened streams of a process that is not started yet.
#[derive(Default)]
pub(crate) struct PreparedIo {
    child: [Option<OwnedFd>; 3],
    pairs: Vec<Pair>,
    stdin: Option<Input>,
    /// None with a terminal: the master arrives later.
    stdin_pipe: Option<OwnedFd>,
    console: Option<ConsoleSocket>,
    console_out: Option<OwnedFd>,
    logs: Vec<PendingLog>,
    last_output: Mutex<Vec<u8>>,
    sinks: Vec<Sink>,
}

struct Pair {
    from: OwnedFd,
    to: OwnedFd,
}

impl PreparedIo {
    /// Opens everything for these streams, and waits for a logging program to be ready.
    pub(crate) async fn open(
        streams: &Streams,
        owner: StreamOwner,
        process: LoggedProcess<'_>,
    ) -> Result<Self, IoError> {
        let opened = OpenedStreams::open(streams).await?;
        let mut prepared_io = Self::default();
        if let Some(input) = opened.stdin {
            prepared_io.take_stdin(input, streams.terminal, owner)?;
        }
        if streams.terminal {
            prepared_io.console =
                Some(ConsoleSocket::bind().map_err(failed("set up the terminal"))?);
            prepared_io
                .take_console_output(opened.stdout, process)
                .await?;
            return Ok(prepared_io);
        }
        match opened.stdout {
            OutputTarget::Logger(program) => {
                prepared_io.start_logger(program, owner, process).await?
            }
            stdout => {
                prepared_io.take_output(1, "stdout", stdout, owner)?;
                prepared_io.take_output(2, "stderr", opened.stderr, owner)?;
            }
        }
        Ok(prepared_io)
    }

    fn take_stdin(
        &mut self,
        input: Input,
        terminal: bool,
        owner: StreamOwner,
    ) -> Result<(), IoError> {
        if !terminal {
            let (read, write) = owned_pipe("stdin", owner)?;
            nonblocking(&write).map_err(failed(WATCH))?;
            self.child[0] = Some(read);
            self.stdin_pipe = Some(write);
        }
        self.stdin = Some(input);
        Ok(())
    }

    fn take_output(
        &mut self,
        slot: usize,
        name: &'static str,
        target: OutputTarget,
        owner: StreamOwner,
    ) -> Result<(), IoError> {
        self.child[slot] = match target {
            // Only stdout can be a program's, and `open` handles that.
            OutputTarget::Nowhere | OutputTarget::Logger(_) => None,
            OutputTarget::File(file) => Some(file),
            OutputTarget::Fifo(to) => {
                let (from, write) = owned_pipe(name, owner)?;
                nonblocking(&from).map_err(failed(WATCH))?;
                self.pairs.push(Pair { from, to });
                Some(write)
            }
            OutputTarget::LogFile(path, file) => {
                Some(self.write_log_file(name, path, file, owner)?)
            }
            OutputTarget::SameLogFile => {
                let stdout = self.child[1].as_ref().map(OwnedFd::try_clone).transpose();
                stdout.map_err(failed(format!("make the pipe for {name}")))?
            }
        };
        Ok(())
    }

    /// Prepares a log file that is written from a pipe; returns the pipe's write end.
    fn write_log_file(
        &mut self,
        name: &'static str,
        path: PathBuf,
        file: OwnedFd,
        owner: StreamOwner,
    ) -> Result<OwnedFd, IoError> {
        let (read, write) = owned_pipe(name, owner)?;
        self.logs.push(PendingLog::new(read, file, &path));
        Ok(write)
    }

    async fn start_logger(
        &mut self,
        program: LogProgram,
        owner: StreamOwner,
        process: LoggedProcess<'_>,
    ) -> Result<(), IoError> {
        let (out, stdout) = owned_pipe("stdout", owner)?;
        let (err, stderr) = owned_pipe("stderr", owner)?;
        self.sinks.push(Sink::Logger(
            Logger::start(program, process, [out, err]).await?,
        ));
        self.child[1] = Some(stdout);
        self.child[2] = Some(stderr);
        Ok(())
    }

    /// A terminal has a single output, which passes through the shim: only the shim may read from
    /// the master.
    async fn take_console_output(
        &mut self,
        target: OutputTarget,
        process: LoggedProcess<'_>,
    ) -> Result<(), IoError> {
        const STREAM: &str = "stdout";
        let to = match target {
            OutputTarget::Nowhere | OutputTarget::SameLogFile => return Ok(()),
            OutputTarget::Fifo(to) | OutputTarget::File(to) => to,
            OutputTarget::LogFile(path, file) => {
                self.write_log_file(STREAM, path, file, StreamOwner::default())?
            }
            OutputTarget::Logger(program) => {
                let (out, stdout) = owned_pipe(STREAM, StreamOwner::default())?;
                // Without a writer: the program sees the end of stderr at once.
                let (err, _) = owned_pipe("stderr", StreamOwner::default())?;
                self.sinks.push(Sink::Logger(
                    Logger::start(program, process, [out, err]).await?,
                ));
                stdout
            }
        };
        nonblocking(&to).map_err(failed(WATCH))?;
        self.console_out = Some(to);
        Ok(())
    }

    /// The process's open streams, in the order stdin, stdout, stderr. Each run of the runtime
    /// borrows the streams.
    pub(crate) fn child_streams(&self) -> [Option<BorrowedFd<'_>>; 3] {
        self.child
            .each_ref()
            .map(|end| end.as_ref().map(AsFd::as_fd))
    }

    /// True if the process's stderr goes to a file. Otherwise the runtime's own stderr may be
    /// captured.
    pub(crate) fn has_stderr(&self) -> bool {
        self.child[2].is_some()
    }

    /// Removes the output of a failed try of the runtime, so that the next try's container starts
    /// without this output.
    pub(crate) fn withhold_output(&self) {
        let of_pairs = self.pairs.iter().map(|pair| unread(&pair.from));
        let text = of_pairs
            .chain(self.logs.iter().map(PendingLog::withhold_output))
            .collect::<Vec<_>>()
            .concat();
        if !text.is_empty() {
            *self
                .last_output
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = text;
        }
    }

    /// The end of the last try's output, if it failed and wrote any.
    pub(crate) fn last_output(&self) -> Option<String> {
        self.withhold_output();
        let text = self
            .last_output
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let end = &text[text.len().saturating_sub(LAST_OUTPUT)..];
        Some(String::from_utf8_lossy(end).trim().to_owned()).filter(|output| !output.is_empty())
    }

    /// Writes the runtime's output into a log file when no try follows. The reader of a fifo gets
    /// only the answer to `Create`, as with Go's shim.
    pub(crate) fn write_failure(&self) {
        for log in &self.logs {
            if let Err(error) = log.write_failure() {
                tracing::warn!(%error, "the runtime's error is not in the log file");
            }
        }
    }

    /// The path to which the runtime sends the terminal, if there is one.
    pub(crate) fn console_socket(&self) -> Option<PathBuf> {
        self.console.as_ref().map(|socket| socket.path().to_owned())
    }

    /// Starts the copies. The process's ends are closed here: from now on only the process has them
    /// open.
    pub(crate) fn attach(self) -> Result<RunningIo, IoError> {
        let mut attached = RunningIo::default();
        attached.sinks = self.sinks;
        for log in self.logs {
            attached.sinks.push(Sink::File(log.begin()?));
        }
        let mut stdin_target = None;
        for pair in self.pairs {
            attached.outputs.push(StreamCopy::spawn(
                watched(pair.from, Interest::READABLE)?,
                watched(pair.to, Interest::WRITABLE)?,
            ));
        }
        if let Some(console) = self.console {
            let master = console
                .take_master()
                .map_err(failed("set up the terminal"))?;
            let master = watched(master, Interest::READABLE | Interest::WRITABLE)?;
            if let Some(out) = self.console_out {
                attached.outputs.push(StreamCopy::spawn(
                    Arc::clone(&master),
                    watched(out, Interest::WRITABLE)?,
                ));
            }
            stdin_target = Some(Arc::clone(&master));
            attached.console = Some(master);
        }
        if let Some(Input { read, hold }) = self.stdin {
            let target = match self.stdin_pipe {
                Some(to) => Some(watched(to, Interest::WRITABLE)?),
                None => stdin_target,
            };
            if let Some(target) = target {
                attached.stdin = Some(StreamCopy::spawn(
                    watched(read, Interest::READABLE)?,
                    target,
                ));
            }
            attached.stdin_hold = Mutex::new(hold);
        }
        Ok(attached)
    }
}
