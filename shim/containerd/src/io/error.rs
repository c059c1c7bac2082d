//! The errors of setting up a process's streams.

use std::path::PathBuf;

use super::logger::READY_LIMIT;
use crate::step::StepError;

/// A stream that could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IoError {
    /// A file, a pipe, the terminal, a logging program.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A kind of stream that this shim does not support.
    #[error("{stream} {uri:?}: streams of this kind are not supported")]
    Scheme {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// The URI that containerd named.
        uri: String,
    },
    /// A logging program ended, or closed the pipe, without output; with `binary-v2` only.
    #[error("the logging program {program} did not say that it is ready: it may have ended")]
    NotReady {
        /// The executable.
        program: PathBuf,
    },
    /// A logging program writes nothing and does not close the pipe.
    #[error("the logging program {program} is not ready after {READY_LIMIT:?}")]
    Late {
        /// The executable.
        program: PathBuf,
    },
}
