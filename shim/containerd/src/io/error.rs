//! The errors of setting up a process's streams.

use std::io;
use std::path::PathBuf;

use super::logger::LoggerError;

/// A stream that could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IoError {
    /// Opening the path that containerd named.
    #[error("open {stream} {path:?}")]
    Open {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// The path that containerd named.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A kind of stream that this shim does not support.
    #[error("{stream} {uri:?}: streams of this kind are not supported")]
    Scheme {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// The URI that containerd named.
        uri: String,
    },
    /// No thread could open them.
    #[error("open the process's streams in a thread")]
    Thread(#[source] io::Error),
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
    /// The transfer of the terminal from the runtime to the shim.
    #[error("set up the terminal")]
    Console(#[source] io::Error),
    /// A descriptor that the event loop rejects.
    #[error("watch the process's streams")]
    Watch(#[source] io::Error),
}
