//! Errors on the way to a file that a container engine bound.

use std::io;
use std::path::PathBuf;

use bindguard_sys::{MountError, WalkError};

/// Why a bound file cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum BoundFileError {
    /// The path could not be walked.
    #[error("walk to a bound file")]
    Walk(#[from] WalkError),
    /// A daemon or server on the way is silent.
    #[error("{} does not answer", .0.display())]
    Silent(PathBuf),
    /// The directory of the file is gone.
    #[error("the directory {} is gone", .0.display())]
    NoDirectory(PathBuf),
    /// The path of a folder could not be resolved.
    #[error("resolve {}", directory.display())]
    Resolve {
        /// The folder.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mount of a folder could not be read.
    #[error("find the mount of {}", directory.display())]
    Mount {
        /// The folder.
        directory: PathBuf,
        /// The reason.
        #[source]
        source: MountError,
    },
    /// The folder is not below the mount that shows it.
    #[error("{} is not below its mount", .0.display())]
    NotBelow(PathBuf),
}
