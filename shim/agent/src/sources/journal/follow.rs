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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
use rustix::io::Errno;

/// Creates come in bursts: the journal is read once for a burst.
const PAUSE: Duration = Duration::from_millis(500);

/// Calls `changed` at first, after each change in the journal's directory, and every `interval`, for
/// ever: a filesystem may be mounted over the watched directory, or the directory cannot be watched.
pub fn follow_journal(journal: &Path, interval: Duration, mut changed: impl FnMut()) -> ! {
    loop {
        changed();
        let followed = journal
            .parent()
            .map_or(Ok(()), |directory| watch(directory, interval, &mut changed));
        let why = followed.map_or_else(|error| error.to_string(), |()| "it is gone".to_owned());
        tracing::debug!(
            "the directory of {} is not watched: {why}",
            journal.display()
        );
        thread::sleep(interval);
    }
}

/// Returns when the directory is removed.
fn watch(directory: &Path, interval: Duration, changed: &mut impl FnMut()) -> io::Result<()> {
    // The guard would create it at the first create with a finding.
    make_folders(directory, 0o755)?;
    let inotify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let writes = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO;
    let timeout = Timespec {
        tv_sec: i64::try_from(interval.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: interval.subsec_nanos().into(),
    };
    loop {
        // Changes nothing, unless another directory is at the path now.
        add_watch(&inotify, directory, writes | WatchFlags::ONLYDIR)?;
        // A line that was written before the watch was there.
        changed();
        match poll(&mut [PollFd::new(&inotify, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => continue,
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        thread::sleep(PAUSE);
        // The names do not matter: a change of a different file costs only a query of the journal's
        // length.
        if drain(&inotify)? {
            changed();
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::mpsc::channel;

    use bindguard_testing::own_namespace;
    use bindguard_testing::scene::tmpfs;

    use super::*;

    /// A node may mount the disk of its journal late.
    #[test]
    fn a_journal_on_a_disk_that_is_mounted_later_is_read() {
        if !own_namespace() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("journal.jsonl");
        let (lengths, received) = channel();
        let read = journal.clone();
        thread::spawn(move || {
            follow_journal(&read, Duration::from_millis(50), || {
                let _ = lengths.send(read.metadata().map_or(0, |metadata| metadata.len()));
            })
        });
        // The second call follows the watch.
        assert_eq!([(); 2].map(|()| received.recv().unwrap()), [0; 2]);
        tmpfs(folder.path());
        std::fs::write(&journal, "a line").unwrap();
        while received.recv_timeout(Duration::from_secs(30)).unwrap() == 0 {}
    }
}
