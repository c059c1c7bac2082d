//! The agent as an NRI plugin of containerd or CRI-O.
//!
//! ```text
//! connect ─► RegisterPlugin ─► Configure ─► Synchronize ─► CreateContainer ─► StartContainer ─► ... ─► the connection ends ─► connect
//! ```
//!
//! The runtime calls a plugin for each new container before it is created, and again before its
//! process starts, whatever shim does that. The plugin has a thread of its own and blocks: a
//! runtime waits for each answer before the next request. Only policy refuses a create or a start.
//! A panic, a late check and a lost connection all mean "no change". Where policy refuses anything,
//! the runtime also calls `ValidateContainerAdjustment` once all plugins have answered a create; there
//! a lost connection fails the create. Messages and numbers are those of nri's `pkg/api/api.proto` and
//! `pkg/net/multiplex`.

mod adjustment;
mod calls;
mod connection;
mod create;
mod deadline;
mod expected;
mod messages;
mod multiplex;
mod reports;
mod start;
mod ttrpc;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_guard::refresh::HelperProcess;
use tracing::{info, warn};

use calls::Calls;
use connection::{Connection, ConnectionError};

use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::threads::Backoff;

/// The pauses before a connection that ended is made again.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The plugin; it runs for ever in a thread of its own.
#[derive(Debug)]
pub struct NriPlugin {
    socket: PathBuf,
    calls: Calls,
}

impl NriPlugin {
    /// A plugin for the runtime behind this socket.
    pub fn new(
        socket: &Path,
        config: &Config,
        metrics: Arc<Metrics>,
        journal: JournalWriter,
        helper: Option<Arc<HelperProcess>>,
    ) -> Self {
        Self {
            socket: socket.to_owned(),
            calls: Calls::new(config, metrics, journal, helper),
        }
    }

    /// Connects and serves, again and again.
    pub fn run_for_ever(self) {
        let (mut backoff, mut warned) = (Backoff::new(PAUSE, MAX_PAUSE), None);
        loop {
            let start = Instant::now();
            let ended = self.serve_once();
            self.calls.metrics.nri.connected.set(0);
            let lasted = start.elapsed();
            // After a long connection the pause is short: a restarted runtime is back soon.
            if lasted > MAX_PAUSE {
                warned = None;
            }
            match ended {
                Ok(()) => info!(
                    "{}: the runtime closed the connection; connecting again",
                    self.socket.display()
                ),
                Err(error) => {
                    let why = error_chain(&error);
                    if warned.as_ref() != Some(&why) {
                        warn!(
                            "serve as an NRI plugin on {}: {why}; trying again",
                            self.socket.display()
                        );
                        warned = Some(why);
                    }
                }
            }
            thread::sleep(backoff.after(lasted));
        }
    }

    fn serve_once(&self) -> Result<(), ConnectionError> {
        let serve = || Connection::register(&self.socket)?.serve(&self.calls);
        catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            self.calls.metrics.restarts.inc();
            Err(ConnectionError::Panicked)
        })
    }
}
