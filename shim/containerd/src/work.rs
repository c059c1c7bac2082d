//! Work that may block, away from the event loop, and the error of work that failed.
//!
//! Mounting and unmounting can wait for a disk, and the loop serves every container of the pod.
//! Each piece of work gets a separate thread. A pool would keep threads and their memory in a
//! process that is nearly always idle.

use std::error::Error;
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, thread};

use tokio::runtime::Builder;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;

use crate::kernel;

/// The maximum number of events that epoll_wait(2) returns; tokio would reserve space for 1024.
const EVENTS_AT_ONCE: usize = 128;
/// Enough for a buffer and some calls.
const STACK: usize = 256 * 1024;

// Work is boxed before it is handed to tokio or to a thread: their code for it is in the program
// once, not once for each kind of work.

/// Runs the event loop of a process, one thread, until this work has ended.
pub fn block_on<T>(work: impl Future<Output = T>) -> io::Result<T> {
    let event_loop = Builder::new_current_thread()
        .enable_all()
        .max_io_events_per_tick(EVENTS_AT_ONCE)
        .build()?;
    let mut result = None;
    let work: Pin<Box<dyn Future<Output = ()> + '_>> =
        Box::pin(async { result = Some(work.await) });
    event_loop.block_on(work);
    result.ok_or_else(|| io::ErrorKind::Interrupted.into())
}

/// Starts a task of the event loop.
pub fn spawn(work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(work);
    tokio::spawn(work)
}

/// Starts a thread that no caller waits for.
pub fn spawn_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    spawn_boxed(Box::new(work))
}

fn spawn_boxed(work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    thread::Builder::new()
        .stack_size(STACK)
        .spawn(|| {
            work();
            // glibc keeps the stack for the next thread.
            kernel::release_stack();
        })
        .map(drop)
}

/// Runs `work` on its own thread. An error means that no thread could start, or that the work
/// panicked.
pub async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let result = Arc::new(Mutex::new(None));
    let own = Arc::clone(&result);
    let (done, ended) = oneshot::channel();
    spawn_thread(move || {
        *lock(&own) = Some(work());
        // Without a receiver the result is dropped here, not by the event loop.
        drop(own);
        let _ = done.send(());
    })?;
    ended.await.map_err(io::Error::other)?;
    let result = lock(&result).take();
    result.ok_or_else(|| io::ErrorKind::Interrupted.into())
}

/// Locks for a look-up or a small change, never across an await. A panic elsewhere leaves the value
/// usable.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time limit for one process.
const READ_TIMEOUT: Duration = Duration::from_millis(300);

/// Limit of threads that wait for a process.
const MAX_WAITING: usize = 8;

/// A slot of a reading thread is free again when the thread ends.
static READER_SLOTS: Semaphore = Semaphore::const_new(MAX_WAITING);

/// Reads files of processes that may be hostile, from threads that nothing waits for. Returns the
/// result of `read` for each process, in the same order. `None` for a process that blocks its
/// readers, and for the processes that are left when too many threads wait already.
///
/// A process that hangs in execve(2) holds its exec_update_lock: a reader of its `fd/*`, `stat` or
/// `wchan` waits as long as the process does. A FUSE daemon of a container decides how long. The
/// wait ends when the shim ends, so a thread in this wait keeps no shim alive.
pub fn read_each<P, T>(processes: &[P], read: fn(&P) -> T) -> Vec<Option<T>>
where
    P: Clone + Send + 'static,
    T: Send + 'static,
{
    let mut results = Vec::new();
    while results.len() < processes.len() {
        let left = processes[results.len()..].to_vec();
        let Ok(slot) = READER_SLOTS.try_acquire() else {
            break;
        };
        let (send, received) = channel();
        let work = move || {
            let _slot = slot;
            // After a time limit there is no receiver, and the others have another thread.
            let _ = left.iter().try_for_each(|process| send.send(read(process)));
        };
        if spawn_thread(work).is_err() {
            break;
        }
        while results.len() < processes.len() {
            let result = received.recv_timeout(READ_TIMEOUT).ok();
            let is_late = result.is_none();
            results.push(result);
            if is_late {
                break;
            }
        }
    }
    results.resize_with(processes.len(), || None);
    results
}

/// An action on an object that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct StepError {
    step: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

/// The result of an action on an object.
pub type Result<T, E = StepError> = std::result::Result<T, E>;

/// Names the failed action and its object.
pub fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    step: impl Into<String>,
) -> impl FnOnce(E) -> StepError {
    let step = step.into();
    move |source| StepError {
        step,
        source: Some(source.into()),
    }
}

/// A failure that has no other cause than what the text says.
impl From<String> for StepError {
    fn from(step: String) -> Self {
        Self { step, source: None }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error() {
        assert_eq!(run_blocking(|| 7).await.unwrap(), 7);
        assert!(run_blocking(|| panic!("no")).await.is_err());
    }

    #[test]
    fn a_process_that_hangs_in_execve_delays_no_other() {
        let Some(executing) = Executing::start() else {
            return;
        };
        let pids = [std::process::id(), executing.pid(), std::process::id()];
        let read = unless_it_hangs(move || {
            read_each(&pids, |pid| {
                fs::read_link(format!("/proc/{pid}/exe")).is_ok()
            })
        });
        let read = read.expect("the reader hangs");
        // A kernel that takes no lock answers for each.
        assert!(read == [Some(true), None, Some(true)] || read == [Some(true); 3]);
    }
}
