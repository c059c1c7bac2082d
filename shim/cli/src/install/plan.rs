//! The operator's options, and the changes that they require.

use std::path::PathBuf;

use super::change::Change;

/// The options of the command line, with their defaults filled in.
#[derive(Debug)]
pub struct Options {
    /// The folder in which services find the programs.
    pub prefix: PathBuf,
    /// For every container, not only for those that request it.
    pub default: bool,
    /// Keep containerd's own shim.
    pub wrapper: bool,
    /// The containerd program.
    pub containerd: Option<PathBuf>,
    /// Its main file.
    pub containerd_config: PathBuf,
}

/// The changes to the files of one runtime.
#[derive(Debug, Default)]
pub struct Plan {
    /// One for each file; some may change nothing.
    pub changes: Vec<Change>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// The OCI runtime that bindguard's own config must name.
    pub needs_runtime: Option<PathBuf>,
    /// The command that activates the changes.
    pub command: Option<String>,
}
