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
mod connection;
mod create;
mod messages;
mod start;
mod ttrpc;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::report::{RefreshLine, Report, Severity};
use bindguard_guard::ExpectedSources;
use bindguard_guard::refresh::HelperProcess;
use lru::LruCache;
use tracing::{info, warn};

use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::sources::nri::connection::{Connection, ConnectionError};
use crate::sources::nri::messages::NriMount;
use crate::sources::nri::ttrpc::Deadline;
use crate::threads::{Backoff, retry_with_backoff, spawn};

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

// The state of the answers to the runtime's calls.

/// Answers the runtime's calls.
#[derive(Debug)]
pub struct Calls {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    /// The sources of the binds of new containers.
    expected: ExpectedOfContainers,
    /// `None` in tests only.
    helper: Option<Arc<HelperProcess>>,
    creating: Deadline,
    starting: Deadline,
    reports: Sender<NriReport>,
}

/// Policy refuses the container, for this reason.
#[derive(Debug, thiserror::Error)]
#[error("bindguard refuses the container: {0}")]
pub struct CreateRefused(pub(super) String);

impl Calls {
    /// Starts the thread that writes reports: a call waits neither for the log nor for the journal.
    pub fn new(
        config: &Config,
        metrics: Arc<Metrics>,
        journal: JournalWriter,
        helper: Option<Arc<HelperProcess>>,
    ) -> Self {
        let (reports, received) = channel();
        let counted = Arc::clone(&metrics);
        let writing = spawn("nri-reports", move || {
            retry_with_backoff(
                "report creates and starts through NRI",
                &counted.restarts,
                || {
                    write_reports(&received, &journal);
                    Ok(())
                },
            )
        });
        if let Err(error) = writing {
            warn!("creates and starts through NRI are not reported: {error:#}");
        }
        Self {
            config: Arc::new(config.clone()),
            metrics,
            expected: ExpectedOfContainers::default(),
            helper,
            creating: Deadline::default(),
            starting: Deadline::default(),
            reports,
        }
    }

    fn report(&self, report: NriReport) {
        // Without the thread there is no journal; its failure was reported.
        let _ = self.reports.send(report);
    }
}

// The sources of the binds of new containers, from the create of each until its start, and the
// mounts that were checked, until the runtime has the changes of all plugins.

/// Limit of containers between their create and their start. The oldest are forgotten: a create
/// that failed has no start.
const MAX_CONTAINERS: NonZeroUsize = NonZeroUsize::new(128).unwrap();

/// Limit of binds of these containers. A pod can have thousands of binds, and the kubelet repeats a
/// failed create with a new container id.
const MAX_KEPT_BINDS: usize = 8_000;

/// The expected sources and the hashes of the checked mounts, by the containers' ids.
#[derive(Debug)]
pub struct ExpectedOfContainers {
    sources: Mutex<LruCache<String, ExpectedSources>>,
    checked: Mutex<LruCache<String, HashSet<u64>>>,
    hasher: RandomState,
}

impl Default for ExpectedOfContainers {
    fn default() -> Self {
        Self {
            sources: Mutex::new(LruCache::new(MAX_CONTAINERS)),
            checked: Mutex::new(LruCache::new(MAX_CONTAINERS)),
            hasher: RandomState::new(),
        }
    }
}

impl ExpectedOfContainers {
    /// The hash of a mount.
    pub fn hash_of(&self, mount: &NriMount) -> u64 {
        self.hasher.hash_one(mount)
    }

    /// Keeps which mounts of a container were checked.
    pub fn keep_checked(&self, id: &str, mounts: &[NriMount]) {
        let hashes = mounts.iter().map(|mount| self.hash_of(mount)).collect();
        self.checked().push(id.to_owned(), hashes);
    }

    /// The hashes of the checked mounts; none for a container without a checked create.
    pub fn take_checked(&self, id: &str) -> HashSet<u64> {
        self.checked().pop(id).unwrap_or_default()
    }

    fn checked(&self) -> MutexGuard<'_, LruCache<String, HashSet<u64>>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the sources of a container that is about to be created, beside its earlier ones. If
    /// there are too many, those of the container with the most binds are forgotten.
    pub fn keep(&self, id: String, mut sources: ExpectedSources) {
        let mut known = self.known();
        if let Some(earlier) = known.pop(&id) {
            sources.extend(earlier);
        }
        known.push(id, sources);
        loop {
            let (mut all, mut most) = (0, (0, String::new()));
            for (id, sources) in known.iter() {
                all += sources.binds();
                if sources.binds() >= most.0 {
                    most = (sources.binds(), id.clone());
                }
            }
            if all <= MAX_KEPT_BINDS {
                return;
            }
            known.pop(&most.1);
        }
    }

    /// The sources of a container that is about to start. `None` for a container without a checked
    /// create.
    pub fn take(&self, id: &str) -> Option<ExpectedSources> {
        self.known().pop(id)
    }

    fn known(&self) -> MutexGuard<'_, LruCache<String, ExpectedSources>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// The log and the journal of creates and starts.

/// A report on one container.
#[derive(Debug)]
pub enum NriReport {
    /// The check before the create, with the container's id.
    Create(String, Report),
    /// The refresh before the start.
    Refresh(RefreshLine),
    /// The comparison before the start, with the container's id and its init.
    Proof(String, u32, Report),
}

/// Writes reports until the sender is gone.
pub fn write_reports(received: &Receiver<NriReport>, journal: &JournalWriter) {
    for report in received {
        match report {
            NriReport::Create(id, report) => {
                log_binds(&id, &report);
                // The shim journals its own creates. A healthy create is not journaled again.
                let has_finding = report
                    .binds
                    .iter()
                    .any(|bind| bind.finding.verdict.is_finding());
                if has_finding || !report.problems.is_empty() {
                    journal.nri_create(&id, None, report);
                }
            }
            NriReport::Refresh(line) => {
                log_refresh(&line);
                journal.refreshed(line);
            }
            NriReport::Proof(id, pid, report) => {
                log_binds(&id, &report);
                if !report.binds.is_empty() || !report.problems.is_empty() {
                    journal.nri_create(&id, Some(pid), report);
                }
            }
        }
    }
}

fn log_binds(id: &str, report: &Report) {
    for problem in &report.problems {
        warn!("container {id}: {problem}");
    }
    for (severity, message) in report.binds.iter().filter_map(|bind| bind.log_message()) {
        match severity {
            Severity::Info => info!("container {id}: {message}"),
            Severity::Warning => warn!("container {id}: {message}"),
        }
    }
}

fn log_refresh(line: &RefreshLine) {
    for mount in &line.mounts {
        let (place, id) = (&mount.destination, &line.id);
        match mount.outcome.is_replaced() {
            true => info!("container {id}: {place} shows the current file before it starts"),
            false => warn!("container {id} starts with an old file at {place}"),
        }
    }
}
