//! Containers of Docker and Podman: a single file that they bind is refreshed once its name leads
//! to another file on the host (moby#15793).
//!
//! ```text
//! survey ─► containers that opted in ─► watches of their files' directories ─► wait ─► file replaced ─► refresh
//!   ▲                                                                           │
//!   └───────────────────── a container started ─────────────────────────────────┘
//! ```
//!
//! One thread does all of it: a bound file on a server that hangs delays the other containers of
//! the engines, and nothing else.

mod api;
mod followed;
mod labels;
mod schedule;
mod watches;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;

use self::followed::Followed;
use self::schedule::Schedule;

pub use self::watches::Watches;

use crate::sources::watch::Inotify;
use crate::work::refresher::Refresher;

/// Follows the containers of the engines for ever.
///
/// # Errors
/// If there is no inotify instance, or it fails.
pub fn follow(mode: RefreshMode, interval: Duration, refresher: &Refresher<'_>) -> io::Result<()> {
    let mut watches = Watches::new(Inotify::new()?);
    let mut followed = Followed::new(Path::new("/"), mode);
    let mut schedule = Schedule::new(interval, Instant::now());
    loop {
        if schedule.is_survey_due(Instant::now()) {
            followed.survey(&mut watches, refresher);
        }
        for container in schedule.due(Instant::now()) {
            followed.refresh(&container, refresher);
        }
        // Between two of the containers that need more time, the others get their turn.
        let pause = schedule.next().saturating_duration_since(Instant::now());
        let changes = watches.wait(if followed.is_late() {
            Duration::ZERO
        } else {
            pause
        })?;
        if changes.survey {
            schedule.plan_surveys(Instant::now());
        }
        changes
            .made
            .iter()
            .for_each(|container| schedule.plan_refresh(container, Instant::now()));
        changes
            .complete
            .iter()
            .for_each(|container| followed.refresh(container, refresher));
        followed.refresh_late(refresher);
    }
}
