//! inotify(7) as events of directories, and the watched folders of containers: those in which
//! containers appear, and the directories of bound files.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::hash::Hash;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_guard::refresh::FileBind;
use bindguard_sys::Failure;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::sources::watch::Schedule;

/// Flags of a watch for new names. A symlink is followed.
pub const LINKED: WatchFlags = WatchFlags::CREATE.union(WatchFlags::MOVED_TO);

/// Flags of a watch for new names. A symlink is not followed.
pub const NAMES: WatchFlags = LINKED.union(WatchFlags::DONT_FOLLOW);

/// Flags of a watch for new names and for writes. A write wakes the reader, and is no event.
pub const WRITES: WatchFlags = LINKED.union(WatchFlags::MODIFY);

/// Flags of a watch for new and written files. Symlinks are followed, as a container runtime does.
const FILES: WatchFlags = LINKED
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::MOVE_SELF);

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
    Appeared {
        watch: WatchId,
        name: OsString,
        /// True if it was renamed to, or a writer closed its file. A file that was made may still be
        /// written.
        is_complete: bool,
    },
    /// The directory is gone, was renamed, or something is mounted or unmounted there: it is no
    /// longer watched.
    Gone(WatchId),
    /// Events were lost.
    Overflow,
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

    /// Watches a directory for the events of these flags.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s, such as ENOSPC at `fs.inotify.max_user_watches`.
    pub fn watch(&self, directory: &Path, flags: WatchFlags) -> io::Result<WatchId> {
        let only = WatchFlags::ONLYDIR | WatchFlags::EXCL_UNLINK;
        let watch = inotify::add_watch(&self.descriptor, directory, flags | only)?;
        Ok(WatchId(watch))
    }

    /// Removes a watch. It is no error if the kernel removed it before.
    pub fn unwatch(&self, watch: WatchId) {
        let _ = inotify::remove_watch(&self.descriptor, watch.0);
    }

    /// Waits for events, or for a change of this mount table, at most as long as the time limit.
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

    /// The events that are there.
    ///
    /// # Errors
    /// read(2)'s.
    pub fn read(&self) -> io::Result<Vec<WatchEvent>> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.descriptor, &mut buffer);
        let mut events = Vec::new();
        loop {
            // A process may make events faster than this loop reads them.
            if events.len() >= MAX_EVENTS && reader.is_buffer_empty() {
                return Ok(events);
            }
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::WOULDBLOCK) => return Ok(events),
                Err(errno) => return Err(errno.into()),
            };
            let (watch, flags) = (WatchId(event.wd()), event.events());
            let is_complete = flags.intersects(ReadFlags::MOVED_TO | ReadFlags::CLOSE_WRITE);
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                events.push(WatchEvent::Overflow);
            } else if flags.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF) {
                events.push(WatchEvent::Gone(watch));
            } else if let Some(name) = event.file_name()
                && (is_complete || flags.contains(ReadFlags::CREATE))
            {
                events.push(WatchEvent::Appeared {
                    watch,
                    name: OsStr::from_bytes(name.to_bytes()).to_owned(),
                    is_complete,
                });
            }
        }
    }
}

/// The purposes of a watch. `T` names containers or pods.
#[derive(Debug)]
struct Watched<T> {
    /// Containers appear here under any name.
    has_containers: bool,
    /// The folder of containers is not there yet: names on the way to it.
    on_the_way: Vec<OsString>,
    /// Containers or pods, and the names of the files that they bind. Several may bind files of a
    /// directory.
    files: Vec<(T, PathBuf)>,
}

/// The watched folders of containers. Each survey adds the missing watches, and removes unused
/// watches.
#[derive(Debug)]
pub struct Watches<T> {
    pub inotify: Inotify,
    watched: HashMap<WatchId, Watched<T>>,
}

impl<T: Clone + Eq + Hash> Watches<T> {
    /// No watch yet.
    ///
    /// # Errors
    /// inotify_init1(2)'s.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            inotify: Inotify::new()?,
            watched: HashMap::new(),
        })
    }

    /// Plans the refreshes of the containers whose files changed. A survey is due once a container
    /// may have started, or a directory was replaced.
    pub fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<T>) {
        let now = Instant::now();
        let mut is_survey = false;
        for event in events {
            match event {
                WatchEvent::Appeared {
                    watch,
                    name,
                    is_complete,
                } => {
                    let Some(watched) = self.watched.get(&watch) else {
                        continue;
                    };
                    is_survey |= watched.has_containers || watched.on_the_way.contains(&name);
                    for (container, file) in &watched.files {
                        match is_complete {
                            _ if file.as_os_str() != name => {}
                            true => schedule.plan_refresh(container, now),
                            false => schedule.plan_refresh_of_made(container, now),
                        }
                    }
                }
                WatchEvent::Gone(watch) => {
                    // A renamed directory is still watched, while a new directory may have the
                    // path.
                    self.inotify.unwatch(watch);
                    is_survey |= self.watched.remove(&watch).is_some();
                }
                WatchEvent::Overflow => is_survey = true,
            }
        }
        if is_survey {
            schedule.plan_surveys(now);
        }
    }

    /// Begins a survey: returns the watches before it, for [`Watches::remove_unused`].
    pub fn begin(&mut self) -> Vec<WatchId> {
        std::mem::take(&mut self.watched).into_keys().collect()
    }

    /// Removes the watches that the survey did not need.
    pub fn remove_unused(&self, before: &[WatchId]) {
        for watch in before {
            if !self.watched.contains_key(watch) {
                self.inotify.unwatch(*watch);
            }
        }
    }

    /// Watches the folders in which containers appear. A folder that is not there may come later.
    /// Returns the reasons for which one is not watched.
    pub fn watch_states(&mut self, folders: impl IntoIterator<Item = PathBuf>) -> Vec<String> {
        let mut failures = Vec::new();
        for folder in folders {
            if let Err(error) = self.watch_state(&folder) {
                failures.push(error_chain(&error));
            }
        }
        failures
    }

    /// Watches a folder in which containers appear, or the nearest folder above it that exists.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    fn watch_state(&mut self, folder: &Path) -> Result<(), Failure> {
        let mut missing = None;
        for directory in folder.ancestors() {
            let Some(watched) = self.watch(directory, NAMES)? else {
                missing = directory.file_name().map(OsStr::to_owned);
                continue;
            };
            match missing {
                Some(name) => watched.on_the_way.push(name),
                None => watched.has_containers = true,
            }
            break;
        }
        Ok(())
    }

    /// `None` if the directory is not there.
    fn watch(
        &mut self,
        directory: &Path,
        flags: WatchFlags,
    ) -> Result<Option<&mut Watched<T>>, Failure> {
        match self.inotify.watch(directory, flags) {
            Ok(watch) => Ok(Some(self.watched.entry(watch).or_insert_with(|| Watched {
                has_containers: false,
                on_the_way: Vec::new(),
                files: Vec::new(),
            }))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unwatched(directory, error)),
        }
    }

    /// Watches the directories of files that a container binds. A directory that is gone may come
    /// back, as with systemd's RuntimeDirectory=: then a survey is due. Returns the reasons for which
    /// one is not watched.
    pub fn watch_files<'b>(
        &mut self,
        container: &T,
        binds: impl IntoIterator<Item = &'b FileBind>,
    ) -> Vec<String> {
        let mut failures = Vec::new();
        for bind in binds {
            // To add a watch is a walk.
            if bind.answers()
                && let Err(error) = self.watch_file(container, &bind.directory, &bind.name)
            {
                failures.push(error_chain(&error));
            }
        }
        failures
    }

    fn watch_file(&mut self, container: &T, directory: &Path, name: &Path) -> Result<(), Failure> {
        let Some(watched) = self.watch(directory, FILES)? else {
            return self.watch_state(directory);
        };
        watched.files.push((container.clone(), name.to_owned()));
        Ok(())
    }
}

pub fn unwatched(directory: &Path, source: io::Error) -> Failure {
    Failure {
        act: "watch".into(),
        path: directory.to_owned(),
        source,
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
        inotify.watch(folder.path(), NAMES).unwrap();
        let made = 2 * MAX_EVENTS;
        for name in 0..made {
            fs::write(folder.path().join(name.to_string()), "").unwrap();
        }
        let first = inotify.read().unwrap().len();
        assert!((MAX_EVENTS..made).contains(&first), "{first}");
        let rest = inotify.read().unwrap().len();
        assert_eq!(first + rest, made);
    }
}

#[cfg(test)]
mod watches_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashSet;
    use std::fs;

    use super::*;
    use crate::sources::watch::{AFTER_START, Rules};

    #[derive(Debug, Default)]
    struct FileChanges {
        survey: bool,
        complete: HashSet<String>,
        made: HashSet<String>,
    }

    fn changes_within(watches: &mut Watches<String>, limit: Duration) -> FileChanges {
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        let start = Instant::now();
        let mut schedule = Schedule::new(rules, start);
        assert!(schedule.is_survey_due(start));
        let next_survey = schedule.next();
        watches.inotify.wait_with(None, limit).unwrap();
        let events = watches.inotify.read().unwrap();
        watches.take_events(events, &mut schedule);
        let complete = schedule.due(Instant::now());
        let made = schedule.due(Instant::now() + Duration::from_millis(1001));
        FileChanges {
            survey: schedule.next() < next_survey,
            complete: complete.into_iter().collect(),
            made: made.into_iter().collect(),
        }
    }

    fn changes(watches: &mut Watches<String>) -> FileChanges {
        changes_within(watches, Duration::from_secs(10))
    }

    #[test]
    fn the_folder_of_containers_may_appear_later() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::<String>::new().unwrap();
        let state = root.path().join("run/crun");
        for (made, is_survey) in [
            ("other", false),
            ("run", true),
            ("run/other", false),
            ("run/crun", true),
        ] {
            watches.begin();
            watches.watch_state(&state).unwrap();
            fs::create_dir(root.path().join(made)).unwrap();
            assert_eq!(changes(&mut watches).survey, is_survey, "{made}");
        }
        watches.begin();
        watches.watch_state(&state).unwrap();
        fs::create_dir(state.join("id")).unwrap();
        assert!(changes(&mut watches).survey);
    }

    #[test]
    fn the_directory_of_a_file_may_come_back() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::<String>::new().unwrap();
        let directory = root.path().join("run/service");
        for made in ["run", "run/service"] {
            watches.begin();
            watches
                .watch_file(&"a".to_owned(), &directory, Path::new("app.conf"))
                .unwrap();
            fs::create_dir(root.path().join(made)).unwrap();
            assert!(changes(&mut watches).survey, "{made}");
        }
    }

    #[test]
    fn each_way_of_replacing_a_file_is_seen() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("conf");
        fs::create_dir(&directory).unwrap();
        let at = |name: &str| directory.join(name);
        fs::write(at("app.conf"), "one").unwrap();
        let mut watches = Watches::<String>::new().unwrap();
        for container in ["a", "b"] {
            watches
                .watch_file(&container.to_owned(), &directory, Path::new("app.conf"))
                .unwrap();
        }
        let both = HashSet::from(["a".to_owned(), "b".to_owned()]);
        fs::write(at("app.conf.new"), "two").unwrap();
        fs::rename(at("app.conf.new"), at("app.conf")).unwrap();
        assert_eq!(changes(&mut watches).complete, both);
        // In place, and removed and created again.
        fs::write(at("app.conf"), "three").unwrap();
        assert_eq!(changes(&mut watches).complete, both);
        fs::remove_file(at("app.conf")).unwrap();
        std::os::unix::fs::symlink("app.conf.4", at("app.conf")).unwrap();
        let made = changes(&mut watches);
        assert_eq!(
            (made.made, made.complete.len(), made.survey),
            (both, 0, false)
        );
        // The directory itself.
        fs::rename(&directory, root.path().join("old")).unwrap();
        assert!(changes(&mut watches).survey);
        fs::write(root.path().join("old/app.conf.4"), "").unwrap();
        assert!(
            changes_within(&mut watches, Duration::from_millis(50))
                .complete
                .is_empty()
        );
    }
}
