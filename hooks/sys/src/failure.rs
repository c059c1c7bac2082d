//! The error of a step on a file, for callers that print it and match nothing.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// A step on a file failed.
#[derive(Debug, thiserror::Error)]
#[error("{act}{}{}", if path.as_os_str().is_empty() { "" } else { " " }, path.display())]
pub struct Failure {
    pub act: Cow<'static, str>,
    /// Empty if the act is on no file.
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl Failure {
    /// True if the kernel reported that there is no such file.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Makes the error of an act on a path from its cause.
pub(crate) fn failed<E: Into<io::Error>>(
    act: impl Into<Cow<'static, str>>,
    path: &Path,
) -> impl FnOnce(E) -> Failure {
    move |source| Failure {
        act: act.into(),
        path: path.to_owned(),
        source: source.into(),
    }
}

/// Error number of the kernel; `EIO` for an error of another origin.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
