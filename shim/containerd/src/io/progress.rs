//! The progress of a stream, and its end.
//!
//! A process's output must be passed on before its delete is answered; but a process that was left behind may hold the
//! stream open for ever, and a reader may have gone away. Neither may hold the delete for ever, so what counts is whether bytes
//! move, and whether there are any: a reader that pauses is waited for longer than a writer that has nothing to say.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// Time limits for the rest of a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// With nothing to pass on: a leftover process has the stream open.
    pub(super) silent: Duration,
    /// In all.
    pub(super) whole: Duration,
}

/// The result of waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// All has arrived.
    Passed,
    /// Nothing moves.
    Stalled,
    /// It takes longer than anybody waits, and moves.
    Moving,
}

/// The side that moves the bytes; the stream has ended when it is dropped.
#[derive(Debug)]
pub(super) struct Mover {
    moved: Arc<AtomicU64>,
    holding: Arc<AtomicBool>,
    _open: watch::Sender<()>,
}

/// The side that waits.
#[derive(Debug)]
pub(super) struct Progress {
    moved: Arc<AtomicU64>,
    holding: Arc<AtomicBool>,
    open: watch::Receiver<()>,
}

/// Both sides of a stream that has not begun.
pub(super) fn progress() -> (Mover, Progress) {
    let (moved, holding) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (_open, open) = watch::channel(());
    let mover = Mover { moved: Arc::clone(&moved), holding: Arc::clone(&holding), _open };
    (mover, Progress { moved, holding, open })
}

impl Mover {
    /// So many bytes have arrived at the other end.
    pub(super) fn moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes have been read that the other end does not take yet; or not any more.
    pub(super) fn holds(&self, some: bool) {
        self.holding.store(some, Ordering::Relaxed);
    }
}

impl Progress {
    /// Waits for the end of the stream.
    pub(super) async fn rest(&self, patience: Patience) -> Rest {
        let mut open = self.open.clone();
        let end = Instant::now() + patience.whole;
        let mut before = self.moved.load(Ordering::Relaxed);
        // `changed` fails, at last, when the mover is gone.
        while tokio::time::timeout(patience.silent, open.changed()).await.is_err() {
            let now = self.moved.load(Ordering::Relaxed);
            match (now == before, Instant::now() >= end) {
                (true, late) if late || !self.holding.load(Ordering::Relaxed) => return Rest::Stalled,
                (false, true) => return Rest::Moving,
                _ => before = now,
            }
        }
        Rest::Passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a clock that stands still while anything is done: how long that takes does not matter.
    const PATIENCE: Patience = Patience { silent: Duration::from_millis(20), whole: Duration::from_millis(200) };

    #[tokio::test(start_paused = true)]
    async fn the_end_is_the_movers_end() {
        let (mover, progress) = progress();
        drop(mover);
        assert_eq!(progress.rest(PATIENCE).await, Rest::Passed);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_moving_is_a_stall() {
        let (mover, progress) = progress();
        mover.moved(1);
        assert_eq!(progress.rest(PATIENCE).await, Rest::Stalled);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_pauses_is_waited_for() {
        let (mover, progress) = progress();
        mover.holds(true);
        let begin = Instant::now();
        assert_eq!(progress.rest(PATIENCE).await, Rest::Stalled);
        assert!(begin.elapsed() >= PATIENCE.whole);
        tokio::spawn(async move {
            tokio::time::sleep(PATIENCE.silent * 3).await;
            drop(mover);
        });
        assert_eq!(progress.rest(PATIENCE).await, Rest::Passed);
    }
}
