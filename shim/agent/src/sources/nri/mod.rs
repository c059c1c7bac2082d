//! The agent as an NRI plugin of containerd or CRI-O.
//!
//! ```text
//! connect ─► RegisterPlugin ─► Configure ─► Synchronize ─► CreateContainer ─► StartContainer ─► ... ─► the connection ends ─► connect
//! ```
//!
//! The runtime calls a plugin for each new container before it is created, and again before its
//! process starts, whatever shim does that. The plugin has a thread of its own and blocks: a
//! runtime waits for each answer before the next request. Only policy refuses a create or a start.
//! A panic, a late check and a lost connection all mean "no change". Messages and numbers are those
//! of nri's `pkg/api/api.proto` and `pkg/net/multiplex`.

mod adjustment;
mod connection;
mod create;
mod deadline;
mod expected;
mod messages;
mod multiplex;
mod start;
mod ttrpc;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_guard::refresh::HelperProcess;
use tracing::{info, warn};

use connection::{Connection, ConnectionError};
use create::Creates;
use start::Starts;

use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;

/// The pause before a connection that ended is made again; it doubles up to the longest.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The plugin; it runs for ever in a thread of its own.
#[derive(Debug)]
pub struct NriPlugin {
    socket: PathBuf,
    calls: Calls,
}

/// The answers to the runtime's calls.
#[derive(Debug)]
struct Calls {
    creates: Creates,
    starts: Starts,
}

impl Calls {
    fn new(
        config: &Config,
        metrics: &Arc<Metrics>,
        journal: JournalWriter,
        helper: Option<Arc<HelperProcess>>,
    ) -> Self {
        let expected = Arc::default();
        Self {
            creates: Creates::new(
                config,
                Arc::clone(metrics),
                journal.clone(),
                Arc::clone(&expected),
            ),
            starts: Starts::new(config, Arc::clone(metrics), journal, helper, expected),
        }
    }
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
            calls: Calls::new(config, &metrics, journal, helper),
        }
    }

    /// Connects and serves, again and again.
    pub fn run_for_ever(self) {
        let (mut pause, mut warned) = (PAUSE, None);
        loop {
            let start = Instant::now();
            let ended = self.serve_once();
            self.calls.creates.metrics().nri.connected.set(0);
            // After a long connection the pause is short again: a runtime that restarts is back
            // soon.
            if start.elapsed() > MAX_PAUSE {
                (pause, warned) = (PAUSE, None);
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
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn serve_once(&self) -> Result<(), ConnectionError> {
        Connection::register(&self.socket)?.serve(&self.calls)
    }
}
