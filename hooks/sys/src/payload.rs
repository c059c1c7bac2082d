//! A payload of a kubelet-written volume, open while several names in it are looked up.

use std::os::fd::OwnedFd;
use std::path::Path;

use bindguard_core::evidence::FileIdentity;
use bindguard_core::kubelet::TimestampDirectory;
use rustix::fs::OFlags;

use crate::handle::Handle;
use crate::target::{current_payload, open_below};

/// The payload directory that `..data` of a volume named when it was read.
#[derive(Debug)]
pub(crate) struct Payload {
    timestamp: TimestampDirectory,
    directory: OwnedFd,
}

impl Payload {
    /// Opens the current payload of a volume. `None` if that fails;
    /// [`open_target`](crate::open_target) reports the reason.
    pub(crate) fn hold(volume: &Handle) -> Option<Self> {
        let timestamp = current_payload(volume).ok()?;
        let directory = open_below(volume, Path::new(timestamp.name()), OFlags::DIRECTORY).ok()?;
        Some(Self {
            timestamp,
            directory,
        })
    }

    /// Its name.
    pub(crate) fn timestamp(&self) -> &TimestampDirectory {
        &self.timestamp
    }

    /// The identity of a key of the `volume`, read without opening it. `None` for a key that is
    /// gone or is being removed with its payload, a path of several names, a symlink, and a mount.
    pub(crate) fn key(&self, key: &Path, volume: &Handle) -> Option<FileIdentity> {
        let is_one_name = key.file_name().is_some_and(|name| name == key.as_os_str());
        is_one_name
            .then(|| volume.identity_on_same_mount(&self.directory, key))
            .flatten()
    }
}
