//! A process's standard streams, from containerd's paths to the runtime's descriptors and back.
//!
//! ```text
//!            containerd's fifos        shim             container
//!   stdin   ────────────────────►  copy task  ──pipe──►
//!   stdout  ◄────────────────────  copy task  ◄──pipe──
//!   file://   ◄─────────────────  writer thread ◄──pipe──
//!   binary:// ◄──────────────────────────────────pipe──  read by the client's program
//!   terminal: both ways through the one pty master that the runtime sends over the console socket
//! ```
//! First everything is opened (`PreparedIo`), then the runtime runs with the container's ends, and
//! only after its success do the copies begin (`RunningIo`). A second try of a create reuses the
//! `PreparedIo`, without the output of the failed try (`PreparedIo::withhold_output`). A logging
//! program reads the pipes directly, and so gets the output of failed tries too.

mod copy;
mod open;

use std::fs::{self, File, Permissions};
use std::io::{self, IoSliceMut, Write};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bindguard_sys::make_folders;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, OFlags, Uid, fchown, fcntl_getfl, fcntl_setfl};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel;
use crate::work::{Result, failed, lock, run_blocking, spawn_thread};
use copy::{DrainLimits, StreamCopy};
use open::{Input, LogProgram, Logger, OutputTarget, open, open_output, open_stdin, unsupported};

pub use open::LoggedProcess;

/// A socket's path may have 107 bytes and a bundle's path is longer, so console sockets are in a
/// short directory of our own.
const DIRECTORY: &str = "/run/containerd/s";
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// A descriptor in the event loop. Both directions share a pty's master.
type WatchedFd = Arc<AsyncFd<OwnedFd>>;

/// The time limits for the rest of a dead process's output: Go's shim waits ten seconds in either
/// case.
const DRAIN_LIMITS: DrainLimits = DrainLimits {
    idle: Duration::from_secs(2),
    total: Duration::from_secs(10),
};

/// The streams that `Create` and `Exec` name for a process: paths or URIs. Empty means no stream.
#[derive(Clone, Default)]
pub struct Streams {
    pub stdin: String,
    pub stdout: String,
    /// Unused with a terminal.
    pub stderr: String,
    /// A pty instead of three pipes.
    pub terminal: bool,
}

/// The streams of a running process.
#[derive(Default)]
pub struct RunningIo {
    /// Kept open so that the process sees no end of its input before `CloseIO`, however often
    /// clients connect and leave.
    stdin_hold: Mutex<Option<OwnedFd>>,
    stdin: Option<StreamCopy>,
    /// At most two.
    outputs: Vec<StreamCopy>,
    logger: Option<Logger>,
    console: Option<WatchedFd>,
}

impl RunningIo {
    /// Closes stdin: the process sees its end as soon as the client's side is closed as well.
    pub fn close_stdin(&self) {
        lock(&self.stdin_hold).take();
    }

    /// Sets the terminal's size; without a terminal there is nothing to set.
    pub fn resize(&self, columns: u16, rows: u16) -> io::Result<()> {
        let Some(console) = &self.console else {
            return Ok(());
        };
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(rustix::termios::tcsetwinsize(console.get_ref(), size)?)
    }

    /// Waits until all output of the dead process has been passed on.
    pub async fn drained(&self) {
        let [first, second] = [0, 1].map(|index| async move {
            if let Some(output) = self.outputs.get(index) {
                output.finish_or_stall(DRAIN_LIMITS).await;
            }
        });
        tokio::join!(first, second);
        if let Some(logger) = &self.logger {
            logger.finish().await;
        }
    }
}

impl Drop for RunningIo {
    fn drop(&mut self) {
        if let Some(task) = self.stdin.as_ref().and_then(|stdin| stdin.task.as_ref()) {
            task.abort();
        }
    }
}

/// The number of bytes of a failed try's output that an error quotes.
const LAST_OUTPUT: usize = 2048;

/// The opened streams of a process that is not started yet.
#[derive(Default)]
pub struct PreparedIo {
    child: [Option<OwnedFd>; 3],
    outputs: Vec<PendingOutput>,
    stdin: Option<Input>,
    /// None with a terminal: the master arrives later.
    stdin_pipe: Option<OwnedFd>,
    console: Option<ConsoleSocket>,
    /// A terminal has a single output, which passes through the shim: only the shim may read from
    /// the master.
    console_out: Option<OwnedFd>,
    last_output: Mutex<Vec<u8>>,
    logger: Option<Logger>,
}

/// A logging program that is not started yet, with the reading ends of stdout and stderr.
type PendingLogger = (LogProgram, [OwnedFd; 2]);

impl PreparedIo {
    /// Opens everything for these streams, and waits for a logging program to be ready.
    pub async fn open(
        streams: &Streams,
        owner: StreamOwner,
        process: LoggedProcess<'_>,
    ) -> Result<Self> {
        let names = [&streams.stdin, &streams.stdout, &streams.stderr];
        if !streams.terminal && names.iter().all(|name| name.is_empty()) {
            return Ok(Self::default());
        }
        let streams = streams.clone();
        let opened = run_blocking(move || Self::open_all(&streams, owner)).await;
        let (mut io, logger) =
            opened.map_err(failed("open the process's streams in a thread"))??;
        if let Some((program, outputs)) = logger {
            io.logger = Some(Logger::start(program, process, outputs).await?);
        }
        Ok(io)
    }

    fn open_all(
        streams: &Streams,
        mut owner: StreamOwner,
    ) -> Result<(Self, Option<PendingLogger>)> {
        let mut io = Self {
            stdin: open_stdin(&streams.stdin)?,
            ..Self::default()
        };
        let stdout = match open_output("stdout", &streams.stdout)? {
            // Without a reader the process would hang as soon as the terminal is full.
            OutputTarget::Nowhere if streams.terminal => {
                let missing = io::Error::from(io::ErrorKind::NotFound);
                return Err(failed(open("stdout", Path::new("")))(missing));
            }
            // The event loop watches no such file: a thread writes it.
            OutputTarget::File(file) if streams.terminal => {
                OutputTarget::LogFile(streams.stdout.clone().into(), file)
            }
            stdout => stdout,
        };
        let has_same_log_file = !streams.terminal
            && matches!(stdout, OutputTarget::LogFile(..))
            && streams.stderr == streams.stdout;
        let stderr = match &stdout {
            // A logging program also reads stderr, whatever name stderr has.
            OutputTarget::Logger(_) => OutputTarget::Nowhere,
            _ if streams.terminal || has_same_log_file => OutputTarget::Nowhere,
            _ => match open_output("stderr", &streams.stderr)? {
                OutputTarget::Logger(_) => return Err(unsupported("stderr", &streams.stderr)),
                target => target,
            },
        };
        if streams.terminal {
            let socket = ConsoleSocket::bind(Path::new(DIRECTORY));
            io.console = Some(socket.map_err(failed("set up the terminal"))?);
            owner = StreamOwner::default();
        } else if io.stdin.is_some() {
            let (read, write) = owned_pipe("stdin", owner)?;
            io.child[0] = Some(read);
            io.stdin_pipe = Some(write);
        }
        let mut logger = None;
        let [out, err] = match stdout {
            OutputTarget::Logger(program) => {
                let (out, out_writer) = owned_pipe("stdout", owner)?;
                // With a terminal stderr has no writer: the program sees its end at once.
                let (err, err_writer) = owned_pipe("stderr", owner)?;
                logger = Some((program, [out, err]));
                [Some(out_writer), Some(err_writer)]
            }
            OutputTarget::Fifo(to) if streams.terminal => [Some(to), None],
            target => {
                let out = io.take_output("stdout", target, owner)?;
                let mut err = io.take_output("stderr", stderr, owner)?;
                if has_same_log_file {
                    let same = out.as_ref().map(OwnedFd::try_clone).transpose();
                    err = same.map_err(failed("make the pipe for stderr"))?;
                }
                [out, err]
            }
        };
        if streams.terminal {
            io.console_out = out;
        } else {
            io.child[1] = out;
            io.child[2] = err;
        }
        Ok((io, logger))
    }

    /// Returns the process's end.
    fn take_output(
        &mut self,
        name: &str,
        target: OutputTarget,
        owner: StreamOwner,
    ) -> Result<Option<OwnedFd>> {
        let (to, log_file) = match target {
            // Only stdout can be a program's, and `open` handles that.
            OutputTarget::Nowhere | OutputTarget::Logger(_) => return Ok(None),
            OutputTarget::File(file) => return Ok(Some(file)),
            OutputTarget::Fifo(to) => (to, None),
            OutputTarget::LogFile(path, file) => (file, Some(path)),
        };
        let (from, write) = owned_pipe(name, owner)?;
        self.outputs.push(PendingOutput {
            from,
            to,
            log_file,
            failure: Mutex::default(),
        });
        Ok(Some(write))
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
        for output in &self.outputs {
            text.extend(output.withhold());
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
        for output in &self.outputs {
            if let Err(error) = output.write_failure() {
                log::warn!(error:%; "the runtime's error is not in the log file");
            }
        }
    }

    /// The path to which the runtime sends the terminal, if there is one.
    pub fn console_socket(&self) -> Option<PathBuf> {
        self.console.as_ref().map(|socket| socket.path.clone())
    }

    /// Starts the copies. The process's ends are closed here: from now on only the process has them
    /// open.
    pub fn attach(self) -> Result<RunningIo> {
        let mut attached = RunningIo::default();
        attached.logger = self.logger;
        for output in self.outputs {
            attached.outputs.push(output.begin()?);
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

/// An output before its process exists: a pipe to copy into a fifo or a log file (`file://`).
///
/// The runtime writes its errors to the stderr that the container gets. The copy begins only after
/// the runtime succeeded. So the output of a failed try can be kept out of the log of a container
/// that the next try starts.
struct PendingOutput {
    /// The read end.
    from: OwnedFd,
    to: OwnedFd,
    /// The path of a log file.
    log_file: Option<PathBuf>,
    /// The output of the last failed try.
    failure: Mutex<Vec<u8>>,
}

impl PendingOutput {
    /// Removes the output of a failed try from the pipe, before a further try.
    fn withhold(&self) -> Vec<u8> {
        let text = unread(&self.from);
        if !text.is_empty() {
            lock(&self.failure).clone_from(&text);
        }
        text
    }

    /// Writes the output of the last failed try, if no try follows. No caller waits for the disk.
    fn write_failure(&self) -> io::Result<()> {
        let text = mem::take(&mut *lock(&self.failure));
        let Some(path) = self.log_file.clone().filter(|_| !text.is_empty()) else {
            return Ok(());
        };
        let mut file = File::from(self.to.try_clone()?);
        spawn_thread(move || {
            if let Err(error) = file.write_all(&text) {
                log::warn!(error:%, path:% = path.display(); "the runtime's error is not in the log file");
            }
        })
    }

    /// Starts to copy: the process exists now.
    fn begin(self) -> Result<StreamCopy> {
        let Some(path) = self.log_file else {
            let from = watched(self.from, Interest::READABLE)?;
            return Ok(StreamCopy::spawn(
                from,
                watched(self.to, Interest::WRITABLE)?,
            ));
        };
        let step = format!("start writing the log file {}", path.display());
        StreamCopy::into_file(self.from, self.to).map_err(failed(step))
    }
}

/// A console socket for the runtime. A drop removes the socket's path.
///
/// The protocol is that of the OCI runtime's `--console-socket`: a stream socket gets a message
/// with a descriptor (SCM_RIGHTS). The runtime connects and sends before `create` returns, and
/// waits for no answer. So the shim needs no task: once the runtime has succeeded, the message is
/// in the socket's queue. Each try of a create makes a connection, and the last connection is the
/// container's.
struct ConsoleSocket {
    listener: UnixListener,
    /// For the runtime's `--console-socket`.
    path: PathBuf,
}

impl ConsoleSocket {
    fn bind(directory: &Path) -> io::Result<Self> {
        make_folders(directory, 0o700)?;
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("bindguard-pty-{}-{number}", std::process::id()));
        // Left by a dead shim that had our pid.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    /// The master that the runtime sent. Call it after the runtime has succeeded.
    fn take_master(&self) -> io::Result<OwnedFd> {
        let mut master = None;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => master = receive(&stream)?.or(master),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let why = "the runtime sent no terminal";
        master.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, why))
    }
}

fn receive(stream: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let mut name = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut buffers = [IoSliceMut::new(&mut name)];
    recvmsg(stream, &mut buffers, &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return Ok(fds.next());
        }
    }
    Ok(None)
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The owner of the pipes: the container's user, so that the container can reopen /dev/stdout.
#[derive(Clone, Copy, Default)]
pub struct StreamOwner {
    pub uid: u32,
    pub gid: u32,
}

/// A pipe: the read end, the write end.
fn owned_pipe(stream: &str, owner: StreamOwner) -> Result<(OwnedFd, OwnedFd)> {
    let made = pipe_with(PipeFlags::CLOEXEC).and_then(|(read, write)| {
        if owner.uid != 0 || owner.gid != 0 {
            let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
            fchown(&write, Some(uid), Some(gid))?;
        }
        Ok((read, write))
    });
    made.map_err(failed(format!("make the pipe for {stream}")))
}

/// Reads the current content of a pipe, whether its end blocks or not. A pipe holds a mebibyte at
/// most (pipe(7)), and the read stops there even if a writer continues.
fn unread(pipe: &OwnedFd) -> Vec<u8> {
    const STEP: usize = 16 * 1024;
    const MAX_BYTES: usize = 1 << 20;
    let (mut bytes, mut buffer) = (Vec::new(), [0; STEP]);
    while bytes.len() < MAX_BYTES {
        let mut fds = [PollFd::new(pipe, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        if !matches!(polled, Ok(1..)) || !fds[0].revents().contains(PollFlags::IN) {
            break;
        }
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    bytes
}

/// Registers a descriptor in the event loop. Calls on it fail from now on instead of waiting. All
/// users of the end share this flag, so never set it on an end that a process gets.
fn watched(fd: OwnedFd, interest: Interest) -> Result<WatchedFd> {
    let watched = fcntl_getfl(&fd)
        .and_then(|flags| fcntl_setfl(&fd, flags | OFlags::NONBLOCK))
        .map_err(io::Error::from)
        .and_then(|()| kernel::watch(fd, interest));
    let step = failed("watch the process's streams");
    Ok(Arc::new(watched.map_err(step)?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::io::copy::DrainLimits;

    struct TestLog {
        pending: PendingOutput,
        process: File,
        file: tempfile::NamedTempFile,
    }

    fn log() -> TestLog {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (read, write) = io::pipe().unwrap();
        let pending = PendingOutput {
            from: read.into(),
            to: file.reopen().unwrap().into(),
            log_file: Some(file.path().to_owned()),
            failure: Mutex::default(),
        };
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
            pending.withhold();
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
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "its own\n");
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
            pending.withhold();
        }
        pending.write_failure().unwrap();
        pending.write_failure().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while fs::read_to_string(file.path()).unwrap() != "again\n" {
            assert!(
                std::time::Instant::now() < deadline,
                "{:?}",
                fs::read_to_string(file.path())
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod console_tests {
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn send(path: &Path, fd: impl AsFd) {
        let stream = UnixStream::connect(path).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(
            &stream,
            &[IoSlice::new(b"/dev/ptmx")],
            &mut ancillary,
            SendFlags::empty(),
        )
        .unwrap();
    }

    #[test]
    fn the_last_try_counts() {
        let dir = tempfile::tempdir().unwrap();
        let socket = ConsoleSocket::bind(dir.path()).unwrap();
        let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        send(&socket.path, &first);
        send(&socket.path, &second);
        let got = rustix::fs::fstat(socket.take_master().unwrap()).unwrap();
        assert_eq!(got.st_ino, rustix::fs::fstat(&second).unwrap().st_ino);
    }

    #[test]
    fn a_missing_terminal_is_an_error_and_the_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = ConsoleSocket::bind(dir.path()).unwrap();
        let path = socket.path.clone();
        assert!(socket.take_master().is_err());
        drop(socket);
        assert!(!path.try_exists().unwrap());
    }
}
