//! Everything that a process's streams need before the process exists.

use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;

use super::console::{ConsoleSocket, StreamOwner, WATCH, nonblocking, owned_pipe, unread, watched};
use super::copy::FileWriter;
use super::logger::Logger;
use super::open::{Input, LogProgram, OpenedStreams, OutputTarget};
use super::{IoError, LoggedProcess, RunningIo, Sink, StreamCopy, Streams};
use crate::blocking::spawn_thread;
use crate::step::failed;

/// The number of bytes of a failed try's output that an error quotes.
const LAST_OUTPUT: usize = 2048;

/// The opened streams of a process that is not started yet.
#[derive(Default)]
pub struct PreparedIo {
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
    pub async fn open(
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
    pub fn child_streams(&self) -> [Option<BorrowedFd<'_>>; 3] {
        self.child
            .each_ref()
            .map(|end| end.as_ref().map(AsFd::as_fd))
    }

    /// True if the process's stderr goes to a file. Otherwise the runtime's own stderr may be
    /// captured.
    pub fn has_stderr(&self) -> bool {
        self.child[2].is_some()
    }

    /// Removes the output of a failed try of the runtime, so that the next try's container starts
    /// without this output.
    pub fn withhold_output(&self) {
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
    pub fn last_output(&self) -> Option<String> {
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
    pub fn write_failure(&self) {
        for log in &self.logs {
            if let Err(error) = log.write_failure() {
                tracing::warn!(%error, "the runtime's error is not in the log file");
            }
        }
    }

    /// The path to which the runtime sends the terminal, if there is one.
    pub fn console_socket(&self) -> Option<PathBuf> {
        self.console.as_ref().map(|socket| socket.path().to_owned())
    }

    /// Starts the copies. The process's ends are closed here: from now on only the process has them
    /// open.
    pub fn attach(self) -> Result<RunningIo, IoError> {
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

// A log file (`file://`) before its process exists.
//
// The runtime writes its errors to the stderr that the container gets. The copy begins only after
// the runtime succeeded. So the output of a failed try can be kept out of the log of a container
// that the next try starts.

/// A pipe to copy into a file.
struct PendingLog {
    pipe: OwnedFd,
    file: OwnedFd,
    path: PathBuf,
    /// The output of the last failed try.
    failure: Mutex<Vec<u8>>,
}

impl PendingLog {
    /// `pipe` is the read end.
    pub fn new(pipe: OwnedFd, file: OwnedFd, path: &Path) -> Self {
        Self {
            pipe,
            file,
            path: path.to_owned(),
            failure: Mutex::default(),
        }
    }

    /// Removes the output of a failed try from the pipe, before a further try.
    pub fn withhold_output(&self) -> Vec<u8> {
        let text = unread(&self.pipe);
        if !text.is_empty() {
            self.failure().clone_from(&text);
        }
        text
    }

    /// Writes the output of the last failed try, if no try follows. No caller waits for the disk.
    pub fn write_failure(&self) -> io::Result<()> {
        let text = mem::take(&mut *self.failure());
        if text.is_empty() {
            return Ok(());
        }
        let (mut file, path) = (File::from(self.file.try_clone()?), self.path.clone());
        spawn_thread(move || {
            if let Err(error) = file.write_all(&text) {
                tracing::warn!(%error, path = %path.display(), "the runtime's error is not in the log file");
            }
        })
    }

    /// Starts to copy: the process exists now.
    pub fn begin(self) -> Result<FileWriter, IoError> {
        let Self {
            pipe, file, path, ..
        } = self;
        let step = format!("start writing the log file {}", path.display());
        Ok(FileWriter::start(pipe, file).map_err(failed(step))?)
    }

    fn failure(&self) -> MutexGuard<'_, Vec<u8>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::io::copy::DrainLimits;

    struct TestLog {
        pending: PendingLog,
        process: File,
        file: tempfile::NamedTempFile,
    }

    fn log() -> TestLog {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (read, write) = io::pipe().unwrap();
        let pending = PendingLog::new(read.into(), file.reopen().unwrap().into(), file.path());
        TestLog {
            pending,
            process: OwnedFd::from(write).into(),
            file,
        }
    }

    #[tokio::test]
    async fn the_log_of_a_process_has_no_output_of_failed_tries() {
        let TestLog {
            pending,
            mut process,
            file,
        } = log();
        for _ in 0..3 {
            process.write_all(b"runc create failed\n").unwrap();
            pending.withhold_output();
        }
        process.write_all(b"its own\n").unwrap();
        drop(process);
        let long = Duration::from_secs(60);
        pending
            .begin()
            .unwrap()
            .finish_or_stall(DrainLimits {
                idle: long,
                total: long,
            })
            .await;
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "its own\n");
    }

    #[test]
    fn the_last_failure_is_written_once() {
        let TestLog {
            pending,
            mut process,
            file,
        } = log();
        for text in [&b"first\n"[..], b"again\n", b""] {
            process.write_all(text).unwrap();
            pending.withhold_output();
        }
        pending.write_failure().unwrap();
        pending.write_failure().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while std::fs::read_to_string(file.path()).unwrap() != "again\n" {
            assert!(
                std::time::Instant::now() < deadline,
                "{:?}",
                std::fs::read_to_string(file.path())
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
