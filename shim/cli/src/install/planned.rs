//! What an operator wishes, and what would have to be done for it.

use std::path::PathBuf;

use super::change::Change;

/// The words of the command line, with their defaults filled in.
#[derive(Debug)]
pub struct Wishes {
    /// The folder of the programs.
    pub prefix: PathBuf,
    /// For every container, not only for those that ask.
    pub default: bool,
    /// containerd's own shim stays.
    pub wrapper: bool,
    /// The containerd program.
    pub containerd: Option<PathBuf>,
    /// Its main file.
    pub containerd_config: PathBuf,
}

/// What has to be done to the files of one runtime.
#[derive(Debug, Default)]
pub struct Planned {
    /// File by file; some may be as they shall be.
    pub changes: Vec<Change>,
    /// What an operator has to know.
    pub notes: Vec<String>,
    /// The OCI runtime that bindguard's own config has to name.
    pub needs_runtime: Option<PathBuf>,
    /// Makes the change count.
    pub command: Option<String>,
}
