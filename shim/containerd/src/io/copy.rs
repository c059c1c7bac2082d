//! Copies bytes between two descriptors, in a task, or from a pipe to a log file, in a thread.
//!
//! A process's output must be passed on before its delete is answered. But a leftover process may
//! keep the stream open for ever, and a reader may be gone: neither may delay the delete for ever.
//! So the wait depends on whether bytes move, and whether there are any: the limit for a reader
//! that pauses is longer than that for a writer without output.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::WatchedFd;
use crate::work::{spawn, spawn_thread};

/// The limit of a step; a pipe holds 64 KiB.
const STEP: usize = 16 * 1024;

/// A running copy: a task, or a thread that writes a log file.
///
/// The buffer of a task is on the stack of the step that reads and writes: an idle stream costs no
/// memory. Only bytes that the reader has not accepted yet are kept, and until the reader accepts
/// them nothing more is read. So a slow reader delays no other container.
pub struct StreamCopy {
    /// `None` for a thread.
    pub task: Option<AbortHandle>,
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
pub struct DrainLimits {
    /// With no bytes to pass on: a leftover process has the stream open.
    pub idle: Duration,
    pub total: Duration,
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
    pub fn spawn(from: WatchedFd, to: WatchedFd) -> Self {
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
    pub fn into_file(pipe: OwnedFd, file: OwnedFd) -> io::Result<Self> {
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
    pub async fn finish_or_stall(&self, limits: DrainLimits) {
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
                log::warn!(error:%; "cannot write a container's log file: its output is lost until that works again");
            }
        }
        own.moved.fetch_add(read as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pipe() -> (Arc<AsyncFd<OwnedFd>>, Arc<AsyncFd<OwnedFd>>) {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let read = crate::kernel::watch(read, Interest::READABLE).unwrap();
        let write = crate::kernel::watch(write, Interest::WRITABLE).unwrap();
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
