//! What can go wrong before a process has its streams.

use std::{io, path::PathBuf};

use super::logger::LoggerError;

/// A stream that could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IoError {
    /// What containerd named could not be opened.
    #[error("open {stream} {path:?}")]
    Open {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// What containerd named.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A kind of stream this shim does not have.
    #[error("{stream} {uri:?}: streams of this kind are not supported")]
    Scheme {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// What containerd named.
        uri: String,
    },
    /// There was no thread to open them.
    #[error("open the process's streams aside from the event loop")]
    Aside(#[source] io::Error),
    /// A pipe between shim and process.
    #[error("make the pipe for {stream}")]
    Pipe {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A thread that writes a log file.
    #[error("start writing the log file {path}")]
    Writer {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A logging program.
    #[error(transparent)]
    Logger(#[from] LoggerError),
    /// The terminal's way from the runtime to the shim.
    #[error("set up the terminal")]
    Console(#[source] io::Error),
    /// A descriptor the event loop does not take.
    #[error("watch the process's streams")]
    Watch(#[source] io::Error),
}
