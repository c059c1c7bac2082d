//! Containers of Docker and Podman. A bound file is refreshed once the file's name leads to a
//! different file on the host (moby#15793). If the container opted in, new mounts of the host and
//! host-root binds are refreshed too.
//!
//! One thread follows all containers ([`crate::sources::files`]): a bound file on a server that
//! hangs delays the other containers of the engines, and nothing else.

mod api;
mod followed;
mod labels;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::places::Places;

use self::followed::Followed;

use crate::sources::files::{self, FollowedFiles, Schedule, Watches};
use crate::sources::watch::Inotify;
use crate::work::refresher::Refresher;

/// The times after the start of a container at which its state may be complete. The folder appears
/// first, then the spec, then the init process.
const AFTER_START: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(5),
];

/// Follows the containers of the engines for ever.
///
/// # Errors
/// If there is no inotify instance, or it fails.
pub fn follow(
    mode: RefreshMode,
    places: &Places,
    interval: Duration,
    refresher: &Refresher<'_>,
) -> io::Result<()> {
    let mut watches = Watches::new(Inotify::new()?);
    let mut following = EngineFiles {
        containers: Followed::new(Path::new("/"), mode, places),
        refresher,
    };
    let schedule = Schedule::new(interval, &AFTER_START, Instant::now());
    files::follow(&mut following, &mut watches, schedule)
}

/// The containers of the engines, and their refresher.
#[derive(Debug)]
struct EngineFiles<'a> {
    containers: Followed,
    refresher: &'a Refresher<'a>,
}

impl FollowedFiles for EngineFiles<'_> {
    fn survey(&mut self, watches: &mut Watches) {
        self.containers.survey(watches, self.refresher);
    }

    fn refresh(&mut self, id: &str) {
        self.containers.refresh(id, self.refresher);
    }

    fn has_mounts(&self) -> bool {
        self.containers.has_mounts()
    }

    fn with_mounts_at(&self, places: &[PathBuf]) -> Vec<String> {
        self.containers.with_mounts_at(places)
    }

    fn is_late(&self) -> bool {
        self.containers.is_late()
    }

    fn refresh_late(&mut self) {
        self.containers.refresh_late(self.refresher);
    }
}
