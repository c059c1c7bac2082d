//! Everything a process's streams need before the process is there.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use tokio::io::Interest;

use super::{
    Attached, Author, Copy, IoError, Sink, Streams,
    console::ConsoleSocket,
    ends::{Owner, nonblocking, owned_pipe, readable, watched, writable},
    fifo::{self, Output},
    file_writer::FileWriter,
    logger::Logger,
    stream::{Program, Stream},
};

/// Opened streams, waiting for their process.
#[derive(Default)]
pub(crate) struct Wiring {
    child: [Option<OwnedFd>; 3],
    pairs: Vec<Pair>,
    stdin: Option<StdinPair>,
    console: Option<ConsoleSocket>,
    console_out: Option<OwnedFd>,
    sinks: Vec<Sink>,
}

struct Pair {
    from: OwnedFd,
    to: OwnedFd,
}

struct StdinPair {
    from: OwnedFd,
    /// None with a terminal: the master comes later.
    to: Option<OwnedFd>,
    hold: OwnedFd,
}

impl Wiring {
    /// Opens all that these streams need, and waits for a logging program to be ready.
    pub(crate) async fn open(streams: &Streams, owner: Owner, author: Author<'_>) -> Result<Self, IoError> {
        let mut wiring = Self::default();
        wiring.open_stdin(&streams.stdin, streams.terminal, owner)?;
        let stdout = parse("stdout", &streams.stdout)?;
        if streams.terminal {
            wiring.console = Some(ConsoleSocket::bind().map_err(IoError::Console)?);
            wiring.open_console_output(stdout, author).await?;
            return Ok(wiring);
        }
        match stdout {
            // The program takes stderr, too, whatever was named for that.
            Stream::Logger(program) => wiring.open_logger(program, owner, author).await?,
            stdout => {
                wiring.open_output(1, "stdout", stdout, owner)?;
                match streams.stderr == streams.stdout && wiring.has_log_file() {
                    true => wiring.share_log_file()?,
                    false => wiring.open_output(2, "stderr", parse("stderr", &streams.stderr)?, owner)?,
                }
            }
        }
        Ok(wiring)
    }

    fn open_stdin(&mut self, name: &str, terminal: bool, owner: Owner) -> Result<(), IoError> {
        const STREAM: &str = "stdin";
        let path = match parse(STREAM, name)? {
            Stream::Nowhere => return Ok(()),
            Stream::Path(path) => path,
            Stream::File(_) | Stream::Logger(_) => return Err(unsupported(STREAM, name)),
        };
        let input = fifo::open_input(&path).map_err(|source| open_failed(STREAM, &path, source))?;
        let mut to = None;
        if !terminal {
            let (read, write) = owned_pipe(STREAM, owner)?;
            nonblocking(&write)?;
            self.child[0] = Some(read);
            to = Some(write);
        }
        self.stdin = Some(StdinPair { from: input.read, to, hold: input.hold });
        Ok(())
    }

    fn open_output(&mut self, slot: usize, name: &'static str, stream: Stream, owner: Owner) -> Result<(), IoError> {
        match stream {
            Stream::Nowhere => {}
            Stream::Path(path) => match fifo::open_output(&path).map_err(|source| open_failed(name, &path, source))? {
                Output::File(file) => self.child[slot] = Some(file),
                Output::Fifo(to) => {
                    let (from, write) = owned_pipe(name, owner)?;
                    nonblocking(&from)?;
                    self.child[slot] = Some(write);
                    self.pairs.push(Pair { from, to });
                }
            },
            Stream::File(path) => self.child[slot] = Some(self.open_log_file(name, &path, owner)?),
            Stream::Logger(program) => return Err(unsupported(name, &program.path.display().to_string())),
        }
        Ok(())
    }

    /// A log file behind a pipe; the answer is the pipe's end to write.
    fn open_log_file(&mut self, name: &'static str, path: &Path, owner: Owner) -> Result<OwnedFd, IoError> {
        let file = fifo::open_log_file(path).map_err(|source| open_failed(name, path, source))?;
        let (read, write) = owned_pipe(name, owner)?;
        let writer =
            FileWriter::start(read, file).map_err(|source| IoError::Writer { path: path.to_owned(), source })?;
        self.sinks.push(Sink::File(writer));
        Ok(write)
    }

    fn has_log_file(&self) -> bool {
        matches!(self.sinks[..], [Sink::File(_)])
    }

    fn share_log_file(&mut self) -> Result<(), IoError> {
        let stdout = self.child[1].as_ref().map(OwnedFd::try_clone).transpose();
        self.child[2] = stdout.map_err(|source| IoError::Pipe { stream: "stderr", source })?;
        Ok(())
    }

    async fn open_logger(&mut self, program: Program, owner: Owner, author: Author<'_>) -> Result<(), IoError> {
        let (out, stdout) = owned_pipe("stdout", owner)?;
        let (err, stderr) = owned_pipe("stderr", owner)?;
        self.sinks.push(Sink::Logger(Logger::start(program, author, [out, err]).await?));
        self.child[1] = Some(stdout);
        self.child[2] = Some(stderr);
        Ok(())
    }

    /// A terminal has one output, and it passes through the shim: only the shim may read from the master.
    async fn open_console_output(&mut self, stream: Stream, author: Author<'_>) -> Result<(), IoError> {
        const STREAM: &str = "stdout";
        let to = match stream {
            Stream::Nowhere => return Ok(()),
            Stream::Path(path) => match fifo::open_output(&path).map_err(|e| open_failed(STREAM, &path, e))? {
                Output::Fifo(to) => to,
                // The event loop does not take it.
                Output::File(_) => return Err(unsupported(STREAM, &path.display().to_string())),
            },
            Stream::File(path) => self.open_log_file(STREAM, &path, Owner::default())?,
            Stream::Logger(program) => {
                let (out, stdout) = owned_pipe(STREAM, Owner::default())?;
                // Without a writer: the program sees the end of stderr at once.
                let (err, _) = owned_pipe("stderr", Owner::default())?;
                self.sinks.push(Sink::Logger(Logger::start(program, author, [out, err]).await?));
                stdout
            }
        };
        nonblocking(&to)?;
        self.console_out = Some(to);
        Ok(())
    }

    /// The process's stdin, stdout and stderr, where they go somewhere; to be lent to each run of the runtime.
    pub(crate) fn child_ends(&self) -> [Option<BorrowedFd<'_>>; 3] {
        self.child.each_ref().map(|end| end.as_ref().map(AsFd::as_fd))
    }

    /// Whether the process's stderr goes somewhere; otherwise the runtime's own may be caught.
    pub(crate) fn has_stderr(&self) -> bool {
        self.child[2].is_some()
    }

    /// Where the runtime is to send the terminal, if there is one.
    pub(crate) fn console_socket(&self) -> Option<PathBuf> {
        self.console.as_ref().map(|socket| socket.path().to_owned())
    }

    /// Starts the copies. The process's ends are closed here: from now on only the process holds them.
    pub(crate) fn attach(self) -> Result<Attached, IoError> {
        let mut attached = Attached::default();
        attached.sinks = self.sinks;
        let mut stdin_target = None;
        for pair in self.pairs {
            attached.outputs.push(Copy::spawn(readable(pair.from)?, writable(pair.to)?));
        }
        if let Some(console) = self.console {
            let master = console.take_master().map_err(IoError::Console)?;
            let master = watched(master, Interest::READABLE | Interest::WRITABLE)?;
            if let Some(out) = self.console_out {
                attached.outputs.push(Copy::spawn(Arc::clone(&master), writable(out)?));
            }
            stdin_target = Some(Arc::clone(&master));
            attached.console = Some(master);
        }
        if let Some(StdinPair { from, to, hold }) = self.stdin {
            let target = match to {
                Some(to) => Some(writable(to)?),
                None => stdin_target,
            };
            if let Some(target) = target {
                attached.stdin = Some(Copy::spawn(readable(from)?, target));
            }
            attached.stdin_hold = Mutex::new(Some(hold));
        }
        Ok(attached)
    }
}

fn parse(stream: &'static str, name: &str) -> Result<Stream, IoError> {
    Stream::parse(name).map_err(|_| unsupported(stream, name))
}

fn unsupported(stream: &'static str, name: &str) -> IoError {
    IoError::Scheme { stream, uri: name.to_owned() }
}

fn open_failed(stream: &'static str, path: &Path, source: io::Error) -> IoError {
    IoError::Open { stream, path: path.display().to_string(), source }
}
