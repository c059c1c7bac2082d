//! Hearing of out-of-memory kills in a container.
//!
//! The task that waits for the init's end owns the watch, so it reports a kill before the end that the kill caused:
//!
//! ```text
//! let exit = loop {
//!     tokio::select! {
//!         exit = init.exit() => break exit,
//!         Some(_) = ooms.next() => send(TaskOOM),
//!     }
//! };
//! if ooms.is_untold() { send(TaskOOM) }      // at once, and again just before TaskExit if something was awaited
//! send(TaskExit)
//! ```
//! It reports processes that the kernel *killed* in this container, for whichever limit: its own, its pod's, the node's. A pod's
//! limit that struck a neighbour is not reported, although version 1 wakes us for that, too: containerd writes "OOMKilled"
//! beside whatever exit comes next. Several kills between two checks are reported as one.
//!
//! The watch holds one descriptor (version 1) or two (version 2) and none of the node's few inotify instances. All are
//! closed when it is dropped; the kernel then forgets the registration.

mod change;
mod v1;
mod v2;

use std::{io, path::PathBuf};

use super::Version;

/// The kernel killed in the container for want of memory, at least once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Killed;

/// A watch that cannot be kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OomError {
    /// The cgroup has no memory controller, so no limit of its own.
    #[error("watch for out-of-memory kills: the cgroup has no memory controller")]
    NoController,
    /// A file or descriptor that it takes.
    #[error("watch for out-of-memory kills: {what} {}", path.display())]
    Io {
        /// The failed action.
        what: &'static str,
        /// To what.
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
    pub(super) fn open(version: &Version) -> Result<Self, OomError> {
        match version {
            Version::V1(controllers) => {
                let memory = controllers.memory().ok_or(OomError::NoController)?;
                v1::Watch::open(memory.clone()).map(Self::V1)
            }
            Version::V2(directory) => v2::Watch::open(directory).map(Self::V2),
        }
    }

    /// Waits for the next kill; none when the cgroup is gone, or empty for good, and from then on. The future may be
    /// dropped at any time and created again: nothing is lost.
    pub(crate) async fn next(&mut self) -> Option<Killed> {
        match self {
            Self::V1(watch) => watch.next().await,
            Self::V2(watch) => watch.next().await,
        }
    }

    /// Checks once, now: was there a kill that neither this nor [`Self::next`] has reported?
    ///
    /// The kernel counts a kill before it kills, so when the victim has been waited for, its kill is seen. A cgroup
    /// that is gone (systemd removes a scope as soon as it is empty) has no count any more: look before anything else.
    pub(crate) fn is_untold(&mut self) -> bool {
        match self {
            Self::V1(watch) => watch.is_untold(),
            Self::V2(watch) => watch.is_untold(),
        }
    }
}

/// The kills seen so far.
#[derive(Debug, PartialEq, Eq)]
struct Tally(u64);

impl Tally {
    /// Takes note of the count as it is now: is it more than before? It may be less, when a cgroup below went away.
    fn grew_to(&mut self, kills: u64) -> bool {
        kills > std::mem::replace(&mut self.0, kills)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kill_is_told_once() {
        let mut tally = Tally(2);
        assert!(!tally.grew_to(2));
        assert!(tally.grew_to(3));
        assert!(!tally.grew_to(3));
        assert!(!tally.grew_to(0));
        assert!(tally.grew_to(1));
    }
}
