//! A reader that never rests: proof that a path never showed the empty file underneath a mount.
//!
//! A kubelet's subpath is a bind mount over an empty file. Between an unmount and a new mount, a
//! container that starts would read an empty file. A polling thread finds a gap of a few
//! microseconds within some thousand swaps.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::process::setpriority_process;

/// The priority of a reader, see setpriority(2).
const READER_NICE: i32 = 10;

/// The observations of a [`PollingReader`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The number of reads.
    pub reads: u64,
    /// The number of empty reads: the file underneath.
    pub empty: u64,
    /// The number of failed opens and reads.
    pub failed: u64,
}

/// A thread that opens and reads a path in a tight loop.
///
/// The thread has the mount namespace of the thread that starts it.
#[derive(Debug)]
pub struct PollingReader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Seen>>,
}

impl PollingReader {
    pub fn start(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            // Reads with a low priority. `None` is the calling thread.
            let _ = setpriority_process(None, READER_NICE);
            let mut seen = Seen::default();
            while !is_stopped.load(Ordering::Relaxed) {
                seen.reads += 1;
                match fs::read(&path) {
                    Ok(content) if content.is_empty() => seen.empty += 1,
                    Ok(_) => {}
                    Err(_) => seen.failed += 1,
                }
            }
            seen
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops, and returns the observations.
    pub fn stop(mut self) -> Seen {
        self.finish()
    }

    fn finish(&mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default()
    }
}

impl Drop for PollingReader {
    fn drop(&mut self) {
        self.finish();
    }
}
