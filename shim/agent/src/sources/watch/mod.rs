//! Follows the kubelet's updates: with a thread for each kubelet root, because a root may hang on a
//! file server.
//!
//! ```text
//! survey ─► watches ─► wait ─► ..data renamed ─► re-bind on the host ─┐
//!             ▲                                                       │
//!             └───────────────────────────────────────────────────────┘
//! ```

mod inotify;
mod mounts;
mod rechecks;
mod settling;
mod tree;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_guard::refresh::VolumeOfPod;

use crate::threads::Backoff;

use self::tree::{TreeChanges, WatchTree};

pub use self::inotify::{Completeness, Inotify, WatchEvent, WatchId, Woken};
pub use self::mounts::{AFTER_MOUNT, NewMounts};
pub use self::rechecks::Rechecks;
pub use self::settling::pause_after;
pub use self::tree::{WatchError, folder_of_pods};

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
