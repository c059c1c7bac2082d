//! Detects out-of-memory kills in a container.
//!
//! The task that waits for the init's end owns the watch, so it reports a kill before the end that
//! the kill caused:
//!
//! ```text
//! let exit = loop {
//!     tokio::select! {
//!         exit = init.exit() => break exit,
//!         true = ooms.next() => send(TaskOOM),
//!     }
//! };
//! if ooms.take_unreported() { send(TaskOOM) }      // at once, and again just before TaskExit if something was awaited
//! send(TaskExit)
//! ```
//! The watch reports processes that the kernel *killed* in this container, for the container's, the
//! pod's or the node's limit. Version 1 also raises an alarm for a kill in a neighbour for the
//! pod's limit. The watch does not report this kill: containerd would write "OOMKilled" beside the
//! container's next exit, whatever the cause. Several kills between two checks become a single
//! report.
//!
//! The watch has 1 open descriptor (version 1) or 2 (version 2), and no inotify instance, of which
//! a node has few. A drop closes the descriptors, and the kernel forgets the registration.

mod polled_file;
mod v1;
mod v2;

use std::io;
use std::path::PathBuf;

use super::CgroupHierarchy;

/// A watch that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OomError {
    /// The cgroup has no memory controller, and so no limit of its own.
    #[error("watch for out-of-memory kills: the cgroup has no memory controller")]
    NoController,
    /// Opening or reading a file or descriptor of the watch.
    #[error("watch for out-of-memory kills: {what} {}", path.display())]
    Io {
        /// The failed action.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl OomError {
    fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}

/// A container's memory under watch. Kills from before it was opened are not reported.
#[derive(Debug)]
pub(crate) enum OomWatch {
    /// By memory.oom_control.
    V1(v1::Watch),
    /// By memory.events.
    V2(v2::Watch),
}

impl OomWatch {
    pub(super) fn open(version: &CgroupHierarchy) -> Result<Self, OomError> {
        match version {
            CgroupHierarchy::V1(controllers) => {
                let memory = controllers.memory().ok_or(OomError::NoController)?;
                v1::Watch::open(memory.clone()).map(Self::V1)
            }
            CgroupHierarchy::V2(directory) => v2::Watch::open(directory).map(Self::V2),
        }
    }

    /// Waits for the next kill. Returns false from the moment that the cgroup is gone, or empty for
    /// good. The future may be dropped at any time and created again: no kill is lost.
    pub(crate) async fn next(&mut self) -> bool {
        match self {
            Self::V1(watch) => watch.next().await,
            Self::V2(watch) => watch.next().await,
        }
    }

    /// Checks once, now: true if there was a kill that neither this nor [`Self::next`] has
    /// reported.
    ///
    /// The kernel counts a kill before it kills, so after the victim was reaped its kill is
    /// visible. A cgroup that is gone has no count any more, and systemd removes a scope as soon as
    /// it is empty: call this before anything else.
    pub(crate) fn take_unreported(&mut self) -> bool {
        match self {
            Self::V1(watch) => watch.take_unreported(),
            Self::V2(watch) => watch.take_unreported(),
        }
    }
}

/// The kills seen so far.
#[derive(Debug, PartialEq, Eq)]
struct KillCount(u64);

impl KillCount {
    /// Records the current count; true if it is more than before. It may be less, after a cgroup
    /// below was removed.
    fn has_grown_to(&mut self, kills: u64) -> bool {
        kills > std::mem::replace(&mut self.0, kills)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kill_is_reported_once() {
        let mut kill_count = KillCount(2);
        assert!(!kill_count.has_grown_to(2));
        assert!(kill_count.has_grown_to(3));
        assert!(!kill_count.has_grown_to(3));
        assert!(!kill_count.has_grown_to(0));
        assert!(kill_count.has_grown_to(1));
    }
}
