//! Reads files of processes that may be hostile, from threads that nothing waits for.
//!
//! A process that hangs in execve(2) holds its exec_update_lock: a reader of its `fd/*`, `stat` or
//! `wchan` waits as long as the process does. A FUSE daemon of a container decides how long. The
//! wait ends when the shim ends, so a thread in this wait keeps no shim alive.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// Time limit for a process.
const READ_TIMEOUT: Duration = Duration::from_millis(300);

/// Limit of threads that wait for a process.
const MAX_WAITING: usize = 8;

const STACK: usize = 256 * 1024;

/// A slot of a reading thread, freed when the thread ends.
#[derive(Debug)]
struct Reader(Arc<AtomicUsize>);

impl Reader {
    fn one() -> Option<Self> {
        static READERS: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
        let readers = READERS.get_or_init(Arc::default);
        let more = |count: usize| (count < MAX_WAITING).then_some(count + 1);
        readers
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Self(Arc::clone(readers)))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The result of `read` for each process, in the same order. `None` for a process that blocks its
/// readers, and for the processes that are left when too many threads wait already.
pub(crate) fn read_each<P, T>(processes: &[P], read: fn(&P) -> T) -> Vec<Option<T>>
where
    P: Clone + Send + 'static,
    T: Send + 'static,
{
    let mut results = Vec::new();
    while results.len() < processes.len() {
        let left = processes[results.len()..].to_vec();
        let Some(reader) = Reader::one() else {
            break;
        };
        let (send, received) = channel();
        let work = move || {
            let _counted = reader;
            // After a time limit there is no receiver, and a new thread reads the remaining
            // processes.
            let _ = left.iter().try_for_each(|process| send.send(read(process)));
        };
        if thread::Builder::new()
            .stack_size(STACK)
            .spawn(work)
            .is_err()
        {
            break;
        }
        while results.len() < processes.len() {
            match received.recv_timeout(READ_TIMEOUT) {
                Ok(result) => results.push(Some(result)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    results.push(None);
                    break;
                }
            }
        }
    }
    results.resize_with(processes.len(), || None);
    results
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

    use super::*;

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
