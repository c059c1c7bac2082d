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
//!
//! A process's output must be passed on before its delete is answered. But a leftover process may
//! keep the stream open for ever, and a reader may be gone: neither may delay the delete for ever.
//! So the wait depends on whether bytes move, and whether there are any: the limit for a reader
//! that pauses is longer than that for a writer without output.

mod open;

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use crate::kernel;
use crate::work::{Result, failed, lock, spawn, spawn_thread};
use open::{ConsoleSocket, Input, Logger};

pub use open::{LoggedProcess, StreamOwner};

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

impl PreparedIo {
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
                log::warn!(
                    error:%, path:% = path.display();
                    "the runtime's error is not in the log file"
                );
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

/// Reads the current content of a pipe, whether its end blocks or not. A pipe holds a mebibyte at
/// most (pipe(7)), and the read stops there even if a writer continues.
fn unread(pipe: &OwnedFd) -> Vec<u8> {
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

/// The limit of a step; a pipe holds 64 KiB.
const STEP: usize = 16 * 1024;

/// A running copy: a task, or a thread that writes a log file.
///
/// The buffer of a task is on the stack of the step that reads and writes: an idle stream costs no
/// memory. Only bytes that the reader has not accepted yet are kept, and until the reader accepts
/// them nothing more is read. So a slow reader delays no other container.
struct StreamCopy {
    /// `None` for a thread.
    task: Option<AbortHandle>,
    progress: Arc<Progress>,
    /// The source and the destination of a task; the end of the copy closes both.
    ends: [Weak<AsyncFd<OwnedFd>>; 2],
}

#[derive(Default)]
struct Progress {
    /// The number of bytes that have reached the destination.
    moved: AtomicU64,
    /// True while bytes wait that the destination does not accept yet.
    holding: AtomicBool,
    ended: watch::Sender<bool>,
}

/// Time limits for the rest of a stream.
#[derive(Clone, Copy)]
struct DrainLimits {
    /// With no bytes to pass on: a leftover process has the stream open.
    idle: Duration,
    total: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DrainResult {
    /// All has arrived.
    Passed,
    /// No bytes move.
    Stalled,
    /// The time limit has passed, but bytes move.
    Moving,
}

impl StreamCopy {
    /// Starts copying until the source ends or the destination is gone. Both descriptors must be
    /// non-blocking.
    fn spawn(from: WatchedFd, to: WatchedFd) -> Self {
        let progress = Arc::<Progress>::default();
        let ends = [&from, &to].map(Arc::downgrade);
        let own = Arc::clone(&progress);
        let task = spawn(async move {
            let ended = run(&from, &to, &own).await;
            // The descriptors close before the end is reported: the reader must also see the end by
            // then.
            drop((from, to));
            if let Err(error) = ended {
                log::debug!(error:%; "a stream ended early");
            }
            own.ended.send_replace(true);
        });
        Self {
            task: Some(task.abort_handle()),
            progress,
            ends,
        }
    }

    /// Starts a thread that writes a log file: `file://`. The pipe's end must be blocking.
    ///
    /// The process gets a pipe and never the file: with a descriptor of the file a container could
    /// truncate its own log. The event loop cannot wait for a disk, so a thread copies from the pipe
    /// to the file; it ends with the last writer. If stdout and stderr name the same file they share
    /// the pipe, and their lines stay in order.
    fn into_file(pipe: OwnedFd, file: OwnedFd) -> io::Result<Self> {
        let progress = Arc::<Progress>::default();
        let own = Arc::clone(&progress);
        spawn_thread(move || {
            pass_on(&mut pipe.into(), &mut file.into(), &own);
            own.ended.send_replace(true);
        })?;
        Ok(Self {
            task: None,
            progress,
            ends: [Weak::new(), Weak::new()],
        })
    }

    /// Waits for the end of the stream, and aborts a copy that stalls. A slow copy that still moves
    /// continues alone.
    async fn finish_or_stall(&self, limits: DrainLimits) {
        // On a busy node the shim may not run for longer than a limit. Then the copy has not had its
        // turn yet: it still takes the bytes that wait, or the end.
        let can_move = |is_holding: bool| {
            let (end, event) = match &self.ends {
                [_, to] if is_holding => (to, PollFlags::OUT),
                [from, _] => (from, PollFlags::IN),
            };
            end.upgrade().is_some_and(|end| {
                let mut fds = [PollFd::new(end.get_ref(), event)];
                matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
            })
        };
        match (self.progress.drain(limits, can_move).await, &self.task) {
            (DrainResult::Passed, _) => {}
            (_, None) => log::warn!(
                "a process left behind still holds a log file's pipe open, or its disk hangs"
            ),
            (DrainResult::Moving, _) => {
                log::warn!(
                    "a slow reader still takes the output of a process that is being deleted"
                )
            }
            (DrainResult::Stalled, Some(task)) => {
                log::warn!(
                    "closing a stream that has no reader, or that a leftover process has open"
                );
                task.abort();
            }
        }
    }
}

impl Progress {
    /// Waits for the end of the stream. `can_move` returns true if the copy has work: bytes to read
    /// or, while it holds bytes, a destination that accepts some.
    async fn drain(&self, limits: DrainLimits, can_move: impl Fn(bool) -> bool) -> DrainResult {
        let mut ended = self.ended.subscribe();
        let end = Instant::now() + limits.total;
        let first = self.moved.load(Ordering::Relaxed);
        let mut before = first;
        while timeout(limits.idle, ended.wait_for(|ended| *ended))
            .await
            .is_err()
        {
            let now = self.moved.load(Ordering::Relaxed);
            let is_late = Instant::now() >= end;
            // A reader that has taken some bytes within the limit may only pause.
            if is_late && now != first {
                return DrainResult::Moving;
            }
            let is_holding = self.holding.load(Ordering::Relaxed);
            if now == before && (is_late || !is_holding) && !can_move(is_holding) {
                return DrainResult::Stalled;
            }
            before = now;
        }
        DrainResult::Passed
    }
}

async fn run(from: &AsyncFd<OwnedFd>, to: &AsyncFd<OwnedFd>, own: &Progress) -> io::Result<()> {
    loop {
        let mut ready = from.readable().await?;
        let mut rest = match ready.try_io(|from| step(from.get_ref(), to.get_ref(), own)) {
            Ok(Ok(Some(rest))) => rest,
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => continue,
        };
        own.holding.store(!rest.is_empty(), Ordering::Relaxed);
        while !rest.is_empty() {
            let written = to
                .async_io(Interest::WRITABLE, |to| Ok(rustix::io::write(to, &rest)?))
                .await?;
            own.moved.fetch_add(written as u64, Ordering::Relaxed);
            rest.drain(..written);
        }
        own.holding.store(false, Ordering::Relaxed);
    }
}

/// A read, and as many writes as the destination accepts at once. Returns the bytes that the
/// destination does not accept yet; `None` at the end.
fn step(from: impl AsFd, to: impl AsFd, own: &Progress) -> io::Result<Option<Vec<u8>>> {
    let mut buffer = [0; STEP];
    let read = match rustix::io::read(from, &mut buffer) {
        // A pty's master answers EIO when the last process has closed the slave.
        Ok(0) | Err(Errno::IO) => return Ok(None),
        Ok(read) => read,
        Err(Errno::INTR) => return Ok(Some(Vec::new())),
        Err(errno) => return Err(errno.into()),
    };
    let mut left = &buffer[..read];
    while !left.is_empty() {
        match rustix::io::write(&to, left) {
            Ok(written) => {
                own.moved.fetch_add(written as u64, Ordering::Relaxed);
                left = &left[written..];
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(Some(left.to_vec()))
}

/// A full disk costs lines of the log and nothing else: a process that had to wait for space would
/// hang with it.
fn pass_on(pipe: &mut File, file: &mut File, own: &Progress) {
    let mut buffer = [0; STEP];
    let mut losing = false;
    loop {
        let read = match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return log::warn!(error:%; "cannot read a container's output any more");
            }
        };
        own.holding.store(true, Ordering::Relaxed);
        let written = file.write_all(&buffer[..read]);
        own.holding.store(false, Ordering::Relaxed);
        match written {
            Ok(()) => losing = false,
            Err(_) if losing => {}
            Err(error) => {
                losing = true;
                log::warn!(
                    error:%;
                    "cannot write a container's log file: its output is lost until that works again"
                );
            }
        }
        own.moved.fetch_add(read as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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
mod copy_tests {
    use std::time::Duration;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pipe() -> (Arc<AsyncFd<OwnedFd>>, Arc<AsyncFd<OwnedFd>>) {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let read = kernel::watch(read, Interest::READABLE).unwrap();
        let write = kernel::watch(write, Interest::WRITABLE).unwrap();
        (Arc::new(read), Arc::new(write))
    }

    #[tokio::test]
    async fn more_than_all_pipes_hold_arrives_whole_and_in_order() {
        let ((source, feed), (drain, target)) = (pipe(), pipe());
        let copy = StreamCopy::spawn(source, target);
        let sent: Vec<u8> = (0..1_000_000_u32)
            .map(|n| n.to_le_bytes()[n as usize % 3])
            .collect();
        let feeding = sent.clone();
        tokio::spawn(async move {
            let mut left = &feeding[..];
            while !left.is_empty() {
                let written = feed
                    .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, left)?))
                    .await
                    .unwrap();
                left = &left[written..];
            }
        });
        let mut got = Vec::new();
        loop {
            let mut buffer = [0; 5000];
            let read = drain
                .async_io(Interest::READABLE, |fd| {
                    Ok(rustix::io::read(fd, &mut buffer)?)
                })
                .await
                .unwrap();
            if read == 0 {
                break;
            }
            got.extend_from_slice(&buffer[..read]);
        }
        assert!(got == sent);
        copy.finish_or_stall(DrainLimits {
            idle: LONG,
            total: LONG,
        })
        .await;
    }

    #[tokio::test]
    async fn a_stream_without_a_reader_is_closed() {
        let ((source, feed), (_drain, target)) = (pipe(), pipe());
        let copy = StreamCopy::spawn(source, target);
        while rustix::io::write(feed.get_ref(), &[1; 4096]).is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let limits = DrainLimits {
            idle: Duration::from_millis(50),
            total: Duration::from_millis(100),
        };
        timeout(LONG, copy.finish_or_stall(limits)).await.unwrap();
    }

    /// A shim that did not run for longer than the limit: the limit has passed, and the last bytes
    /// and the end are there.
    #[tokio::test]
    async fn a_copy_that_had_no_turn_is_not_stalled() {
        let ((source, feed), (drain, target)) = (pipe(), pipe());
        let copy = StreamCopy::spawn(source, target);
        // The copy waits for its source.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let limits = DrainLimits {
            idle: Duration::from_millis(20),
            total: LONG,
        };
        let no_turn = async move {
            rustix::io::write(feed.get_ref(), &[7; 10_000]).unwrap();
            std::thread::sleep(limits.idle * 5);
        };
        tokio::join!(copy.finish_or_stall(limits), no_turn);
        let mut got = [0; 20_000];
        assert_eq!(
            rustix::io::read(drain.get_ref(), &mut got).unwrap(),
            10_000,
            "the last bytes are lost"
        );
    }

    /// Also a reader that takes nothing at the moment of the limit.
    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_gets_the_rest() {
        let progress = Progress::default();
        progress.holding.store(true, Ordering::Relaxed);
        let (drained, ()) = tokio::join!(progress.drain(DRAIN_LIMITS, |_| false), async {
            tokio::time::sleep(DRAIN_LIMITS.total / 2).await;
            progress.moved.store(1, Ordering::Relaxed);
        });
        assert_eq!(drained, DrainResult::Moving);
    }

    /// For a paused clock, which stands still while any task works: the duration of that work does
    /// not matter.
    const DRAIN_LIMITS: DrainLimits = DrainLimits {
        idle: Duration::from_millis(20),
        total: Duration::from_millis(200),
    };

    #[tokio::test(start_paused = true)]
    async fn the_end_is_the_movers_end() {
        let progress = Progress::default();
        progress.ended.send_replace(true);
        assert_eq!(
            progress.drain(DRAIN_LIMITS, |_| false).await,
            DrainResult::Passed
        );
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_moving_is_a_stall() {
        let progress = Progress::default();
        progress.moved.store(1, Ordering::Relaxed);
        assert_eq!(
            progress.drain(DRAIN_LIMITS, |_| false).await,
            DrainResult::Stalled
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_pauses_is_waited_for() {
        let progress = Arc::new(Progress::default());
        progress.holding.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        assert_eq!(
            progress.drain(DRAIN_LIMITS, |_| false).await,
            DrainResult::Stalled
        );
        assert!(begin.elapsed() >= DRAIN_LIMITS.total);
        let own = Arc::clone(&progress);
        tokio::spawn(async move {
            tokio::time::sleep(DRAIN_LIMITS.idle * 3).await;
            own.ended.send_replace(true);
        });
        assert_eq!(
            progress.drain(DRAIN_LIMITS, |_| false).await,
            DrainResult::Passed
        );
    }

    #[tokio::test]
    async fn all_is_in_the_file_at_the_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (read, write) = io::pipe().unwrap();
        let writer = StreamCopy::into_file(read.into(), file.reopen().unwrap().into()).unwrap();
        let mut write = File::from(OwnedFd::from(write));
        write.write_all(&[7; 200_000]).unwrap();
        drop(write);
        let long = Duration::from_secs(60);
        writer
            .finish_or_stall(DrainLimits {
                idle: long,
                total: long,
            })
            .await;
        assert_eq!(std::fs::read(file.path()).unwrap(), [7; 200_000]);
    }
}
