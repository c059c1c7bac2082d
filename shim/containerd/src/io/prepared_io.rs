//! Everything that a process's streams need before the process exists.

use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tokio::io::Interest;

use super::console::{ConsoleSocket, StreamOwner, WATCH, nonblocking, owned_pipe, unread, watched};
use super::copy::{FileWriter, StreamCopy};
use super::logger::Logger;
use super::open::{Input, OpenedStreams, OutputTarget};
use super::{LoggedProcess, RunningIo, Sink, Streams};
use crate::blocking::{lock, spawn_thread};
use crate::step::{StepError, failed};

/// The number of bytes of a failed try's output that an error quotes.
const LAST_OUTPUT: usize = 2048;

/// The opened streams of a process that is not started yet.
#[derive(Default)]
pub struct PreparedIo {
    child: [Option<OwnedFd>; 3],
    /// Sources and destinations of outputs.
    pairs: Vec<(OwnedFd, OwnedFd)>,
    stdin: Option<Input>,
    /// None with a terminal: the master arrives later.
    stdin_pipe: Option<OwnedFd>,
    console: Option<ConsoleSocket>,
    console_out: Option<OwnedFd>,
    logs: Vec<PendingLog>,
    last_output: Mutex<Vec<u8>>,
    sinks: Vec<Sink>,
}

impl PreparedIo {
    /// Opens everything for these streams, and waits for a logging program to be ready.
    pub async fn open(
        streams: &Streams,
        owner: StreamOwner,
        process: LoggedProcess<'_>,
    ) -> Result<Self, StepError> {
        let opened = OpenedStreams::open(streams).await?;
        let mut io = Self {
            stdin: opened.stdin,
            ..Self::default()
        };
        if io.stdin.is_some() && !streams.terminal {
            let (read, write) = owned_pipe("stdin", owner)?;
            nonblocking(&write).map_err(failed(WATCH))?;
            io.child[0] = Some(read);
            io.stdin_pipe = Some(write);
        }
        if streams.terminal {
            io.console = Some(ConsoleSocket::bind().map_err(failed("set up the terminal"))?);
            io.take_console_output(opened.stdout, process).await?;
            return Ok(io);
        }
        if let OutputTarget::Logger(program) = opened.stdout {
            let (out, stdout) = owned_pipe("stdout", owner)?;
            let (err, stderr) = owned_pipe("stderr", owner)?;
            let logger = Logger::start(program, process, [out, err]).await?;
            io.sinks.push(Sink::Logger(logger));
            io.child[1] = Some(stdout);
            io.child[2] = Some(stderr);
        } else {
            io.child[1] = io.take_output("stdout", opened.stdout, owner)?;
            io.child[2] = io.take_output("stderr", opened.stderr, owner)?;
        }
        Ok(io)
    }

    /// Returns the process's end.
    fn take_output(
        &mut self,
        name: &str,
        target: OutputTarget,
        owner: StreamOwner,
    ) -> Result<Option<OwnedFd>, StepError> {
        Ok(match target {
            // Only stdout can be a program's, and `open` handles that.
            OutputTarget::Nowhere | OutputTarget::Logger(_) => None,
            OutputTarget::File(file) => Some(file),
            OutputTarget::Fifo(to) => {
                let (from, write) = owned_pipe(name, owner)?;
                nonblocking(&from).map_err(failed(WATCH))?;
                self.pairs.push((from, to));
                Some(write)
            }
            OutputTarget::LogFile(path, file) => {
                let (read, write) = owned_pipe(name, owner)?;
                self.logs.push(PendingLog::new(read, file, &path));
                Some(write)
            }
            OutputTarget::SameLogFile => {
                let stdout = self.child[1].as_ref().map(OwnedFd::try_clone).transpose();
                stdout.map_err(failed(format!("make the pipe for {name}")))?
            }
        })
    }

    /// A terminal has a single output, which passes through the shim: only the shim may read from
    /// the master.
    async fn take_console_output(
        &mut self,
        target: OutputTarget,
        process: LoggedProcess<'_>,
    ) -> Result<(), StepError> {
        let owner = StreamOwner::default();
        let to = match target {
            OutputTarget::Nowhere | OutputTarget::SameLogFile => return Ok(()),
            OutputTarget::Fifo(to) | OutputTarget::File(to) => to,
            OutputTarget::LogFile(path, file) => {
                let (read, write) = owned_pipe("stdout", owner)?;
                self.logs.push(PendingLog::new(read, file, &path));
                write
            }
            OutputTarget::Logger(program) => {
                let (out, stdout) = owned_pipe("stdout", owner)?;
                // Without a writer: the program sees the end of stderr at once.
                let (err, _) = owned_pipe("stderr", owner)?;
                let logger = Logger::start(program, process, [out, err]).await?;
                self.sinks.push(Sink::Logger(logger));
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

    /// Removes the output of a failed try of the runtime, so that the next try's container starts
    /// without this output.
    pub fn withhold_output(&self) {
        let mut text = Vec::new();
        for (from, _) in &self.pairs {
            text.extend(unread(from));
        }
        for log in &self.logs {
            text.extend(log.withhold_output());
        }
        if !text.is_empty() {
            *lock(&self.last_output) = text;
        }
    }

    /// The end of the last try's output, if it failed and wrote any.
    pub fn last_output(&self) -> Option<String> {
        self.withhold_output();
        let text = lock(&self.last_output);
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
        self.console.as_ref().map(|socket| socket.path.clone())
    }

    /// Starts the copies. The process's ends are closed here: from now on only the process has them
    /// open.
    pub fn attach(self) -> Result<RunningIo, StepError> {
        let mut attached = RunningIo::default();
        attached.sinks = self.sinks;
        for log in self.logs {
            attached.sinks.push(Sink::File(log.begin()?));
        }
        for (from, to) in self.pairs {
            attached.outputs.push(StreamCopy::spawn(
                watched(from, Interest::READABLE)?,
                watched(to, Interest::WRITABLE)?,
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
            attached.console = Some(master);
        }
        if let Some(Input { read, hold }) = self.stdin {
            let target = match self.stdin_pipe {
                Some(to) => Some(watched(to, Interest::WRITABLE)?),
                None => attached.console.clone(),
            };
            if let Some(target) = target {
                let from = watched(read, Interest::READABLE)?;
                attached.stdin = Some(StreamCopy::spawn(from, target));
            }
            attached.stdin_hold = Mutex::new(hold);
        }
        Ok(attached)
    }
}

/// A log file (`file://`) before its process exists: a pipe to copy into a file.
///
/// The runtime writes its errors to the stderr that the container gets. The copy begins only after
/// the runtime succeeded. So the output of a failed try can be kept out of the log of a container
/// that the next try starts.
struct PendingLog {
    pipe: OwnedFd,
    file: OwnedFd,
    path: PathBuf,
    /// The output of the last failed try.
    failure: Mutex<Vec<u8>>,
}

impl PendingLog {
    /// `pipe` is the read end.
    fn new(pipe: OwnedFd, file: OwnedFd, path: &Path) -> Self {
        Self {
            pipe,
            file,
            path: path.to_owned(),
            failure: Mutex::default(),
        }
    }

    /// Removes the output of a failed try from the pipe, before a further try.
    fn withhold_output(&self) -> Vec<u8> {
        let text = unread(&self.pipe);
        if !text.is_empty() {
            lock(&self.failure).clone_from(&text);
        }
        text
    }

    /// Writes the output of the last failed try, if no try follows. No caller waits for the disk.
    fn write_failure(&self) -> io::Result<()> {
        let text = mem::take(&mut *lock(&self.failure));
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
    fn begin(self) -> Result<FileWriter, StepError> {
        let step = format!("start writing the log file {}", self.path.display());
        FileWriter::start(self.pipe, self.file).map_err(failed(step))
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
