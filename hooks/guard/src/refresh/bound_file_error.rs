//! Errors on the way to a file that a container engine bound.

use std::path::PathBuf;

use bindguard_sys::WalkError;

use super::place::PlaceError;

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
    /// The place of a folder or of the file is not known.
    #[error(transparent)]
    Place(#[from] PlaceError),
}
