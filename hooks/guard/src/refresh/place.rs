//! The place of an open file or directory in its filesystem.

use std::io;
use std::path::PathBuf;

use bindguard_core::evidence::FilePlace;
use bindguard_sys::{Handle, MountError, Mounts};

/// Why the place of a file is not known.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The path could not be resolved.
    #[error("resolve {}", path.display())]
    Resolve {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mount could not be read.
    #[error("find the mount of {}", path.display())]
    Mount {
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: MountError,
    },
    /// The path is not below the mount that shows the file.
    #[error("{} is not below its mount", .0.display())]
    NotBelow(PathBuf),
}

/// The place of a file in its filesystem.
pub(super) fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, PlaceError> {
    let path = || file.path().to_owned();
    let mount = mounts.mount_of(file).map_err(|source| {
        let path = path();
        PlaceError::Mount { path, source }
    })?;
    let resolved = file.resolved_path().map_err(|source| {
        let path = path();
        PlaceError::Resolve { path, source }
    })?;
    let place = mount.entry.place_in_filesystem(&resolved);
    Ok(FilePlace {
        device: mount.entry.device,
        path: place.ok_or_else(|| PlaceError::NotBelow(path()))?,
    })
}
