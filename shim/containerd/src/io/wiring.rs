//! Everything a process's streams need before the process is there.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex},
};

use tokio::io::Interest;

use super::{
    Attached, Author, Copy, IoError, Sink, Streams,
    console::ConsoleSocket,
    ends::{Owner, nonblocking, owned_pipe, readable, watched, writable},
    fifo::Input,
    file_writer::FileWriter,
    logger::Logger,
    open::{Opened, Outlet},
    stream::Program,
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
        let opened = Opened::open(streams).await?;
        let mut wiring = Self::default();
        if let Some(input) = opened.stdin {
            wiring.take_stdin(input, streams.terminal, owner)?;
        }
        if streams.terminal {
            wiring.console = Some(ConsoleSocket::bind().map_err(IoError::Console)?);
            wiring.take_console_output(opened.stdout, author).await?;
            return Ok(wiring);
        }
        match opened.stdout {
            Outlet::Logger(program) => wiring.start_logger(program, owner, author).await?,
            stdout => {
                wiring.take_output(1, "stdout", stdout, owner)?;
                wiring.take_output(2, "stderr", opened.stderr, owner)?;
            }
        }
        Ok(wiring)
    }

    fn take_stdin(&mut self, input: Input, terminal: bool, owner: Owner) -> Result<(), IoError> {
        let mut to = None;
        if !terminal {
            let (read, write) = owned_pipe("stdin", owner)?;
            nonblocking(&write)?;
            self.child[0] = Some(read);
            to = Some(write);
        }
        self.stdin = Some(StdinPair { from: input.read, to, hold: input.hold });
        Ok(())
    }

    fn take_output(&mut self, slot: usize, name: &'static str, outlet: Outlet, owner: Owner) -> Result<(), IoError> {
        self.child[slot] = match outlet {
            // Only stdout can be a program's, and that is taken by `open`.
            Outlet::Nowhere | Outlet::Logger(_) => None,
            Outlet::File(file) => Some(file),
            Outlet::Fifo(to) => {
                let (from, write) = owned_pipe(name, owner)?;
                nonblocking(&from)?;
                self.pairs.push(Pair { from, to });
                Some(write)
            }
            Outlet::LogFile(path, file) => Some(self.write_log_file(name, path, file, owner)?),
            Outlet::SameLogFile => {
                let stdout = self.child[1].as_ref().map(OwnedFd::try_clone).transpose();
                stdout.map_err(|source| IoError::Pipe { stream: name, source })?
            }
        };
        Ok(())
    }

    /// Has a log file written from a pipe; the answer is the pipe's end to write.
    fn write_log_file(
        &mut self,
        name: &'static str,
        path: PathBuf,
        file: OwnedFd,
        owner: Owner,
    ) -> Result<OwnedFd, IoError> {
        let (read, write) = owned_pipe(name, owner)?;
        let writer = FileWriter::start(read, file).map_err(|source| IoError::Writer { path, source })?;
        self.sinks.push(Sink::File(writer));
        Ok(write)
    }

    async fn start_logger(&mut self, program: Program, owner: Owner, author: Author<'_>) -> Result<(), IoError> {
        let (out, stdout) = owned_pipe("stdout", owner)?;
        let (err, stderr) = owned_pipe("stderr", owner)?;
        self.sinks.push(Sink::Logger(Logger::start(program, author, [out, err]).await?));
        self.child[1] = Some(stdout);
        self.child[2] = Some(stderr);
        Ok(())
    }

    /// A terminal has one output, and it passes through the shim: only the shim may read from the master.
    async fn take_console_output(&mut self, outlet: Outlet, author: Author<'_>) -> Result<(), IoError> {
        const STREAM: &str = "stdout";
        let to = match outlet {
            Outlet::Nowhere | Outlet::SameLogFile => return Ok(()),
            Outlet::Fifo(to) | Outlet::File(to) => to,
            Outlet::LogFile(path, file) => self.write_log_file(STREAM, path, file, Owner::default())?,
            Outlet::Logger(program) => {
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
