//! Copies bytes between two descriptors, in a task.
//!
//! The buffer is on the stack of the step that reads and writes, not in the task: an idle stream
//! costs no memory. Only bytes that the reader has not accepted yet are kept, and until the reader
//! accepts them nothing more is read. So a slow reader delays no other container.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

use super::progress::{CopyProgress, DrainLimits, DrainResult, Mover, progress};

/// The limit of a step; a pipe holds 64 KiB.
const STEP: usize = 16 * 1024;

/// A running copy.
#[derive(Debug)]
pub(crate) struct StreamCopy {
    task: AbortHandle,
    progress: CopyProgress,
}

impl StreamCopy {
    /// Starts copying until the source ends or the destination is gone. Both descriptors must be
    /// non-blocking.
    pub(crate) fn spawn(from: Arc<AsyncFd<OwnedFd>>, to: Arc<AsyncFd<OwnedFd>>) -> Self {
        let (mover, progress) = progress();
        let task = tokio::spawn(async move {
            let ended = run(&from, &to, &mover).await;
            // The descriptors close before the end is reported: the reader must also see the end by
            // then.
            drop((from, to));
            if let Err(error) = ended {
                tracing::debug!(%error, "a stream ended early");
            }
            drop(mover);
        });
        Self {
            task: task.abort_handle(),
            progress,
        }
    }

    /// Aborts the copy.
    pub(crate) fn stop(&self) {
        self.task.abort();
    }

    /// Waits for the end of the stream, and aborts a copy that stalls. A slow copy that still moves
    /// continues alone.
    pub(super) async fn finish_or_stall(&self, limits: DrainLimits) {
        match self.progress.drain(limits).await {
            DrainResult::Passed => {}
            DrainResult::Moving => {
                tracing::warn!(
                    "a slow reader still takes the output of a process that is being deleted"
                )
            }
            DrainResult::Stalled => {
                tracing::warn!(
                    "closing a stream that has no reader, or that a leftover process has open"
                );
                self.stop();
            }
        }
    }
}

async fn run(from: &AsyncFd<OwnedFd>, to: &AsyncFd<OwnedFd>, mover: &Mover) -> io::Result<()> {
    loop {
        let mut ready = from.readable().await?;
        let mut rest = match ready.try_io(|from| step(from.get_ref(), to.get_ref(), mover)) {
            Ok(Ok(CopyStep::Moved)) => continue,
            Ok(Ok(CopyStep::Kept(rest))) => rest,
            Ok(Ok(CopyStep::End)) => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => continue,
        };
        mover.set_holding(true);
        while !rest.is_empty() {
            let written = to
                .async_io(Interest::WRITABLE, |to| Ok(rustix::io::write(to, &rest)?))
                .await?;
            mover.moved(written);
            rest.drain(..written);
        }
        mover.set_holding(false);
    }
}

enum CopyStep {
    Moved,
    /// Read, but not accepted by the destination yet.
    Kept(Vec<u8>),
    End,
}

/// A read, and as many writes as the destination accepts at once.
fn step(from: impl AsFd, to: impl AsFd, mover: &Mover) -> io::Result<CopyStep> {
    let mut buffer = [0; STEP];
    let read = match rustix::io::read(from, &mut buffer) {
        Ok(0) => return Ok(CopyStep::End),
        Ok(read) => read,
        // A pty's master answers EIO when the last process has closed the slave.
        Err(Errno::IO) => return Ok(CopyStep::End),
        Err(Errno::INTR) => return Ok(CopyStep::Moved),
        Err(errno) => return Err(errno.into()),
    };
    let mut left = &buffer[..read];
    while !left.is_empty() {
        match rustix::io::write(&to, left) {
            Ok(written) => {
                mover.moved(written);
                left = &left[written..];
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(CopyStep::Kept(left.to_vec())),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(CopyStep::Moved)
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
        tokio::time::timeout(LONG, copy.finish_or_stall(limits))
            .await
            .unwrap();
    }
}
