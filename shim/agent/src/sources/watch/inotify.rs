//! inotify(7) as events of directories.

use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

const NAMES: WatchFlags = WatchFlags::CREATE.union(WatchFlags::MOVED_TO);

/// Room for some hundred events, each with a short name.
const BUFFER: usize = 16 << 10;

/// Limit of events that are read at once; further events wait in the kernel.
const MAX_EVENTS: usize = 4096;

/// A watched directory. The kernel gives the same number again only after [`WatchEvent::Gone`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WatchId(i32);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchEvent {
    /// A name appeared in a directory, or its file was written.
    Appeared(WatchId, OsString, Completeness),
    /// The directory is gone, was renamed, or something is mounted or unmounted there: it is no
    /// longer watched.
    Gone(WatchId),
    /// Events were lost.
    Overflow,
}

/// The state of a file when its name appears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// It was made. A file may still be written.
    Made,
    /// It was renamed to, or a writer closed its file: it is complete.
    Complete,
}

/// The reasons for which a wait ended.
#[derive(Debug, Default)]
pub struct Woken {
    /// An event of inotify.
    pub by_events: bool,
    /// A change of the mount table.
    pub by_mounts: bool,
}

/// An inotify instance.
#[derive(Debug)]
pub struct Inotify {
    descriptor: OwnedFd,
}

impl Inotify {
    /// A new instance. A user has 128 of them by default (`fs.inotify.max_user_instances`).
    ///
    /// # Errors
    /// inotify_init1(2)'s.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            descriptor: inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
        })
    }

    /// Watches a directory for new names. A symlink is not followed.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s, such as ENOSPC at `fs.inotify.max_user_watches`.
    pub fn watch(&self, directory: &Path) -> io::Result<WatchId> {
        self.add(directory, NAMES | WatchFlags::DONT_FOLLOW)
    }

    /// Watches a directory for new names. A symlink is followed.
    ///
    /// # Errors
    /// As [`Inotify::watch`].
    pub fn watch_linked(&self, directory: &Path) -> io::Result<WatchId> {
        self.add(directory, NAMES)
    }

    /// As [`Inotify::watch`], for a directory that is open: no walk of a path waits for a server.
    ///
    /// # Errors
    /// As there.
    pub fn watch_open(&self, directory: impl AsFd) -> io::Result<WatchId> {
        let path = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
        self.add(Path::new(&path), NAMES)
    }

    /// Watches a directory for new and written files. Symlinks are followed, as a container runtime
    /// does.
    ///
    /// # Errors
    /// As [`Inotify::watch`].
    pub fn watch_files(&self, directory: &Path) -> io::Result<WatchId> {
        let files = NAMES | WatchFlags::CLOSE_WRITE | WatchFlags::MOVE_SELF;
        self.add(directory, files)
    }

    fn add(&self, directory: &Path, flags: WatchFlags) -> io::Result<WatchId> {
        let only = WatchFlags::ONLYDIR | WatchFlags::EXCL_UNLINK;
        let watch = inotify::add_watch(&self.descriptor, directory, flags | only)?;
        Ok(WatchId(watch))
    }

    /// Removes a watch. It is no error if the kernel removed it before.
    pub fn unwatch(&self, watch: WatchId) {
        let _ = inotify::remove_watch(&self.descriptor, watch.0);
    }

    /// Waits for events, at most as long as the time limit; `None` waits for ever.
    ///
    /// # Errors
    /// poll(2)'s and read(2)'s.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<Vec<WatchEvent>> {
        let timeout = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        match poll(
            &mut [PollFd::new(&self.descriptor, PollFlags::IN)],
            timeout.as_ref(),
        ) {
            Ok(0) | Err(Errno::INTR) => Ok(Vec::new()),
            Ok(_) => self.read(),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for events, or for a change of this mount table.
    ///
    /// # Errors
    /// poll(2)'s.
    pub fn wait_with(&self, mounts: Option<BorrowedFd<'_>>, limit: Duration) -> io::Result<Woken> {
        let timeout = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut polled = vec![PollFd::new(&self.descriptor, PollFlags::IN)];
        polled.extend(mounts.map(|table| PollFd::from_borrowed_fd(table, PollFlags::PRI)));
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Woken::default()),
            Err(errno) => return Err(errno.into()),
        }
        let is_woken = |polled: &PollFd<'_>| !polled.revents().is_empty();
        Ok(Woken {
            by_events: polled.first().is_some_and(is_woken),
            by_mounts: polled.get(1).is_some_and(is_woken),
        })
    }

    fn read(&self) -> io::Result<Vec<WatchEvent>> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.descriptor, &mut buffer);
        let mut events = Vec::new();
        loop {
            // A process may make events faster than this loop reads them.
            if events.len() >= MAX_EVENTS && reader.is_buffer_empty() {
                return Ok(events);
            }
            match reader.next() {
                Ok(event) => {
                    let name = event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
                    events.extend(WatchEvent::of(event.wd(), event.events(), name));
                }
                Err(Errno::WOULDBLOCK) => return Ok(events),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl WatchEvent {
    fn of(watch: i32, flags: ReadFlags, name: Option<OsString>) -> Option<Self> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Some(Self::Overflow);
        }
        if flags.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF) {
            return Some(Self::Gone(WatchId(watch)));
        }
        let is_complete = flags.intersects(ReadFlags::MOVED_TO | ReadFlags::CLOSE_WRITE);
        let completeness = if is_complete {
            Completeness::Complete
        } else {
            Completeness::Made
        };
        let appeared = is_complete || flags.contains(ReadFlags::CREATE);
        appeared.then_some(Self::Appeared(WatchId(watch), name?, completeness))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    #[test]
    fn one_read_of_a_flood_ends() {
        let folder = tempfile::tempdir().unwrap();
        let inotify = Inotify::new().unwrap();
        inotify.watch(folder.path()).unwrap();
        let made = 2 * MAX_EVENTS;
        for name in 0..made {
            fs::write(folder.path().join(name.to_string()), "").unwrap();
        }
        let first = inotify.wait(None).unwrap().len();
        assert!((MAX_EVENTS..made).contains(&first), "{first}");
        let rest = inotify.wait(None).unwrap().len();
        assert_eq!(first + rest, made);
    }
}
