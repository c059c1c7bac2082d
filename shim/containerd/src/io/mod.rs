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
mod error;
mod fifo;
mod file_writer;
mod logger;
mod open;
mod pending_log;
mod pipes;
mod prepared_io;
mod progress;
mod stream;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;

use copy::StreamCopy;
pub(crate) use error::IoError;
use file_writer::FileWriter;
pub(crate) use logger::LoggedProcess;
use logger::Logger;
pub(crate) use pipes::StreamOwner;
pub(crate) use prepared_io::PreparedIo;
use progress::DrainLimits;

/// A pty's master, shared by both directions.
pub(crate) type Master = Arc<AsyncFd<OwnedFd>>;

/// The time limits for the rest of a dead process's output: Go's shim waits ten seconds in either
/// case.
const DRAIN_LIMITS: DrainLimits = DrainLimits {
    idle: Duration::from_secs(2),
    total: Duration::from_secs(10),
};

/// The streams that `Create` and `Exec` name for a process: paths or URIs. Empty means no stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streams {
    /// Path of the fifo to read.
    pub(crate) stdin: String,
    /// Path of the fifo to write.
    pub(crate) stdout: String,
    /// Path of the fifo to write; unused with a terminal.
    pub(crate) stderr: String,
    /// A pty instead of three pipes.
    pub(crate) terminal: bool,
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
pub(crate) struct RunningIo {
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
    pub(crate) fn close_stdin(&self) {
        self.stdin_hold
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Sets the terminal's size; without a terminal there is nothing to set.
    pub(crate) fn resize(&self, columns: u16, rows: u16) -> std::io::Result<()> {
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
    pub(crate) async fn drained(&self) {
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
