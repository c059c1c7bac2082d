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

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;

use copy::{DrainLimits, StreamCopy};
use logger::Logger;

pub use console::StreamOwner;
pub use logger::LoggedProcess;
pub use prepared_io::PreparedIo;

use crate::blocking::lock;

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
    pub stdin: String,
    pub stdout: String,
    /// Unused with a terminal.
    pub stderr: String,
    /// A pty instead of three pipes.
    pub terminal: bool,
}

/// The streams of a running process.
#[derive(Debug, Default)]
pub struct RunningIo {
    /// Kept open so that the process sees no end of its input before `CloseIO`, however often
    /// clients connect and leave.
    stdin_hold: Mutex<Option<OwnedFd>>,
    stdin: Option<StreamCopy>,
    /// At most two.
    outputs: Vec<StreamCopy>,
    logger: Option<Logger>,
    console: Option<Master>,
}

impl RunningIo {
    /// Closes stdin: the process sees its end as soon as the client's side is closed as well.
    pub fn close_stdin(&self) {
        lock(&self.stdin_hold).take();
    }

    /// Sets the terminal's size; without a terminal there is nothing to set.
    pub fn resize(&self, columns: u16, rows: u16) -> io::Result<()> {
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
        let [first, second] = [0, 1].map(|index| async move {
            if let Some(output) = self.outputs.get(index) {
                output.finish_or_stall(DRAIN_LIMITS).await;
            }
        });
        tokio::join!(first, second);
        if let Some(logger) = &self.logger {
            logger.finish().await;
        }
    }
}

impl Drop for RunningIo {
    fn drop(&mut self) {
        if let Some(task) = self.stdin.as_ref().and_then(|stdin| stdin.task.as_ref()) {
            task.abort();
        }
    }
}
