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

mod schedule;
mod watches;

use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::sources::watch::{AFTER_MOUNT, NewMounts, Rechecks, pause_after};

pub use self::schedule::{AFTER_START, Schedule};
pub use self::watches::Watches;

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
