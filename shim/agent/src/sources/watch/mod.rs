//! One loop for all files and mounts that are followed, in a thread for each source: a kubelet root
//! or a bound file may be on a server that hangs.
//!
//! ```text
//! survey ─► watches ─► wait ─► inotify or a new mount ─► plan ─► refresh
//!   ▲                                                      │
//!   └──────── a container started, or events were lost ────┘
//! ```
//!
//! A container that can write a watched folder, or mount, decides on the number of events. So the
//! thread reads such events in at most 1 % of the time, and paces the refreshes of each container.

mod container_folders;

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::hash::Hash;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use bindguard_core::error_chain;
use bindguard_sys::{Failure, MountWatch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tracing::warn;

use crate::limits::{Backoff, TokenBucket};
use crate::work::Node;

pub use crate::sources::watch::container_folders::Watches;

/// A source: volumes of a kubelet root, mounts of drivers, or files that containers bind.
pub trait Source {
    /// Names what is refreshed: a volume, a pod or a container.
    type Id: Clone + Eq + Hash;

    fn watches(&mut self) -> &mut Watches<Self::Id>;

    /// Finds and watches everything. Returns false if something could not be read: then a survey
    /// follows soon.
    fn survey(&mut self, schedule: &mut Schedule<Self::Id>) -> bool;

    /// Plans what these events need.
    fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<Self::Id>) {
        self.watches().take_events(events, schedule);
    }

    /// True if new mounts of the host may need a refresh. Then the mount table is watched.
    fn follows_mounts(&self) -> bool;

    /// Plans what new mounts at these places need.
    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<Self::Id>);

    fn refresh(&mut self, due: Vec<Self::Id>, schedule: &mut Schedule<Self::Id>);
}

/// Follows a source for ever.
pub fn follow<F: Source>(node: &Node, what: &str, open: impl Fn() -> io::Result<(F, Rules)>) {
    node.retry_with_backoff(what, || {
        let (mut source, rules) = open()?;
        let mut schedule = Schedule::new(rules, Instant::now());
        let mut mounts = NewMounts::default();
        loop {
            if schedule.is_survey_due(Instant::now()) {
                // Before the survey: a mount that comes meanwhile is an event.
                mounts.set_followed(source.follows_mounts());
                let before = source.watches().begin();
                let is_complete = source.survey(&mut schedule);
                source.watches().remove_unused(&before);
                schedule.surveyed(is_complete, Instant::now());
                if mounts.set_followed(source.follows_mounts()) {
                    // A mount that came before the watch is no event.
                    schedule.plan_surveys(Instant::now());
                }
            }
            let appeared = mounts.appeared();
            if !appeared.is_empty() {
                source.take_mounts(&appeared, &mut schedule);
            }
            refresh_due(&mut source, &mut schedule);
            let next = schedule.next();
            let next = mounts.due.map_or(next, |due| due.min(next));
            let limit = next.saturating_duration_since(Instant::now());
            let inotify = &source.watches().inotify;
            let woken = inotify.wait_with(mounts.polled(), limit)?;
            if woken.by_mounts {
                mounts.changed(Instant::now());
            }
            if woken.by_events {
                let began = Instant::now();
                let events = inotify.read()?;
                source.take_events(events, &mut schedule);
                let work = began.elapsed();
                if schedule.rules.is_paced {
                    refresh_due(&mut source, &mut schedule);
                    thread::sleep(pause_after(work));
                }
            }
        }
    });
}

fn refresh_due<F: Source>(source: &mut F, schedule: &mut Schedule<F::Id>) {
    let due = schedule.due(Instant::now());
    if !due.is_empty() {
        source.refresh(due, schedule);
    }
}

// The times of the next surveys and refreshes.

/// The time for which a new file may stay open for writing. A new link has no event for a close.
const WRITTEN: Duration = Duration::from_secs(1);

/// Limit of refreshes of a container or pod without a pause. Further refreshes are paced, because a
/// container may be able to replace the file all the time.
const REFRESH_BURST: u32 = 5;

/// The interval of paced refreshes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// The times after the start of a pod's container at which the runtime lists it. Containers that
/// start all the time cause one pod list a second.
pub const AFTER_START: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

/// The times after a new mount at which its pod or container is refreshed again. A FUSE mount is in
/// the mount table before its daemon answers, and no event reports the first answer.
pub const AFTER_MOUNT: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(20),
    Duration::from_secs(60),
];

/// The first pause before a survey that failed is tried again, and the longest.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The rules of a source.
#[derive(Debug)]
pub struct Rules {
    /// The interval of surveys.
    pub interval: Duration,
    pub retries: Backoff,
    /// The times of surveys after an event that needs one.
    pub after_start: &'static [Duration],
    /// The times after an event at which its subject is refreshed again.
    pub recheck: &'static [Duration],
    /// True if containers can cause events.
    pub is_paced: bool,
}

impl Rules {
    /// The rules of files that containers bind.
    pub fn of_files(interval: Duration, after_start: &'static [Duration]) -> Self {
        Self {
            interval,
            retries: Backoff::new(RETRY_INTERVAL, MAX_RETRY_INTERVAL),
            after_start,
            recheck: &AFTER_MOUNT,
            is_paced: true,
        }
    }
}

/// The planned surveys and refreshes.
#[derive(Debug)]
pub struct Schedule<T> {
    rules: Rules,
    start: Instant,
    surveys: BTreeSet<Instant>,
    planned: HashMap<T, PlannedTimes>,
    /// The buckets that are not full.
    buckets: HashMap<T, TokenBucket>,
}

/// The times at which something is refreshed.
#[derive(Debug, Default)]
struct PlannedTimes {
    soon: Option<Instant>,
    /// A moment after its file was made.
    made: Option<Instant>,
    again: Vec<Instant>,
}

impl<T: Clone + Eq + Hash> Schedule<T> {
    /// The first survey is due now.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            rules,
            start: now,
            surveys: BTreeSet::from([now]),
            planned: HashMap::new(),
            buckets: HashMap::new(),
        }
    }

    /// A container started or ended. The earliest survey stays: containers that come and go all the
    /// time cannot delay it.
    pub fn plan_surveys(&mut self, now: Instant) {
        let earliest = self.surveys.pop_first();
        self.surveys.clear();
        for (index, after) in self.rules.after_start.iter().enumerate() {
            let at = now + *after;
            let is_first = index == 0;
            self.surveys.insert(match earliest {
                Some(earliest) if is_first => at.min(earliest),
                _ => at,
            });
        }
    }

    /// Plans a further survey.
    pub fn plan_survey_at(&mut self, at: Instant) {
        self.surveys.insert(at);
    }

    /// True once for each survey.
    pub fn is_survey_due(&mut self, now: Instant) -> bool {
        let before = self.surveys.len();
        self.surveys.retain(|survey| *survey > now);
        let is_due = self.surveys.len() < before;
        if self.surveys.is_empty() {
            self.surveys.insert(now + self.rules.interval);
        }
        is_due
    }

    /// A survey ended. If something could not be read, a further survey follows soon.
    pub fn surveyed(&mut self, is_complete: bool, now: Instant) {
        if is_complete {
            self.rules.retries.reset();
        } else {
            let pause = self.rules.retries.after(Duration::ZERO);
            self.surveys.insert(now + pause);
        }
    }

    fn times(&mut self, id: &T) -> &mut PlannedTimes {
        self.planned.entry(id.clone()).or_default()
    }

    /// Plans the refresh of a container whose file was made.
    pub fn plan_refresh_of_made(&mut self, id: &T, now: Instant) {
        self.times(id).made = Some(now + WRITTEN);
    }

    /// Plans a refresh at once.
    pub fn plan_refresh(&mut self, id: &T, now: Instant) {
        self.times(id).soon.get_or_insert(now);
    }

    /// Plans a refresh at once, and those a moment after the event.
    pub fn plan_with_rechecks(&mut self, id: &T, now: Instant) {
        self.plan_refresh(id, now);
        self.plan_rechecks(id, now);
    }

    /// Plans the refreshes a moment after an event. An earlier plan is replaced.
    pub fn plan_rechecks(&mut self, id: &T, now: Instant) {
        let after = self.rules.recheck;
        self.times(id).again = after.iter().map(|after| now + *after).collect();
    }

    /// Removes and returns what is due. A refresh too early after earlier refreshes is planned again.
    pub fn due(&mut self, now: Instant) -> Vec<T> {
        let since_start = now.saturating_duration_since(self.start);
        self.buckets
            .retain(|_, bucket| !bucket.is_full(since_start));
        let mut due = Vec::new();
        for (id, times) in &mut self.planned {
            let mut is_due = times.soon.take_if(|at| *at <= now).is_some();
            is_due |= times.made.take_if(|at| *at <= now).is_some();
            is_due |= times.again.extract_if(.., |at| *at <= now).count() > 0;
            if !is_due {
                continue;
            }
            if self.rules.is_paced {
                let new = || TokenBucket::new(REFRESH_BURST, REFRESH_INTERVAL, since_start);
                let bucket = self.buckets.entry(id.clone()).or_insert_with(new);
                if !bucket.take(since_start) {
                    times.soon = Some(now + bucket.wait(since_start));
                    continue;
                }
            }
            due.push(id.clone());
        }
        self.planned.retain(|_, times| times.next().is_some());
        due
    }

    /// The time at which something is due.
    pub fn next(&self) -> Instant {
        let refreshes = self.planned.values().filter_map(PlannedTimes::next);
        let next = self.surveys.first().copied().into_iter().chain(refreshes);
        next.min()
            .unwrap_or_else(|| Instant::now() + self.rules.interval)
    }
}

impl PlannedTimes {
    fn next(&self) -> Option<Instant> {
        let at = [self.soon, self.made, self.again.first().copied()];
        at.into_iter().flatten().min()
    }
}

// The new mounts of the host. Mounts come in groups: a pod start makes a dozen mounts. Changes
// within a moment are handled together. A node on which mounts change all the time must cost only a
// small share of a processor.

/// The pause after work, as a multiple of the time that the work took.
const PAUSE_FACTOR: u32 = 100;

/// Limit of that pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Changes within this time cause a single list.
const SETTLE_INTERVAL: Duration = Duration::from_millis(10);

/// The pause after work that a container can cause all the time: the work then needs at most 1 % of a
/// processor. The limit is for a busy node, where short work can take long.
fn pause_after(work: Duration) -> Duration {
    (work * PAUSE_FACTOR).min(MAX_PAUSE)
}

/// A watch of the mount table that costs nothing while no container follows mounts. The mounts are
/// only a help: an error is logged, and ends the watch until the next survey.
#[derive(Debug, Default)]
struct NewMounts {
    watch: Option<MountWatch>,
    not_before: Option<Instant>,
    /// The time of the next list: none without a change.
    due: Option<Instant>,
}

impl NewMounts {
    /// Begins or ends the watch. Returns true if it began: earlier mounts are not reported.
    fn set_followed(&mut self, is_followed: bool) -> bool {
        if !is_followed {
            *self = Self::default();
        } else if self.watch.is_none() {
            self.watch = or_warned("follow", MountWatch::open());
            return self.watch.is_some();
        }
        false
    }

    /// The descriptor to poll for `POLLPRI`. While a list is planned, further changes need no
    /// wake-up.
    fn polled(&self) -> Option<BorrowedFd<'_>> {
        let watch = self.watch.as_ref().filter(|_| self.due.is_none());
        watch.map(MountWatch::as_fd)
    }

    /// The mounts have changed. Later changes do not delay the list.
    fn changed(&mut self, now: Instant) {
        let settled = now + SETTLE_INTERVAL;
        let due = self.not_before.map_or(settled, |it| it.max(settled));
        self.due.get_or_insert(due);
    }

    /// The places of the mounts that are new, if a list is due.
    fn appeared(&mut self) -> Vec<PathBuf> {
        let began = Instant::now();
        let is_due = self.due.is_some_and(|due| began >= due);
        let Some(watch) = self.watch.as_mut().filter(|_| is_due) else {
            return Vec::new();
        };
        let appeared = or_warned("list", watch.appeared());
        self.listed(began, Instant::now());
        if appeared.is_none() {
            *self = Self::default();
        }
        appeared.unwrap_or_default()
    }

    /// A list began and ended at these times.
    fn listed(&mut self, began: Instant, ended: Instant) {
        // The places that are new cost about as much again as the list.
        let pause = pause_after(2 * ended.saturating_duration_since(began));
        self.not_before = Some(ended + pause);
        self.due = None;
    }
}

fn or_warned<T>(act: &str, done: Result<T, Failure>) -> Option<T> {
    let warned = done.inspect_err(|error| {
        let why = error_chain(error);
        warn!("{act} the mounts of the host: {why}; surveys find them");
    });
    warned.ok()
}

// inotify(7) as events of directories.

/// Flags of a watch for new names. A symlink is followed.
pub const LINKED: WatchFlags = WatchFlags::CREATE.union(WatchFlags::MOVED_TO);

/// Flags of a watch for new names. A symlink is not followed.
pub const NAMES: WatchFlags = LINKED.union(WatchFlags::DONT_FOLLOW);

/// Flags of a watch for new names and for writes. A write wakes the reader, and is no event.
pub const WRITES: WatchFlags = LINKED.union(WatchFlags::MODIFY);

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

pub fn unwatched(directory: &Path, source: io::Error) -> Failure {
    Failure {
        act: "watch".into(),
        path: directory.to_owned(),
        source,
    }
}

#[cfg(test)]
mod inotify_tests {
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
mod schedule_tests {
    use super::*;

    const AFTER_START: [Duration; 3] = [
        Duration::from_millis(200),
        Duration::from_secs(1),
        Duration::from_secs(5),
    ];

    fn schedule(start: Instant) -> Schedule<String> {
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        Schedule::new(rules, start)
    }

    #[test]
    fn containers_that_come_and_go_do_not_delay_the_survey() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        assert!(schedule.is_survey_due(start) && !schedule.is_survey_due(start));
        for tenth in 0..10 {
            schedule.plan_surveys(start + Duration::from_millis(10 * tenth));
        }
        assert_eq!(schedule.next(), start + AFTER_START[0]);
        let late = start + Duration::from_secs(2);
        assert!(schedule.is_survey_due(late));
        assert_eq!(
            schedule.next(),
            start + Duration::from_millis(90) + AFTER_START[2]
        );
    }

    #[test]
    fn a_survey_that_failed_is_tried_again_with_growing_pauses() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let (mut now, mut pauses) = (start, Vec::new());
        for _ in 0..8 {
            assert!(schedule.is_survey_due(now));
            schedule.surveyed(false, now);
            pauses.push((schedule.next() - now).as_secs());
            now = schedule.next();
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(schedule.is_survey_due(now));
        schedule.surveyed(true, now);
        schedule.surveys.clear();
        assert!(!schedule.is_survey_due(now));
        assert_eq!(schedule.next(), now + Duration::from_secs(300));
    }

    #[test]
    fn a_made_file_is_refreshed_a_moment_after_its_last_event() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let later = start + Duration::from_millis(500);
        schedule.plan_refresh_of_made(&"a".to_owned(), start);
        schedule.plan_refresh_of_made(&"a".to_owned(), later);
        assert!(schedule.due(start + WRITTEN).is_empty());
        assert_eq!(schedule.due(later + WRITTEN), ["a"]);
    }

    /// A container renames a file over its file a thousand times a second, and makes one as often.
    #[test]
    fn a_file_that_is_replaced_all_the_time_is_refreshed_once_a_second() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let mut refreshed = Vec::new();
        for millis in 0..10_000 {
            let now = start + Duration::from_millis(millis);
            schedule.plan_refresh(&"busy".to_owned(), now);
            schedule.plan_refresh_of_made(&"busy".to_owned(), now);
            if millis % 1_000 == 0 {
                schedule.plan_refresh(&"other".to_owned(), now);
            }
            refreshed.extend(schedule.due(now));
        }
        let count = |id: &str| refreshed.iter().filter(|it| *it == id).count();
        let paced = usize::try_from(REFRESH_BURST).unwrap_or_default() + 9;
        assert_eq!((count("busy"), count("other")), (paced, 10));
        // The last change is not lost.
        let later = start + Duration::from_secs(12);
        assert_eq!(schedule.due(later), ["busy"]);
        let idle = start + Duration::from_secs(60);
        assert!(schedule.due(idle).is_empty() && schedule.buckets.is_empty());
    }

    #[test]
    fn a_thing_is_checked_again_after_its_last_event() {
        let start = Instant::now();
        let rules = Rules {
            recheck: &AFTER_START[1..],
            is_paced: false,
            ..Rules::of_files(Duration::from_secs(300), &AFTER_START)
        };
        let mut schedule = Schedule::new(rules, start);
        assert!(schedule.is_survey_due(start));
        let second = AFTER_START[1];
        (0..1000).for_each(|_| schedule.plan_rechecks(&"a", start));
        schedule.plan_rechecks(&"b", start + second);
        assert_eq!(schedule.next(), start + second);
        assert_eq!(schedule.due(start + second), ["a"]);
        let mut both = schedule.due(start + AFTER_START[2]);
        both.sort_unstable();
        assert_eq!(both, ["a", "b"]);
        assert_eq!(schedule.due(start + second + AFTER_START[2]), ["b"]);
        assert_eq!(schedule.next(), start + Duration::from_secs(300));
    }
}

#[cfg(test)]
mod settling_tests {
    use super::*;

    #[test]
    fn changes_of_a_moment_are_one_list() {
        let (mut settling, start) = (NewMounts::default(), Instant::now());
        assert_eq!(settling.due, None);
        for millis in [0, 5, 9] {
            settling.changed(start + Duration::from_millis(millis));
        }
        assert_eq!(settling.due, Some(start + SETTLE_INTERVAL));
        settling.listed(start, start);
        assert_eq!(settling.due, None);
    }

    #[test]
    fn lists_take_half_a_percent_of_the_time() {
        let (mut settling, start) = (NewMounts::default(), Instant::now());
        let ended = start + Duration::from_millis(2);
        settling.listed(start, ended);
        settling.changed(ended);
        assert_eq!(settling.due, Some(ended + Duration::from_millis(400)));
        settling.listed(start, start + Duration::from_secs(60));
        settling.changed(start + Duration::from_secs(60));
        assert_eq!(settling.due, Some(start + Duration::from_secs(61)));
        let late = start + Duration::from_secs(600);
        settling.listed(start, ended);
        settling.changed(late);
        assert_eq!(settling.due, Some(late + SETTLE_INTERVAL));
    }
}
