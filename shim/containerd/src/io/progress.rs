//! How far a stream has got, and whether it has ended.
//!
//! What a process wrote is to be passed on before its delete is answered; but a process that was left behind may hold the
//! stream open for ever, and a reader may have gone away. Neither may hold the delete, so what counts is whether bytes move.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

/// The side that moves the bytes; the stream has ended when it is dropped.
#[derive(Debug)]
pub(super) struct Mover {
    moved: Arc<AtomicU64>,
    _open: watch::Sender<()>,
}

/// The side that waits.
#[derive(Debug)]
pub(super) struct Progress {
    moved: Arc<AtomicU64>,
    open: watch::Receiver<()>,
}

/// Both sides of a stream that has not begun.
pub(super) fn progress() -> (Mover, Progress) {
    let moved = Arc::new(AtomicU64::new(0));
    let (_open, open) = watch::channel(());
    (Mover { moved: Arc::clone(&moved), _open }, Progress { moved, open })
}

impl Mover {
    /// So many bytes have arrived at the other end.
    pub(super) fn moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Progress {
    /// Waits for the end of the stream; false when nothing moved for `idle`.
    pub(super) async fn ends_without_stalling(&self, idle: Duration) -> bool {
        let mut open = self.open.clone();
        let mut before = self.moved.load(Ordering::Relaxed);
        // `changed` fails, at last, when the mover is gone.
        while tokio::time::timeout(idle, open.changed()).await.is_err() {
            let now = self.moved.load(Ordering::Relaxed);
            if now == before {
                return false;
            }
            before = now;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn the_end_is_the_movers_end() {
        let (mover, progress) = progress();
        drop(mover);
        assert!(progress.ends_without_stalling(IDLE).await);
    }

    #[tokio::test]
    async fn nothing_moving_is_a_stall() {
        let (mover, progress) = progress();
        mover.moved(1);
        assert!(!progress.ends_without_stalling(IDLE).await);
    }
}
