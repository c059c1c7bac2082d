//! The progress of a stream, and its end.
//!
//! A process's output must be passed on before its delete is answered. But a leftover process may
//! keep the stream open for ever, and a reader may be gone: neither may delay the delete for ever.
//! So the wait depends on whether bytes move, and whether there are any: the limit for a reader
//! that pauses is longer than that for a writer without output.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Time limits for the rest of a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrainLimits {
    /// With no bytes to pass on: a leftover process has the stream open.
    pub(super) idle: Duration,
    /// In total.
    pub(super) total: Duration,
}

/// The result of waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainResult {
    /// All has arrived.
    Passed,
    /// No bytes move.
    Stalled,
    /// The time limit has passed, but bytes move.
    Moving,
}

#[derive(Debug, Default)]
struct Counts {
    moved: AtomicU64,
    holding: AtomicBool,
}

/// The side that moves the bytes. The stream has ended when it is dropped.
#[derive(Debug)]
pub(super) struct Mover {
    counts: Arc<Counts>,
    _open: watch::Sender<()>,
}

/// The side that waits.
#[derive(Debug)]
pub(super) struct CopyProgress {
    counts: Arc<Counts>,
    open: watch::Receiver<()>,
}

/// Both sides of a stream that has not begun.
pub(super) fn progress() -> (Mover, CopyProgress) {
    let counts = Arc::<Counts>::default();
    let (_open, open) = watch::channel(());
    let mover = Mover {
        counts: Arc::clone(&counts),
        _open,
    };
    (mover, CopyProgress { counts, open })
}

impl Mover {
    /// Records that `bytes` bytes have reached the destination.
    pub(super) fn moved(&self, bytes: usize) {
        self.counts.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Records whether bytes wait that the destination does not accept yet.
    pub(super) fn set_holding(&self, some: bool) {
        self.counts.holding.store(some, Ordering::Relaxed);
    }
}

impl CopyProgress {
    /// Waits for the end of the stream.
    pub(super) async fn drain(&self, limits: DrainLimits) -> DrainResult {
        let mut open = self.open.clone();
        let end = Instant::now() + limits.total;
        let mut before = self.counts.moved.load(Ordering::Relaxed);
        // `changed` fails when the mover is gone.
        while tokio::time::timeout(limits.idle, open.changed())
            .await
            .is_err()
        {
            let now = self.counts.moved.load(Ordering::Relaxed);
            match (now == before, Instant::now() >= end) {
                (true, late) if late || !self.counts.holding.load(Ordering::Relaxed) => {
                    return DrainResult::Stalled;
                }
                (false, true) => return DrainResult::Moving,
                _ => before = now,
            }
        }
        DrainResult::Passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For a paused clock, which stands still while any task works: the duration of that work does
    /// not matter.
    const DRAIN_LIMITS: DrainLimits = DrainLimits {
        idle: Duration::from_millis(20),
        total: Duration::from_millis(200),
    };

    #[tokio::test(start_paused = true)]
    async fn the_end_is_the_movers_end() {
        let (mover, progress) = progress();
        drop(mover);
        assert_eq!(progress.drain(DRAIN_LIMITS).await, DrainResult::Passed);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_moving_is_a_stall() {
        let (mover, progress) = progress();
        mover.moved(1);
        assert_eq!(progress.drain(DRAIN_LIMITS).await, DrainResult::Stalled);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_pauses_is_waited_for() {
        let (mover, progress) = progress();
        mover.set_holding(true);
        let begin = Instant::now();
        assert_eq!(progress.drain(DRAIN_LIMITS).await, DrainResult::Stalled);
        assert!(begin.elapsed() >= DRAIN_LIMITS.total);
        tokio::spawn(async move {
            tokio::time::sleep(DRAIN_LIMITS.idle * 3).await;
            drop(mover);
        });
        assert_eq!(progress.drain(DRAIN_LIMITS).await, DrainResult::Passed);
    }
}
