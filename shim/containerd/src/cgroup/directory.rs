//! Reads the small files in a directory of a cgroup.
//!
//! The kernel generates the files' text at each read. A missing file means that the kernel or the
//! cgroup lacks the figure; callers leave the figure out.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::libc;

use super::text::{FlatKeyed, Rdma, number, rdma};

/// A directory of a cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Directory(PathBuf);

impl Directory {
    /// The directory of that path.
    pub(super) fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The path of a file of that name.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// A file's text; `None` if the cgroup lacks that file.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        text_of(&self.file(name))
    }

    /// The number in a file with a single number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        number(&self.text(name)?)
    }

    /// A file of `key value` lines.
    pub(super) fn flat_keyed(&self, name: &str) -> Option<FlatKeyed> {
        Some(FlatKeyed::parse(&self.text(name)?))
    }

    /// The devices in a file of the RDMA controller, each as an entry of a version's own message.
    pub(super) fn rdma<E>(&self, name: &str, entry: impl FnMut(Rdma<'_>) -> E) -> Option<Vec<E>> {
        Some(rdma(&self.text(name)?).into_iter().map(entry).collect())
    }
}

/// As [`Directory::text`], of any path.
pub(super) fn text_of(path: &Path) -> Option<String> {
    match fs::read(path) {
        Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) => {
            if !is_absent(&error) {
                tracing::debug!(path = %path.display(), %error, "a figure cannot be read");
            }
            None
        }
    }
}

/// True if there is no such file, if it was removed while open (ENODEV), or if the kernel does not
/// count it (EOPNOTSUPP, as pressure returns with `psi=0`).
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP)
    )
}
