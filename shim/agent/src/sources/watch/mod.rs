//! Follows the kubelet's updates: with a thread for each kubelet root, because a root may hang on a
//! file server.
//!
//! ```text
//! survey ─► watches ─► wait ─► ..data renamed ─► re-bind on the host ─┐
//!             ▲                                                       │
//!             └───────────────────────────────────────────────────────┘
//! ```

mod inotify;
mod tree;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_guard::refresh::VolumeOfPod;
use bindguard_sys::{Failure, MountWatch};
use tracing::warn;

use crate::sources::watch::tree::{TreeChanges, WatchTree};
use crate::threads::Backoff;

pub use crate::sources::watch::inotify::{Completeness, Inotify, WatchEvent, WatchId, Woken};
pub use crate::sources::watch::tree::{WatchError, folder_of_pods};

/// The times after an update at which its volume is checked again. A kubelet may bind a subpath
/// from the old payload in the very moment of the update (kubernetes#127602), and no event reports
/// a bind. The update lands 60 to 230 ms around the bind.
const AFTER_UPDATE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// The reason for which a volume is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// `..data` was renamed, or the volume is new.
    Update,
    /// A survey, or the check a moment after an update.
    Survey,
}

/// A notice of the thread that follows a kubelet root.
#[derive(Debug)]
pub enum Notice {
    /// The subpaths of these volumes may be stale.
    Changed(Vec<VolumeOfPod>, Cause),
    /// A survey ended, with this number of watched volumes.
    Surveyed {
        /// The number of watched volumes.
        volumes: usize,
        /// The time that it took.
        took: Duration,
    },
    /// Events were lost, or the folder of the pods came or went: a survey follows.
    Interrupted,
    /// A directory is not watched.
    NotWatched(WatchError),
}

/// Follows a kubelet root for ever.
///
/// # Errors
/// If there is no inotify instance, or it fails.
pub fn follow(root: PathBuf, survey: Duration, mut notify: impl FnMut(Notice)) -> io::Result<()> {
    let mut tree = WatchTree::new(root, Inotify::new()?);
    let mut rechecks = Rechecks::new(&AFTER_UPDATE);
    let mut mounts = NewMounts::default();
    let mut next_survey = Instant::now();
    let mut retries = Backoff::of_surveys(survey);
    loop {
        let now = Instant::now();
        let appeared = mounts.try_listed(now);
        let changes = tree.mounted(&appeared);
        if changes.survey {
            next_survey = now;
        }
        plan_rechecks(&changes, &mut rechecks);
        notify_of(changes, Cause::Update, &mut notify);
        if now >= next_survey {
            // A mount over a watched folder is no event of the folder: after a boot the kubelet
            // mounts the volumes of its pods over the folders on the disk. Followed before the
            // survey: a mount that comes meanwhile is reported.
            mounts.try_set_followed(true);
            let changes = tree.survey();
            next_survey = match (changes.survey, changes.errors.is_empty()) {
                (true, _) => now,
                (false, true) => {
                    retries = Backoff::of_surveys(survey);
                    now + survey
                }
                (false, false) => now + retries.after(Duration::ZERO),
            };
            notify_of(changes, Cause::Survey, &mut notify);
            notify(Notice::Surveyed {
                volumes: tree.volumes(),
                took: now.elapsed(),
            });
        }
        let due = rechecks.due(now);
        if !due.is_empty() {
            notify(Notice::Changed(due, Cause::Survey));
        }
        let next = [rechecks.next(), mounts.due()].into_iter().flatten();
        let until = next.fold(next_survey, Instant::min);
        let left = until.saturating_duration_since(Instant::now());
        let woken = tree.inotify().wait_with(mounts.polled(), left)?;
        if woken.by_mounts {
            mounts.changed(Instant::now());
        }
        let events = tree.inotify().wait(Some(Duration::ZERO))?;
        let changes = tree.follow(events);
        plan_rechecks(&changes, &mut rechecks);
        if changes.survey {
            notify(Notice::Interrupted);
            next_survey = Instant::now();
        } else if !changes.errors.is_empty() {
            next_survey = next_survey.min(Instant::now() + retries.after(Duration::ZERO));
        }
        notify_of(changes, Cause::Update, &mut notify);
    }
}

fn plan_rechecks(changes: &TreeChanges, rechecks: &mut Rechecks<VolumeOfPod>) {
    for volume in &changes.volumes {
        rechecks.plan(volume, Instant::now());
    }
}

fn notify_of(changes: TreeChanges, cause: Cause, notify: &mut impl FnMut(Notice)) {
    if !changes.volumes.is_empty() {
        notify(Notice::Changed(changes.volumes, cause));
    }
    changes
        .errors
        .into_iter()
        .for_each(|error| notify(Notice::NotWatched(error)));
}

// Things that are checked again a moment after an event.

/// The checks that are due later.
#[derive(Debug)]
pub struct Rechecks<T> {
    /// The times after the event.
    after: &'static [Duration],
    planned: Vec<(Instant, T)>,
}

impl<T: PartialEq + Clone> Rechecks<T> {
    /// No check yet. Each event is followed by checks after these times.
    pub fn new(after: &'static [Duration]) -> Self {
        Self {
            after,
            planned: Vec::new(),
        }
    }

    /// Plans the checks after an event. An earlier plan for the same thing is replaced.
    pub fn plan(&mut self, thing: &T, now: Instant) {
        self.planned.retain(|(_, planned)| planned != thing);
        let due = self.after.iter().map(|after| now + *after);
        self.planned.extend(due.map(|due| (due, thing.clone())));
    }

    /// The time of the next check.
    pub fn next(&self) -> Option<Instant> {
        self.planned.iter().map(|(due, _)| *due).min()
    }

    /// Removes and returns the things that are due.
    pub fn due(&mut self, now: Instant) -> Vec<T> {
        self.planned
            .extract_if(.., |(due, _)| *due <= now)
            .map(|(_, thing)| thing)
            .collect()
    }
}

// The time at which the mounts of the host are listed next.
//
// Mounts come in groups: a pod start makes a dozen mounts. Changes within a moment are handled
// together. A node on which mounts change all the time must cost only a small share of a
// processor.

/// The pause after work, as a multiple of the time that the work took.
const PAUSE_FACTOR: u32 = 100;

/// Limit of that pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Changes within this time cause a single list.
const SETTLE_INTERVAL: Duration = Duration::from_millis(10);

/// The pause after work that a container can cause all the time: the work then needs at most 1 % of a
/// processor. The limit is for a busy node, where short work can take long.
pub fn pause_after(work: Duration) -> Duration {
    (work * PAUSE_FACTOR).min(MAX_PAUSE)
}

/// The last list, and the change since.
#[derive(Debug, Default)]
pub struct Settling {
    not_before: Option<Instant>,
    due: Option<Instant>,
}

impl Settling {
    /// The mounts have changed. Later changes do not delay the list.
    pub fn changed(&mut self, now: Instant) {
        let settled = now + SETTLE_INTERVAL;
        let due = self.not_before.map_or(settled, |it| it.max(settled));
        self.due.get_or_insert(due);
    }

    /// The time of the next list; `None` without a change.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// A list began and ended at these times.
    pub fn listed(&mut self, began: Instant, ended: Instant) {
        // The places that are new cost about as much again as the list.
        let pause = pause_after(2 * ended.saturating_duration_since(began));
        self.not_before = Some(ended + pause);
        self.due = None;
    }
}

// The new mounts of the host, listed while a container follows mounts.

/// The times after a new mount at which its pod or container is refreshed again. A FUSE mount is in
/// the mount table before its daemon answers, and no event reports the first answer.
pub const AFTER_MOUNT: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(20),
    Duration::from_secs(60),
];

/// A watch of the mount table that costs nothing while no container follows mounts.
#[derive(Debug, Default)]
pub struct NewMounts {
    watch: Option<MountWatch>,
    settling: Settling,
}

impl NewMounts {
    /// Begins or ends the watch. Returns true if it began: earlier mounts are not reported.
    ///
    /// # Errors
    /// If the mounts cannot be read.
    pub fn set_followed(&mut self, is_followed: bool) -> io::Result<bool> {
        if !is_followed {
            *self = Self::default();
        } else if self.watch.is_none() {
            self.watch = Some(MountWatch::open().map_err(other)?);
            return Ok(true);
        }
        Ok(false)
    }

    /// As [`NewMounts::set_followed`], where the mounts are only a help: an error is logged.
    pub fn try_set_followed(&mut self, is_followed: bool) -> bool {
        self.set_followed(is_followed).unwrap_or_else(|error| {
            warn!("follow the mounts of the host: {error}; surveys find them");
            false
        })
    }

    /// As [`NewMounts::listed`], where the mounts are only a help: an error is logged, and ends the
    /// watch.
    pub fn try_listed(&mut self, now: Instant) -> Vec<PathBuf> {
        self.listed(now).unwrap_or_else(|error| {
            warn!("list the mounts of the host: {error}; surveys find them");
            *self = Self::default();
            Vec::new()
        })
    }

    /// The descriptor to poll for `POLLPRI`. While a list is planned, further changes need no
    /// wake-up.
    pub fn polled(&self) -> Option<BorrowedFd<'_>> {
        let watch = self.watch.as_ref();
        watch
            .filter(|_| self.settling.due().is_none())
            .map(MountWatch::as_fd)
    }

    pub fn changed(&mut self, now: Instant) {
        self.settling.changed(now);
    }

    /// The time of the next list; `None` without a change.
    pub fn due(&self) -> Option<Instant> {
        self.settling.due()
    }

    /// The places of the mounts that are new, if a list is due.
    ///
    /// # Errors
    /// If the mounts cannot be read.
    pub fn listed(&mut self, now: Instant) -> io::Result<Vec<PathBuf>> {
        let is_due = self.settling.due().is_some_and(|due| now >= due);
        let Some(watch) = self.watch.as_mut().filter(|_| is_due) else {
            return Ok(Vec::new());
        };
        let began = Instant::now();
        let appeared = watch.appeared().map_err(other)?;
        self.settling.listed(began, Instant::now());
        Ok(appeared)
    }
}

fn other(error: Failure) -> io::Error {
    io::Error::other(error_chain(&error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use bindguard_testing::own_namespace;
    use bindguard_testing::scene::tmpfs;

    use super::*;

    const NO_SURVEY: Duration = Duration::from_secs(3600);
    const LIMIT: Duration = Duration::from_secs(30);

    fn followed(root: &Path) -> Receiver<Notice> {
        let (notices, received) = channel();
        let root = root.to_owned();
        thread::spawn(move || follow(root, NO_SURVEY, |notice| drop(notices.send(notice))));
        received
    }

    fn wait_for(received: &Receiver<Notice>, is_meant: impl Fn(&Notice) -> bool) {
        while !is_meant(&received.recv_timeout(LIMIT).unwrap()) {}
    }

    fn update(volume: &Path, payload: &str) {
        symlink(payload, volume.join("..data_tmp")).unwrap();
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    }

    fn is_update(notice: &Notice) -> bool {
        matches!(notice, Notice::Changed(volumes, Cause::Update) if volumes[0].volume == "keys")
    }

    /// After a boot the folders of the pods are on the disk, and the agent starts first.
    #[test]
    fn a_volume_that_the_kubelet_mounts_after_the_survey_is_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("pods/u-1");
        let volume = pod.join("volumes/kubernetes.io~secret/keys");
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        let received = followed(root.path());
        wait_for(&received, |notice| {
            matches!(notice, Notice::Surveyed { .. })
        });
        tmpfs(&volume);
        update(&volume, "..2026_11_21_05_10_00.1");
        wait_for(&received, is_update);
        update(&volume, "..2026_11_21_05_10_00.2");
        wait_for(&received, is_update);
    }

    /// Surveys find what a mount covered.
    #[test]
    fn without_a_mount_table_updates_are_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("pods/u-1");
        let volume = pod.join("volumes/kubernetes.io~configmap/keys");
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        tmpfs("/proc".as_ref());
        let received = followed(root.path());
        wait_for(&received, |notice| {
            matches!(notice, Notice::Surveyed { .. })
        });
        update(&volume, "..2026_11_21_05_10_00.1");
        wait_for(&received, is_update);
    }

    /// A node may mount the disk of its kubelet late.
    #[test]
    fn pods_on_a_disk_that_is_mounted_after_the_survey_are_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("pods")).unwrap();
        let received = followed(root.path());
        wait_for(&received, |notice| {
            matches!(notice, Notice::Surveyed { .. })
        });
        tmpfs(root.path());
        fs::create_dir(root.path().join("pods")).unwrap();
        wait_for(&received, |notice| {
            matches!(notice, Notice::Surveyed { .. })
        });
        let pod = root.path().join("pods/u-1");
        fs::create_dir_all(pod.join("volumes/kubernetes.io~configmap/keys")).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        wait_for(&received, is_update);
    }
}

#[cfg(test)]
mod rechecks_tests {
    use super::*;

    const AFTER: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

    #[test]
    fn a_thing_is_checked_twice_after_its_last_event() {
        let (mut rechecks, start) = (Rechecks::new(&AFTER), Instant::now());
        assert_eq!(rechecks.next(), None);
        (0..1000).for_each(|_| rechecks.plan(&"a", start));
        rechecks.plan(&"b", start + AFTER[0]);
        assert_eq!(rechecks.next(), Some(start + AFTER[0]));
        assert_eq!(rechecks.due(start + AFTER[0]), ["a"]);
        assert_eq!(rechecks.due(start + AFTER[1]), ["a", "b"]);
        assert_eq!(rechecks.due(start + AFTER[0] + AFTER[1]), ["b"]);
        assert_eq!(rechecks.next(), None);
    }
}

#[cfg(test)]
mod settling_tests {
    use super::*;

    #[test]
    fn changes_of_a_moment_are_one_list() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        assert_eq!(settling.due(), None);
        for millis in [0, 5, 9] {
            settling.changed(start + Duration::from_millis(millis));
        }
        assert_eq!(settling.due(), Some(start + SETTLE_INTERVAL));
        settling.listed(start, start);
        assert_eq!(settling.due(), None);
    }

    #[test]
    fn lists_take_half_a_percent_of_the_time() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        let ended = start + Duration::from_millis(2);
        settling.listed(start, ended);
        settling.changed(ended);
        assert_eq!(settling.due(), Some(ended + Duration::from_millis(400)));
        settling.listed(start, start + Duration::from_secs(60));
        settling.changed(start + Duration::from_secs(60));
        assert_eq!(settling.due(), Some(start + Duration::from_secs(61)));
        let late = start + Duration::from_secs(600);
        settling.listed(start, ended);
        settling.changed(late);
        assert_eq!(settling.due(), Some(late + SETTLE_INTERVAL));
    }
}
