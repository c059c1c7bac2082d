//! Files of the host that containers bind: a file is refreshed once the name leads to a different
//! file. Containers that opted in to mounts are also refreshed after each new mount of the host
//! ([`NewMounts`]).
//!
//! ```text
//! survey ─► containers that opted in ─► watches of their files' folders ─► wait ─► file replaced ─► refresh
//!   ▲                                                                        │
//!   └──────────────────── a container started ───────────────────────────────┘
//! ```
//!
//! Each source has its own thread, because a bound file may be on a server that hangs. A container
//! that can write a watched folder decides on the number of events. So the thread reads events in
//! at most 1 % of the time, and paces the refreshes of each container.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::sources::watch::{
    AFTER_MOUNT, Completeness, Inotify, NewMounts, Rechecks, WatchError, WatchEvent, WatchId,
    Woken, pause_after,
};
use crate::threads::Backoff;
use crate::token_bucket::TokenBucket;

/// The containers of engines, or the pods, whose files are followed.
pub trait FollowedFiles {
    /// Finds the containers that opted in, watches the folders of bound files, and refreshes new
    /// containers. Returns false if something could not be read: then a survey follows soon.
    fn survey(&mut self, watches: &mut Watches) -> bool;

    /// Refreshes the container or pod with this id.
    fn refresh(&mut self, id: &str);

    /// True if a container opted in to mounts of the host, or has a bound file that a mount may
    /// cover.
    fn has_mounts(&self) -> bool {
        false
    }

    /// The ids of the containers that bind any of these mount points of the host, or a file below.
    fn with_mounts_at(&self, _places: &[PathBuf]) -> Vec<String> {
        Vec::new()
    }

    /// The time of the next turn of a container that was late.
    fn late_turn(&self) -> Option<Instant> {
        None
    }

    /// Refreshes the container whose late turn is due.
    fn refresh_late(&mut self) {}
}

/// Follows files for ever.
///
/// # Errors
/// If inotify fails.
pub fn follow(
    followed: &mut impl FollowedFiles,
    watches: &mut Watches,
    mut schedule: Schedule,
) -> io::Result<()> {
    let (mut mounts, mut rechecks) = (NewMounts::default(), Rechecks::new(&AFTER_MOUNT));
    loop {
        if schedule.is_survey_due(Instant::now()) {
            let is_complete = followed.survey(watches);
            schedule.surveyed(is_complete, Instant::now());
            // A mount that came before the watch is no event.
            if mounts.try_set_followed(followed.has_mounts()) {
                schedule.plan_surveys(Instant::now());
            }
        }
        let now = Instant::now();
        let appeared = mounts.try_listed(now);
        let with_mounts = followed.with_mounts_at(&appeared);
        if !with_mounts.is_empty() {
            // The mount may cover a watched folder, whose watch reports nothing of the mount.
            schedule.plan_surveys(now);
        }
        for id in with_mounts {
            rechecks.plan(&id, now);
            schedule.plan_refresh(&id, now);
        }
        for id in rechecks.due(now) {
            schedule.plan_refresh(&id, now);
        }
        for id in schedule.due(now) {
            followed.refresh(&id);
        }
        // Due containers get a first turn before the next late turn of a slow container.
        let next = [mounts.due(), rechecks.next(), followed.late_turn()];
        let next = next.into_iter().flatten();
        let next = next.fold(schedule.next(), Instant::min);
        let limit = next.saturating_duration_since(Instant::now());
        let woken = watches.wait_with(mounts.polled(), limit)?;
        if woken.by_mounts {
            mounts.changed(Instant::now());
        }
        if woken.by_events {
            let began = Instant::now();
            let changes = watches.wait(Duration::ZERO)?;
            let now = Instant::now();
            if changes.survey {
                schedule.plan_surveys(now);
            }
            for id in &changes.made {
                schedule.plan_refresh_of_made(id, now);
            }
            for id in &changes.complete {
                schedule.plan_refresh(id, now);
            }
            for id in schedule.due(now) {
                followed.refresh(&id);
            }
            thread::sleep(pause_after(now.saturating_duration_since(began)));
        }
        followed.refresh_late();
    }
}

// The watched folders: those in which containers appear, and the directories of bound files.

/// The purposes of a watch.
#[derive(Debug, Default)]
struct Watched {
    /// Containers appear here under any name.
    has_containers: bool,
    /// The folder of containers is not there yet: names on the way to it.
    on_the_way: Vec<OsString>,
    /// Containers, and the names of the files that they bind. Several containers may bind files of
    /// a directory.
    files: Vec<(String, PathBuf)>,
}

#[derive(Debug, Default)]
pub struct FileChanges {
    /// A container may have started, or a directory was replaced: a survey is due.
    pub survey: bool,
    /// The containers whose file is complete.
    pub complete: HashSet<String>,
    /// The containers whose file was made, and which a program may still write.
    pub made: HashSet<String>,
}

/// All watches. Each survey adds the missing watches, and removes unused watches.
#[derive(Debug)]
pub struct Watches {
    inotify: Inotify,
    watched: HashMap<WatchId, Watched>,
}

impl Watches {
    /// No watch yet.
    pub fn new(inotify: Inotify) -> Self {
        Self {
            inotify,
            watched: HashMap::new(),
        }
    }

    /// Waits for an event, or for a change of this mount table.
    ///
    /// # Errors
    /// poll(2)'s.
    pub fn wait_with(&self, mounts: Option<BorrowedFd<'_>>, limit: Duration) -> io::Result<Woken> {
        self.inotify.wait_with(mounts, limit)
    }

    /// Waits for events.
    ///
    /// # Errors
    /// inotify's.
    pub fn wait(&mut self, limit: Duration) -> io::Result<FileChanges> {
        let mut changes = FileChanges::default();
        for event in self.inotify.wait(Some(limit))? {
            match event {
                WatchEvent::Appeared(watch, name, completeness) => {
                    self.appeared(watch, &name, completeness, &mut changes)
                }
                WatchEvent::Gone(watch) => {
                    // A renamed directory is still watched, while a new directory may have the
                    // path.
                    self.inotify.unwatch(watch);
                    changes.survey |= self.watched.remove(&watch).is_some();
                }
                WatchEvent::Overflow => changes.survey = true,
            }
        }
        Ok(changes)
    }

    fn appeared(
        &self,
        watch: WatchId,
        name: &OsStr,
        completeness: Completeness,
        changes: &mut FileChanges,
    ) {
        let Some(watched) = self.watched.get(&watch) else {
            return;
        };
        changes.survey |=
            watched.has_containers || watched.on_the_way.iter().any(|next| next == name);
        let changed = match completeness {
            Completeness::Complete => &mut changes.complete,
            Completeness::Made => &mut changes.made,
        };
        let meant = watched
            .files
            .iter()
            .filter(|(_, file)| file.as_os_str() == name);
        changed.extend(meant.map(|(container, _)| container.clone()));
    }

    /// Begins a survey: returns the watches before it, for [`Watches::remove_unused`].
    pub fn begin(&mut self) -> Vec<WatchId> {
        std::mem::take(&mut self.watched).into_keys().collect()
    }

    /// Removes the watches that the survey did not need.
    pub fn remove_unused(&self, before: &[WatchId]) {
        let unused = before
            .iter()
            .filter(|watch| !self.watched.contains_key(watch));
        unused.for_each(|watch| self.inotify.unwatch(*watch));
    }

    /// Watches a folder in which containers appear, or the nearest folder above it that exists.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    pub fn watch_state(&mut self, folder: &Path) -> Result<(), WatchError> {
        let mut missing = None;
        for directory in folder.ancestors() {
            match self.inotify.watch(directory) {
                Ok(watch) => {
                    let watched = self.watched.entry(watch).or_default();
                    match missing {
                        Some(name) => watched.on_the_way.push(name),
                        None => watched.has_containers = true,
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    missing = directory.file_name().map(OsStr::to_owned);
                }
                Err(source) => {
                    return Err(WatchError {
                        directory: directory.to_owned(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Watches the directory of a file that a container binds. A directory that is gone may come
    /// back, as with systemd's RuntimeDirectory=: then a survey is due.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    pub fn watch_file(
        &mut self,
        container: &str,
        directory: &Path,
        name: &Path,
    ) -> Result<(), WatchError> {
        let watch = match self.inotify.watch_files(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return self.watch_state(directory);
            }
            watch => watch,
        };
        let watch = watch.map_err(|source| WatchError {
            directory: directory.to_owned(),
            source,
        })?;
        self.watched
            .entry(watch)
            .or_default()
            .files
            .push((container.to_owned(), name.to_owned()));
        Ok(())
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

/// The first pause before a survey that failed is tried again, and the longest.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// A refresh that is planned.
#[derive(Debug, PartialEq, Eq)]
struct PlannedRefresh {
    due: Instant,
    id: String,
    completeness: Completeness,
}

/// The planned surveys and refreshes.
#[derive(Debug)]
pub struct Schedule {
    interval: Duration,
    after_start: &'static [Duration],
    start: Instant,
    /// Sorted.
    surveys: Vec<Instant>,
    retries: Backoff,
    refreshes: Vec<PlannedRefresh>,
    /// The buckets that are not full.
    buckets: HashMap<String, TokenBucket>,
}

impl Schedule {
    /// The first survey is due now. Further surveys follow at this interval, and at these times
    /// after the start of a container.
    pub fn new(interval: Duration, after_start: &'static [Duration], now: Instant) -> Self {
        Self {
            interval,
            after_start,
            start: now,
            surveys: vec![now],
            retries: Backoff::new(RETRY_INTERVAL, MAX_RETRY_INTERVAL),
            refreshes: Vec::new(),
            buckets: HashMap::new(),
        }
    }

    /// A container started or ended. The earliest survey stays: containers that come and go all the
    /// time cannot delay it.
    pub fn plan_surveys(&mut self, now: Instant) {
        let mut planned: Vec<Instant> = self.after_start.iter().map(|after| now + *after).collect();
        if let (Some(first), Some(earliest)) = (planned.first_mut(), self.surveys.first()) {
            *first = (*first).min(*earliest);
        }
        self.surveys = planned;
    }

    /// True once for each survey.
    pub fn is_survey_due(&mut self, now: Instant) -> bool {
        let before = self.surveys.len();
        self.surveys.retain(|survey| *survey > now);
        let is_due = self.surveys.len() < before;
        if self.surveys.is_empty() {
            self.surveys.push(now + self.interval);
        }
        is_due
    }

    /// A survey ended. If something could not be read, a further survey follows soon.
    pub fn surveyed(&mut self, is_complete: bool, now: Instant) {
        if is_complete {
            self.retries = Backoff::new(RETRY_INTERVAL, MAX_RETRY_INTERVAL);
            return;
        }
        let again = now + self.retries.after(Duration::ZERO);
        let index = self.surveys.partition_point(|survey| *survey < again);
        self.surveys.insert(index, again);
    }

    /// Plans the refresh of a container whose file was made.
    pub fn plan_refresh_of_made(&mut self, id: &str, now: Instant) {
        let is_same = |planned: &PlannedRefresh| {
            planned.id == id && planned.completeness == Completeness::Made
        };
        self.refreshes.retain(|planned| !is_same(planned));
        self.plan(now + WRITTEN, id, Completeness::Made);
    }

    /// Plans the refresh of a container whose file is complete.
    pub fn plan_refresh(&mut self, id: &str, now: Instant) {
        let is_same = |planned: &PlannedRefresh| {
            planned.id == id && planned.completeness == Completeness::Complete
        };
        if !self.refreshes.iter().any(is_same) {
            self.plan(now, id, Completeness::Complete);
        }
    }

    fn plan(&mut self, due: Instant, id: &str, completeness: Completeness) {
        self.refreshes.push(PlannedRefresh {
            due,
            id: id.to_owned(),
            completeness,
        });
    }

    /// Removes and returns the containers whose refresh is due. A refresh too early after earlier
    /// refreshes is planned again.
    pub fn due(&mut self, now: Instant) -> Vec<String> {
        let due = self
            .refreshes
            .extract_if(.., |planned| planned.due <= now)
            .map(|planned| planned.id);
        let mut due: Vec<String> = due.collect();
        due.sort_unstable();
        due.dedup();
        let since_start = now.saturating_duration_since(self.start);
        self.buckets
            .retain(|_, bucket| !bucket.is_full(since_start));
        let mut paced = Vec::new();
        for id in due {
            let new = || TokenBucket::new(REFRESH_BURST, REFRESH_INTERVAL, since_start);
            let bucket = self.buckets.entry(id.clone()).or_insert_with(new);
            if bucket.take(since_start) {
                paced.push(id);
            } else {
                let later = now + bucket.wait(since_start);
                self.plan(later, &id, Completeness::Complete);
            }
        }
        paced
    }

    /// The time at which something is due.
    pub fn next(&self) -> Instant {
        let refreshes = self.refreshes.iter().map(|planned| planned.due);
        let next = self.surveys.iter().copied().chain(refreshes).min();
        next.unwrap_or_else(|| Instant::now() + self.interval)
    }
}

#[cfg(test)]
mod watches_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    fn changes(watches: &mut Watches) -> FileChanges {
        watches.wait(Duration::from_secs(10)).unwrap()
    }

    #[test]
    fn the_folder_of_containers_may_appear_later() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::new(Inotify::new().unwrap());
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
        let mut watches = Watches::new(Inotify::new().unwrap());
        let directory = root.path().join("run/service");
        for made in ["run", "run/service"] {
            watches.begin();
            watches
                .watch_file("a", &directory, Path::new("app.conf"))
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
        let mut watches = Watches::new(Inotify::new().unwrap());
        for container in ["a", "b"] {
            watches
                .watch_file(container, &directory, Path::new("app.conf"))
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
            watches
                .wait(Duration::from_millis(50))
                .unwrap()
                .complete
                .is_empty()
        );
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

    fn schedule(start: Instant) -> Schedule {
        Schedule::new(Duration::from_secs(300), &AFTER_START, start)
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
        schedule.plan_refresh_of_made("a", start);
        schedule.plan_refresh_of_made("a", later);
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
            schedule.plan_refresh("busy", now);
            schedule.plan_refresh_of_made("busy", now);
            if millis % 1_000 == 0 {
                schedule.plan_refresh("other", now);
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
}
