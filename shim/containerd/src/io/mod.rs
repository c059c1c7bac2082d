//! A process's standard streams, from containerd's paths to the runtime's descriptors and back.
//!
//! ```text
//!            containerd's fifos        shim             container
//!   stdin   ────────────────────►  copy task  ──pipe──►
//!   stdout  ◄────────────────────  copy task  ◄──pipe──
//!   file://   ◄─────────────────  writer thread ◄──pipe──
//!   binary:// ◄──────────────────────────────────pipe──  read by the client's program
//!   terminal: both ways through the one pty master that the runtime sends over the console socket
//! ```
//! First everything is opened (`PreparedIo`), then the runtime runs with the container's ends, and
//! only after its success do the copies begin (`RunningIo`). A second try of a create reuses the
//! `PreparedIo`, without the output of the failed try (`PreparedIo::withhold_output`). A logging
//! program reads the pipes directly, and so gets the output of failed tries too.

mod console;
mod copy;
mod logger;
mod open;
mod prepared_io;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use console::StreamOwner;
use copy::{DrainLimits, FileWriter, StreamCopy};
pub use logger::LoggedProcess;
use logger::{Logger, READY_LIMIT};
pub use prepared_io::PreparedIo;
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;

use crate::step::StepError;

/// A pty's master, shared by both directions.
type Master = Arc<AsyncFd<OwnedFd>>;

/// The time limits for the rest of a dead process's output: Go's shim waits ten seconds in either
/// case.
const DRAIN_LIMITS: DrainLimits = DrainLimits {
    idle: Duration::from_secs(2),
    total: Duration::from_secs(10),
};

/// The streams that `Create` and `Exec` name for a process: paths or URIs. Empty means no stream.
#[derive(Debug, Clone, Default)]
pub struct Streams {
    /// Path of the fifo to read.
    pub stdin: String,
    /// Path of the fifo to write.
    pub stdout: String,
    /// Path of the fifo to write; unused with a terminal.
    pub stderr: String,
    /// A pty instead of three pipes.
    pub terminal: bool,
}

/// The reader of a process's output at the far end of a pipe, which must end after the process.
#[derive(Debug)]
enum Sink {
    File(FileWriter),
    Logger(Logger),
}

impl Sink {
    async fn finish(&self) {
        match self {
            Self::File(writer) => writer.finish_or_stall(DRAIN_LIMITS).await,
            Self::Logger(logger) => logger.finish().await,
        }
    }
}

/// The streams of a running process.
#[derive(Debug, Default)]
pub struct RunningIo {
    /// Kept open so that the process sees no end of its input before `CloseIO`, however often
    /// clients connect and leave.
    stdin_hold: Mutex<Option<OwnedFd>>,
    stdin: Option<StreamCopy>,
    outputs: Vec<StreamCopy>,
    sinks: Vec<Sink>,
    console: Option<Master>,
}

impl RunningIo {
    /// Closes stdin: the process sees its end as soon as the client's side is closed as well.
    pub fn close_stdin(&self) {
        self.stdin_hold
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Sets the terminal's size; without a terminal there is nothing to set.
    pub fn resize(&self, columns: u16, rows: u16) -> std::io::Result<()> {
        let Some(console) = &self.console else {
            return Ok(());
        };
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(rustix::termios::tcsetwinsize(console.get_ref(), size)?)
    }

    /// Waits until all output of the dead process has been passed on.
    pub async fn drained(&self) {
        let [first, second] =
            [self.outputs.first(), self.outputs.get(1)].map(|output| async move {
                if let Some(output) = output {
                    output.finish_or_stall(DRAIN_LIMITS).await;
                }
            });
        tokio::join!(first, second);
        for sink in &self.sinks {
            sink.finish().await;
        }
    }
}

impl Drop for RunningIo {
    fn drop(&mut self) {
        if let Some(stdin) = &self.stdin {
            stdin.stop();
        }
    }
}

// The errors of setting up a process's streams.

/// A stream that could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
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
