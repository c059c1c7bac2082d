//! The new mounts of the host, listed while a container follows mounts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_sys::{MountWatch, MountWatchError};
use tracing::warn;

use super::settling::Settling;

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

    /// The mounts have changed.
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

fn other(error: MountWatchError) -> io::Error {
    io::Error::other(error_chain(&error))
}
