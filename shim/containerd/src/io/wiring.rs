//! Everything a process's streams need before the process is there.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{Gid, OFlags, Uid, fchown, fcntl_getfl, fcntl_setfl},
    pipe::{PipeFlags, pipe_with},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    Attached, Copy, Streams,
    console::ConsoleSocket,
    fifo::{self, Output},
};

/// A stream that could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IoError {
    /// What containerd named could not be opened.
    #[error("open {stream} {path:?}")]
    Open {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// What containerd named.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A kind of stream this shim does not have.
    #[error("{stream} {uri:?}: streams of this kind are not supported")]
    Scheme {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// What containerd named.
        uri: String,
    },
    /// A pipe between shim and process.
    #[error("make the pipe for {stream}")]
    Pipe {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The terminal's way from the runtime to the shim.
    #[error("set up the terminal")]
    Console(#[source] io::Error),
    /// A descriptor the event loop does not take.
    #[error("watch the process's streams")]
    Watch(#[source] io::Error),
}

/// Who shall own the pipes: the container's user, where it is to reopen /dev/stdout.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Owner {
    /// User id.
    pub(crate) uid: u32,
    /// Group id.
    pub(crate) gid: u32,
}

/// Opened streams, waiting for their process.
#[derive(Default)]
pub(crate) struct Wiring {
    child: [Option<OwnedFd>; 3],
    pairs: Vec<Pair>,
    stdin: Option<StdinPair>,
    console: Option<ConsoleSocket>,
    console_out: Option<OwnedFd>,
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
    /// Opens all that these streams need.
    pub(crate) fn open(streams: &Streams, owner: Owner) -> Result<Self, IoError> {
        let mut wiring = Self::default();
        if !streams.stdin.is_empty() {
            wiring.open_stdin(&streams.stdin, streams.terminal, owner)?;
        }
        if streams.terminal {
            wiring.console = Some(ConsoleSocket::bind().map_err(IoError::Console)?);
            if !streams.stdout.is_empty() {
                wiring.console_out = Some(open_console_output(&streams.stdout)?);
            }
            return Ok(wiring);
        }
        wiring.open_output(1, "stdout", &streams.stdout, owner)?;
        wiring.open_output(2, "stderr", &streams.stderr, owner)?;
        Ok(wiring)
    }

    fn open_stdin(&mut self, path: &str, terminal: bool, owner: Owner) -> Result<(), IoError> {
        const STREAM: &str = "stdin";
        refuse_scheme(STREAM, path)?;
        let input = fifo::open_input(Path::new(path)).map_err(|source| open_failed(STREAM, path, source))?;
        let mut to = None;
        if !terminal {
            let (read, write) = owned_pipe(STREAM, owner)?;
            nonblocking(&write).map_err(IoError::Watch)?;
            self.child[0] = Some(read);
            to = Some(write);
        }
        self.stdin = Some(StdinPair { from: input.read, to, hold: input.hold });
        Ok(())
    }

    fn open_output(&mut self, slot: usize, stream: &'static str, path: &str, owner: Owner) -> Result<(), IoError> {
        if path.is_empty() {
            return Ok(());
        }
        match open_stream(stream, path)? {
            Output::File(file) => self.child[slot] = Some(file),
            Output::Fifo(to) => {
                let (from, write) = owned_pipe(stream, owner)?;
                nonblocking(&from).map_err(IoError::Watch)?;
                self.child[slot] = Some(write);
                self.pairs.push(Pair { from, to });
            }
        }
        Ok(())
    }

    /// The process's ends, anew for each run of the runtime: stdin, stdout, stderr.
    pub(crate) fn child_stdio(&self) -> io::Result<[Stdio; 3]> {
        let mut ends = [Stdio::null(), Stdio::null(), Stdio::null()];
        for (end, fd) in ends.iter_mut().zip(&self.child) {
            if let Some(fd) = fd {
                *end = fd.try_clone()?.into();
            }
        }
        Ok(ends)
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
        let mut stdin_target = None;
        for pair in self.pairs {
            attached.outputs.push(Copy::spawn(readable(pair.from)?, writable(pair.to)?));
        }
        if let Some(console) = self.console {
            let master = console.take_master().map_err(IoError::Console)?;
            let master = Arc::new(
                crate::kernel::watch(master, Interest::READABLE | Interest::WRITABLE).map_err(IoError::Watch)?,
            );
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

fn open_stream(stream: &'static str, path: &str) -> Result<Output, IoError> {
    let opened = match fifo::scheme(path) {
        None => fifo::open_output(Path::new(path)),
        Some(("file", file)) => fifo::open_log_file(file).map(Output::File),
        Some(_) => return Err(IoError::Scheme { stream, uri: path.to_owned() }),
    };
    opened.map_err(|source| open_failed(stream, path, source))
}

fn open_console_output(path: &str) -> Result<OwnedFd, IoError> {
    match open_stream("stdout", path)? {
        Output::Fifo(fd) => Ok(fd),
        // The event loop cannot wait for a regular file, and a terminal's output must pass through the shim.
        Output::File(_) => Err(IoError::Scheme { stream: "stdout", uri: path.to_owned() }),
    }
}

fn refuse_scheme(stream: &'static str, path: &str) -> Result<(), IoError> {
    match fifo::scheme(path) {
        Some(_) => Err(IoError::Scheme { stream, uri: path.to_owned() }),
        None => Ok(()),
    }
}

fn open_failed(stream: &'static str, path: &str, source: io::Error) -> IoError {
    IoError::Open { stream, path: path.to_owned(), source }
}

fn owned_pipe(stream: &'static str, owner: Owner) -> Result<(OwnedFd, OwnedFd), IoError> {
    let make = || {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        if owner.uid != 0 || owner.gid != 0 {
            fchown(&write, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
        }
        Ok((read, write))
    };
    make().map_err(|source: rustix::io::Errno| IoError::Pipe { stream, source: source.into() })
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

fn readable(fd: OwnedFd) -> Result<Arc<AsyncFd<OwnedFd>>, IoError> {
    crate::kernel::watch(fd, Interest::READABLE).map(Arc::new).map_err(IoError::Watch)
}

fn writable(fd: OwnedFd) -> Result<Arc<AsyncFd<OwnedFd>>, IoError> {
    crate::kernel::watch(fd, Interest::WRITABLE).map(Arc::new).map_err(IoError::Watch)
}
