//! Work with a time limit, in a thread that is left alone when it is late.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

/// Threads that are late, for example behind a server that hangs. Beyond the limit no more work is
/// begun.
const MAX_LATE: usize = 8;

/// Begins work, and counts the threads that have not ended.
#[derive(Debug, Default)]
pub struct Deadline {
    /// Each thread has a clone.
    running: Arc<()>,
}

/// Why there is no result.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoResult {
    /// The time is up; the work goes on.
    #[error("it took more than {} ms", .0.as_millis())]
    Late(Duration),
    /// The thread ended without a result.
    #[error("it panicked")]
    Panicked,
    /// Too many earlier threads have not ended.
    #[error("{0} earlier ones have not ended")]
    Busy(usize),
    /// No thread could be started.
    #[error("no thread could be started")]
    NoThread,
}

impl NoResult {
    /// True if the time is up, or earlier work still takes too long.
    pub fn is_late(&self) -> bool {
        match self {
            Self::Late(_) | Self::Busy(_) => true,
            Self::Panicked | Self::NoThread => false,
        }
    }
}

impl Deadline {
    /// The result of the work, if it is there in time.
    ///
    /// # Errors
    /// Names why it is not.
    pub fn within<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let late = Arc::strong_count(&self.running) - 1;
        if late >= MAX_LATE {
            return Err(NoResult::Busy(late));
        }
        let (send, receive) = sync_channel(1);
        let running = Arc::clone(&self.running);
        let thread = thread::Builder::new()
            .name("nri-create".to_owned())
            .spawn(move || {
                let _running = running;
                // Nothing receives a late result.
                let _ = send.send(work());
            });
        thread.map_err(|_| NoResult::NoThread)?;
        receive.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => NoResult::Late(limit),
            RecvTimeoutError::Disconnected => NoResult::Panicked,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn work_that_is_late_or_panics_has_no_result() {
        let deadline = Deadline::default();
        let (_keep, never) = channel::<()>();
        assert_eq!(deadline.within(LONG, || 7), Ok(7));
        assert_eq!(
            deadline.within(SHORT, move || never.recv().is_ok()),
            Err(NoResult::Late(SHORT))
        );
        assert_eq!(
            deadline.within::<u8>(LONG, || panic!("as expected by a test")),
            Err(NoResult::Panicked)
        );
    }

    #[test]
    fn threads_that_hang_do_not_pile_up() {
        let deadline = Deadline::default();
        let keep: Vec<_> = (0..MAX_LATE)
            .map(|_| {
                let (keep, never) = channel::<()>();
                assert_eq!(
                    deadline.within(SHORT, move || never.recv().is_ok()),
                    Err(NoResult::Late(SHORT))
                );
                keep
            })
            .collect();
        assert_eq!(deadline.within(LONG, || ()), Err(NoResult::Busy(MAX_LATE)));
        drop(keep);
        while Arc::strong_count(&deadline.running) > 1 {
            thread::yield_now();
        }
        assert_eq!(deadline.within(LONG, || ()), Ok(()));
    }
}
