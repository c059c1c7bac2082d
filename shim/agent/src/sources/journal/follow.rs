//! Follows the journal between two requests for figures: an event shall not wait for Prometheus.
//!
//! The thread sleeps until something changes in the journal's directory. If events are off, the
//! thread is not started.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use bindguard_sys::make_folders;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
use rustix::io::Errno;

/// Creates come in bursts: the journal is read once for a burst.
const PAUSE: Duration = Duration::from_millis(500);

/// Calls `changed` at first and after each change in the journal's directory, for ever. If the
/// directory cannot be created or watched, it calls every `interval`.
pub fn follow_journal(journal: &Path, interval: Duration, mut changed: impl FnMut()) -> ! {
    loop {
        changed();
        let followed = journal
            .parent()
            .map_or(Ok(()), |directory| watch(directory, &mut changed));
        let why = followed.map_or_else(|error| error.to_string(), |()| "it is gone".to_owned());
        tracing::debug!(
            "the directory of {} is not watched: {why}",
            journal.display()
        );
        thread::sleep(interval);
    }
}

/// Returns when the directory is removed.
fn watch(directory: &Path, changed: &mut impl FnMut()) -> io::Result<()> {
    // The guard would create it at the first create with a finding.
    make_folders(directory, 0o755)?;
    let inotify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let writes = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO;
    add_watch(&inotify, directory, writes | WatchFlags::ONLYDIR)?;
    // A line that was written before the watch was there.
    changed();
    loop {
        match poll(&mut [PollFd::new(&inotify, PollFlags::IN)], None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        thread::sleep(PAUSE);
        // The names do not matter: a change of a different file costs only a query of the journal's
        // length.
        let is_gone = drain(&inotify)?;
        changed();
        if is_gone {
            return Ok(());
        }
    }
}

/// Reads the events away. True if the directory is no longer watched.
fn drain(inotify: &OwnedFd) -> io::Result<bool> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(inotify, &mut buffer);
    let mut is_gone = false;
    loop {
        match reader.next() {
            Ok(event) => is_gone |= event.events().contains(ReadFlags::IGNORED),
            Err(Errno::WOULDBLOCK) => return Ok(is_gone),
            Err(errno) => return Err(errno.into()),
        }
    }
}
