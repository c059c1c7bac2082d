//! An error while a file is opened or inspected.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// An error while a file is opened or inspected.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// open(2)
    #[error("open {}", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// statx(2)
    #[error("stat {}", path.display())]
    Stat {
        /// The path as given.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl HandleError {
    /// True if the kernel reported that there is no such file.
    pub fn is_not_found(&self) -> bool {
        self.kind() == io::ErrorKind::NotFound
    }

    /// The kind of the kernel's error.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Open { source, .. } | Self::Stat { source, .. } => source.kind(),
        }
    }

    /// The kernel's error alone.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Open { source, .. } | Self::Stat { source, .. } => source,
        }
    }
}

pub(super) fn open_error(path: &Path, errno: Errno) -> HandleError {
    HandleError::Open {
        path: path.to_owned(),
        source: errno.into(),
    }
}
