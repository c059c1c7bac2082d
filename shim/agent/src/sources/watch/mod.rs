//! Follows the kubelet's updates: with a thread for each kubelet root, because a root may hang on a
//! file server.
//!
//! ```text
//! survey ─► watches ─► wait ─► ..data renamed ─► re-bind on the host ─┐
//!             ▲                                                       │
//!             └───────────────────────────────────────────────────────┘
//! ```

mod inotify;
mod rechecks;
mod tree;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_guard::refresh::VolumeOfPod;

use self::tree::{TreeChanges, WatchTree};

pub use self::inotify::{Completeness, Inotify, WatchEvent, WatchId};
pub use self::rechecks::Rechecks;
pub use self::tree::WatchError;

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
    let mut next_survey = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_survey {
            let changes = tree.survey();
            next_survey = if changes.survey { now } else { now + survey };
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
        let until = rechecks
            .next()
            .map_or(next_survey, |next| next.min(next_survey));
        let events = tree
            .inotify()
            .wait(Some(until.saturating_duration_since(Instant::now())))?;
        let changes = tree.follow(events);
        changes
            .volumes
            .iter()
            .for_each(|volume| rechecks.plan(volume, Instant::now()));
        if changes.survey {
            notify(Notice::Interrupted);
            next_survey = Instant::now();
        }
        notify_of(changes, Cause::Update, &mut notify);
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
