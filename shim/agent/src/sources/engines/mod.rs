//! Containers of Docker and Podman. A bound file is refreshed once the file's name leads to a
//! different file on the host (moby#15793). If the container opted in, new mounts of the host and
//! host-root binds are refreshed too.
//!
//! One thread follows all containers ([`crate::sources::files`]): a bound file on a server that
//! hangs delays the other containers of the engines, and nothing else.

mod followed;
mod labels;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::places::Places;

use self::followed::Followed;

use crate::sources::files::{self, Schedule, Watches};
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
    let mut following = Followed::new(refresher, Path::new("/"), mode, places);
    let schedule = Schedule::new(interval, &AFTER_START, Instant::now());
    files::follow(&mut following, &mut watches, schedule)
}
