//! Opens the streams that containerd names for a process, away from the event loop.
//!
//! A client may choose any of the names. A name may lead to a server that does not answer; a
//! `file://` may be a fifo without a reader. Such a call waits until the open returns, as with Go's
//! shim. The pod's other containers do not wait.
//!
//! Fifos are opened so that no call blocks and no disconnect fails. An output is opened for reading
//! *and* writing: this succeeds before its reader comes, and a write after the reader has gone
//! fills the fifo instead of failing with EPIPE. The same is true of the write end of an input,
//! which the shim keeps open until `CloseIO`. Any other file (a regular file, /dev/null) is copied
//! by a thread as an input, and passed to the process itself as an output: the event loop watches
//! no such file.
//!
//! A logging program, `binary://`, reads both outputs:
//!
//! ```text
//!   shim ──starts──► program   only CONTAINER_ID and CONTAINER_NAMESPACE in its environment
//!                      3 ◄──── the process's stdout, by a pipe that the shim does not read
//!                      4 ◄──── its stderr
//!                      5 ────► one byte, or the end: "I am ready"
//! ```
//! The process starts when the program is ready. When the process ends, the pipes have no writer,
//! and the program ends. If it does not, the shim sends SIGTERM, and then kills it. Go's shim sends
//! SIGTERM at once, so that a program without a handler loses unread output; here it may first read
//! to the end.
//!
//! The program does not depend on the shim's life: when the shim is killed, the container continues
//! to write to it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bindguard_sys::make_folders;
use nix::libc::{SIGKILL, SIGTERM};
use rustix::fs::{Gid, OFlags, Uid, fchown};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::timeout;

use super::{PendingOutput, PreparedIo, Streams};
use crate::exits::{Exits, Watched};
use crate::kernel;
use crate::work::{Result, StepError, failed, run_blocking, spawn, spawn_thread};

/// The destination of an output.
enum OutputTarget {
    Nowhere,
    /// A fifo, open for both; the shim copies into it.
    Fifo(OwnedFd),
    /// An existing file that is no fifo; the process writes directly.
    File(OwnedFd),
    /// A log file that the shim writes.
    LogFile(PathBuf, OwnedFd),
    /// A program that is not started yet.
    Logger(LogProgram),
}

/// An input: the read end, and the write end that keeps a fifo from ending.
pub struct Input {
    /// For the copy.
    pub read: OwnedFd,
    /// Kept open until `CloseIO`.
    pub hold: Option<OwnedFd>,
}

fn open_stdin(name: &str) -> Result<Option<Input>> {
    if name.is_empty() {
        return Ok(None);
    }
    match parse(name) {
        Some(("fifo", path, _)) => {
            let input = open_input(&path).map_err(failed(open("stdin", &path)))?;
            Ok(Some(input))
        }
        _ => Err(unsupported("stdin", name)),
    }
}

fn open_output(stream: &str, name: &str) -> Result<OutputTarget> {
    if name.is_empty() {
        return Ok(OutputTarget::Nowhere);
    }
    Ok(match parse(name) {
        Some(("fifo", path, _)) => open_output_path(&path).map_err(failed(open(stream, &path)))?,
        Some(("file", path, _)) => {
            let file = open_log_file(&path).map_err(failed(open(stream, &path)))?;
            OutputTarget::LogFile(path, file)
        }
        Some((scheme @ ("binary" | "binary-v2"), path, query)) => {
            OutputTarget::Logger(LogProgram {
                path,
                arguments: arguments(query),
                must_signal_ready: scheme == "binary-v2",
            })
        }
        _ => return Err(unsupported(stream, name)),
    })
}

fn unsupported(stream: &str, name: &str) -> StepError {
    format!("{stream} {name:?}: streams of this kind are not supported").into()
}

fn open(stream: &str, path: &Path) -> String {
    format!("open {stream} {:?}", path.display().to_string())
}

fn open_output_path(path: &Path) -> io::Result<OutputTarget> {
    if fs::metadata(path)?.file_type().is_fifo() {
        let fifo = fifo_options().read(true).write(true).open(path)?;
        return Ok(OutputTarget::Fifo(fifo.into()));
    }
    let file = OpenOptions::new().append(true).open(path)?;
    Ok(OutputTarget::File(file.into()))
}

/// Opens the log file of a `file://` stream, and creates it if needed.
fn open_log_file(path: &Path) -> io::Result<OwnedFd> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).mode(0o644).open(path)?;
    Ok(file.into())
}

fn open_input(path: &Path) -> io::Result<Input> {
    if !fs::metadata(path)?.file_type().is_fifo() {
        let mut file = File::open(path)?;
        let (read, mut write) = io::pipe()?;
        spawn_thread(move || {
            if let Err(error) = io::copy(&mut file, &mut write) {
                log::debug!(error:%; "an input ended early");
            }
        })?;
        return Ok(Input {
            read: read.into(),
            hold: None,
        });
    }
    // The reader first: a non-blocking open of the write end fails (ENXIO) as long as there is no
    // reader.
    let read = fifo_options().read(true).open(path)?;
    let hold = fifo_options().write(true).open(path)?;
    Ok(Input {
        read: read.into(),
        hold: Some(hold.into()),
    })
}

fn fifo_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

#[derive(Debug, PartialEq, Eq)]
pub struct LogProgram {
    path: PathBuf,
    /// Keys and values of the query, in order.
    arguments: Vec<String>,
    /// True if an end without output counts as a failure: otherwise it counts as ready.
    must_signal_ready: bool,
}

/// The scheme, the path and the query of a stream's name, which is a path or a URI. `None` for an
/// invalid path.
///
/// ```text
///   /run/containerd/fifo/1/web-stdout     a path, nearly always of a fifo
///   file:///var/log/web.log               a file that the shim makes
///   binary:///usr/bin/logger?tag=web      a program that reads stdout and stderr; its arguments are `tag web`
///   binary-v2:///usr/bin/logger           the same, and it must report that it is ready
/// ```
/// The parser follows Go's net/url, because clients test against net/url: a host is ignored and may
/// be missing (`file:/x`), `%20` is a blank in a path, and `+` is a blank in a query. A path with
/// an invalid escape is refused, a query part with an invalid escape is skipped. The first value of
/// a repeated key is used.
fn parse(name: &str) -> Option<(&str, PathBuf, &str)> {
    let (scheme, rest) = match name.split_once(":/") {
        Some((scheme, rest)) if !scheme.contains('/') => (scheme, rest),
        _ => return Some(("fifo", name.into(), "")),
    };
    let (rest, _fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = match place.strip_prefix('/') {
        Some(after_slashes) => after_slashes
            .find('/')
            .map_or("", |slash| &after_slashes[slash..]),
        None => &name[scheme.len() + 1..][..1 + place.len()],
    };
    Some((scheme, decoded(path)?.into(), query))
}

fn arguments(query: &str) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    for word in query.split('&') {
        if word.is_empty() || word.contains(';') {
            continue;
        }
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        if let Some(key) = decoded(&key.replace('+', " "))
            && let Some(value) = decoded(&value.replace('+', " "))
            && arguments.chunks(2).all(|known| known[0] != key)
        {
            arguments.extend([key, value]);
        }
    }
    arguments
}

/// Percent-decoding. None: a `%` without two hexadecimal digits.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let (digits, after) = after.split_at_checked(2)?;
        let digit = |digit: u8| char::from(digit).to_digit(16);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = after;
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// A socket's path may have 107 bytes and a bundle's path is longer, so console sockets are in a
/// short directory of our own.
const DIRECTORY: &str = "/run/containerd/s";
static COUNTER: AtomicU64 = AtomicU64::new(0);

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
}

/// A console socket for the runtime. A drop removes the socket's path.
///
/// The protocol is that of the OCI runtime's `--console-socket`: a stream socket gets a message
/// with a descriptor (SCM_RIGHTS). The runtime connects and sends before `create` returns, and
/// waits for no answer. So the shim needs no task: once the runtime has succeeded, the message is
/// in the socket's queue. Each try of a create makes a connection, and the last connection is the
/// container's.
pub struct ConsoleSocket {
    listener: UnixListener,
    /// For the runtime's `--console-socket`.
    pub path: PathBuf,
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
    pub fn take_master(&self) -> io::Result<OwnedFd> {
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

/// The time limit until a program is ready. Go's shim waits for ever, and so does the client.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for reading after the last writer is gone.
const READ_ON_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for its end after SIGTERM.
const TERM_LIMIT: Duration = Duration::from_secs(10);

/// The process whose output a program reads.
#[derive(Clone, Copy)]
pub struct LoggedProcess<'a> {
    /// The container's id, or the exec's.
    pub id: &'a str,
    /// containerd's namespace.
    pub namespace: &'a str,
    pub exits: &'a Arc<Exits>,
}

/// A program that runs, or has run. It is killed when dropped.
pub struct Logger {
    program: PathBuf,
    watched: Arc<Watched>,
    ended: watch::Receiver<bool>,
}

impl Logger {
    /// Starts the program with the reading ends of stdout and stderr, and waits until it is ready.
    pub async fn start(
        program: LogProgram,
        process: LoggedProcess<'_>,
        [stdout, stderr]: [OwnedFd; 2],
    ) -> Result<Self> {
        let name = format!("the logging program {}", program.path.display());
        let step = format!("start {name}");
        let (ready, ready_writer) = io::pipe().map_err(failed(&step))?;
        let mut ready = pipe::Receiver::from_owned_fd(ready.into()).map_err(failed(&step))?;

        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .env_clear()
            .env("CONTAINER_ID", process.id)
            .env("CONTAINER_NAMESPACE", process.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let fds = vec![stdout, stderr, ready_writer.into()];
        kernel::inherit_from_three(&mut command, fds).map_err(failed(&step))?;
        kernel::with_default_signals(&mut command);
        let exits = Arc::clone(process.exits);
        // Known before the thread ends: while the thread lives, the child is no orphan.
        let start = move || command.spawn().map(|child| exits.know(child.id()));
        // Away from the event loop: the file may be on a server that does not answer.
        let known = run_blocking(start).await.and_then(|started| started);
        let known = known.map_err(failed(&step))?;
        let watched = Arc::new(Watched::known(known).map_err(failed(format!("watch {name}")))?);
        let (end, ended) = watch::channel(false);
        let dying = Arc::clone(&watched);
        spawn(async move {
            dying.exit().await;
            end.send_replace(true);
        });
        let logger = Self {
            program: program.path,
            watched,
            ended,
        };

        let mut word = [0];
        match timeout(READY_LIMIT, ready.read(&mut word)).await {
            Ok(Ok(0)) if program.must_signal_ready => {
                Err(format!("{name} did not say that it is ready: it may have ended").into())
            }
            Ok(Ok(_)) => Ok(logger),
            Ok(Err(error)) => Err(failed(step)(error)),
            Err(_) => Err(format!("{name} is not ready after {READY_LIMIT:?}").into()),
        }
    }

    /// Waits for the program's end, which follows the end of its process, and forces it if
    /// necessary.
    pub async fn finish(&self) {
        if self.ends_within(READ_ON_LIMIT).await {
            return;
        }
        self.send(SIGTERM);
        if !self.ends_within(TERM_LIMIT).await {
            log::warn!(
                program:% = self.program.display();
                "a logging program does not end and is killed"
            );
            self.send(SIGKILL);
        }
    }

    async fn ends_within(&self, limit: Duration) -> bool {
        let mut ended = self.ended.clone();
        timeout(limit, ended.wait_for(|ended| *ended)).await.is_ok()
    }

    fn send(&self, signal: i32) {
        if let Err(error) = self.watched.signal(signal) {
            log::debug!(program:% = self.program.display(), error:%; "signal a logging program");
        }
    }
}

impl Drop for Logger {
    fn drop(&mut self) {
        if !*self.ended.borrow() {
            self.send(SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::from(0o600), 0).unwrap();
        (dir, path)
    }

    #[test]
    fn an_output_opens_before_its_reader_and_survives_it() {
        let (_dir, path) = fifo();
        let OutputTarget::Fifo(fd) = open_output_path(&path).unwrap() else {
            panic!("no fifo")
        };
        let mut writer = File::from(fd);
        writer.write_all(b"one").unwrap();
        let mut reader = File::open(&path).unwrap();
        let mut got = [0; 3];
        reader.read_exact(&mut got).unwrap();
        drop(reader);
        writer.write_all(b"two").unwrap();
    }

    #[test]
    fn an_input_ends_when_its_hold_is_dropped() {
        let (_dir, path) = fifo();
        let input = open_input(&path).unwrap();
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        let mut read = File::from(input.read);
        let mut buffer = [0; 8];
        assert_eq!(
            read.read(&mut buffer).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        drop(input.hold);
        assert_eq!(read.read(&mut buffer).unwrap(), 0);
    }

    #[test]
    fn an_input_that_is_no_fifo_is_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [7; 200_000]).unwrap();
        for (path, length) in [(file.path(), 200_000), (Path::new("/dev/null"), 0)] {
            let input = open_input(path).unwrap();
            let mut bytes = Vec::new();
            File::from(input.read).read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, vec![7; length]);
        }
    }

    #[test]
    fn a_regular_file_is_appended_to_by_the_process_itself() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(
            open_output_path(file.path()).unwrap(),
            OutputTarget::File(_)
        ));
        assert!(open_output_path(Path::new("/nonexistent/x")).is_err());
    }

    fn logger(name: &str) -> LogProgram {
        match open_output("stdout", name) {
            Ok(OutputTarget::Logger(program)) => program,
            _ => panic!("{name}: no program"),
        }
    }

    #[test]
    fn paths_and_files() {
        assert!(matches!(
            open_output("stdout", ""),
            Ok(OutputTarget::Nowhere)
        ));
        assert_eq!(
            parse("/run/a b%20"),
            Some(("fifo", "/run/a b%20".into(), ""))
        );
        assert_eq!(
            parse("/run/odd://name"),
            Some(("fifo", "/run/odd://name".into(), ""))
        );
        assert_eq!(
            parse("file:///var/log/a%20b?x=y"),
            Some(("file", "/var/log/a b".into(), "x=y"))
        );
        assert!(open_output("stdout", "npipe:////./pipe/x").is_err());
    }

    /// As Go's net/url reads them.
    #[test]
    fn uris_without_a_host_and_with_invalid_escapes() {
        assert_eq!(
            parse("file:/var/log/a"),
            Some(("file", "/var/log/a".into(), ""))
        );
        assert_eq!(
            logger("binary:/bin/log?tag=web").path,
            PathBuf::from("/bin/log")
        );
        assert_eq!(
            parse("/run/a:/b%zz"),
            Some(("fifo", "/run/a:/b%zz".into(), ""))
        );
        for name in ["file:///tmp/%zz", "file:///tmp/100%", "binary:///bin/%2"] {
            assert_eq!(parse(name), None, "{name}");
        }
        assert_eq!(
            logger("binary:///bin/log?a=%zz&b=1;c&d=2").arguments,
            ["d", "2"]
        );
    }

    #[test]
    fn a_query_becomes_arguments() {
        let program = logger("binary://host/bin/log?tag=web+1&to=a%2Fb&flag&tag=again#end");
        assert_eq!(program.path, PathBuf::from("/bin/log"));
        assert_eq!(program.arguments, ["tag", "web 1", "to", "a/b", "flag", ""]);
        assert!(!program.must_signal_ready);
        assert!(logger("binary-v2:///bin/log").must_signal_ready);
    }

    #[test]
    fn percent_decoding() {
        assert_eq!(decoded("1%C3%A9").as_deref(), Some("1é"));
        assert_eq!(decoded("%+1"), None);
    }
}

#[cfg(test)]
mod logger_tests {
    use super::*;

    /// A program that runs this script; its stdout and stderr have no writer.
    async fn started(script: &str, must_signal_ready: bool) -> Result<Logger> {
        let exits = Arc::new(Exits::default());
        let arguments = ["-c", script].map(str::to_owned).to_vec();
        let program = LogProgram {
            path: "/bin/sh".into(),
            arguments,
            must_signal_ready,
        };
        let pipes = [io::pipe().unwrap().0.into(), io::pipe().unwrap().0.into()];
        Logger::start(
            program,
            LoggedProcess {
                id: "web",
                namespace: "n",
                exits: &exits,
            },
            pipes,
        )
        .await
    }

    #[tokio::test]
    async fn a_closed_pipe_means_ready_for_the_older_kind_only() {
        assert!(started("exit 0", false).await.is_ok());
        let error = started("exit 0", true).await.err().unwrap().to_string();
        assert!(error.ends_with("it may have ended"), "{error}");
        assert!(started("echo >&5", true).await.is_ok());
    }

    #[tokio::test]
    async fn the_environment_is_the_containers_name() {
        let wanted =
            r#"test "$CONTAINER_NAMESPACE/$CONTAINER_ID" = n/web && test -z "$CARGO" && echo >&5"#;
        assert!(started(wanted, true).await.is_ok());
    }

    #[tokio::test]
    async fn a_program_that_reads_to_the_end_is_not_signalled() {
        let folder = tempfile::tempdir().unwrap();
        let signalled = folder.path().join("signalled");
        let script = format!(
            "trap ': > {}' TERM; echo >&5; cat <&3 <&4; sleep 0.1",
            signalled.display()
        );
        // a machine may be too slow for it once, but not ten times
        let mut is_left_alone = false;
        for _ in 0..10 {
            let logger = started(&script, true).await.unwrap();
            logger.finish().await;
            assert!(*logger.ended.borrow());
            is_left_alone = fs::remove_file(&signalled).is_err();
            if is_left_alone {
                break;
            }
        }
        assert!(is_left_alone);
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
