//! Work with a time limit, in a thread that is left alone when it is late.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Limit of threads that are late for a pod, for example behind a server that hangs. Beyond the limit
/// no more work is begun for this pod.
const MAX_LATE: usize = 4;

/// Begins work, and counts the threads that have not ended.
#[derive(Debug, Default)]
pub struct Deadline {
    running: Arc<RunningThreads>,
}

/// The threads of each pod that have not ended.
#[derive(Debug, Default)]
struct RunningThreads(Mutex<BTreeMap<String, usize>>);

/// A thread that has not ended.
struct RunningThread {
    pod: String,
    all: Arc<RunningThreads>,
}

impl RunningThread {
    /// # Errors
    /// The number of the pod's threads, if there are too many.
    fn begin(pod: &str, all: &Arc<RunningThreads>) -> Result<Self, usize> {
        let mut threads = all.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = threads.entry(pod.to_owned()).or_default();
        if *count >= MAX_LATE {
            return Err(*count);
        }
        *count += 1;
        Ok(Self {
            pod: pod.to_owned(),
            all: Arc::clone(all),
        })
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        let mut threads = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = threads.get_mut(&self.pod) {
            *count -= 1;
            if *count == 0 {
                threads.remove(&self.pod);
            }
        }
    }
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
    /// Too many earlier threads of the pod have not ended.
    #[error("{0} earlier ones of the pod have not ended")]
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
    /// The result of the work for a pod, if it is there in time.
    ///
    /// # Errors
    /// Names why it is not.
    pub fn within<T: Send + 'static>(
        &self,
        pod: &str,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let running = RunningThread::begin(pod, &self.running).map_err(NoResult::Busy)?;
        let (send, receive) = sync_channel(1);
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
        assert_eq!(deadline.within("p", LONG, || 7), Ok(7));
        assert_eq!(
            deadline.within("p", SHORT, move || never.recv().is_ok()),
            Err(NoResult::Late(SHORT))
        );
        assert_eq!(
            deadline.within::<u8>("p", LONG, || panic!("as expected by a test")),
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
                    deadline.within("p", SHORT, move || never.recv().is_ok()),
                    Err(NoResult::Late(SHORT))
                );
                keep
            })
            .collect();
        let busy = deadline.within("p", LONG, || ());
        assert_eq!(busy, Err(NoResult::Busy(MAX_LATE)));
        assert_eq!(deadline.within("another", LONG, || ()), Ok(()));
        drop(keep);
        while !deadline.running.0.lock().unwrap().is_empty() {
            thread::yield_now();
        }
        assert_eq!(deadline.within("p", LONG, || ()), Ok(()));
    }
}
