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

mod connection;
mod create;
mod messages;
mod start;
mod ttrpc;

use std::collections::{BTreeMap, HashSet};
use std::hash::RandomState;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use bindguard_core::error_chain;
use bindguard_guard::ExpectedSources;
use lru::LruCache;
use tracing::{info, warn};

use crate::limits::SayOnce;
use crate::limits::{Backoff, spawn};
use crate::sinks::AgentLine;
use crate::sinks::metrics::{Level, Total};
use crate::sources::nri::connection::Connection;
use crate::work::Node;

/// The pauses before a connection that ended is made again.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Connects to the runtime behind this socket and serves, again and again.
pub fn serve_for_ever(node: &'static Node, socket: &Path) {
    let calls = Calls::new(node);
    let (mut backoff, mut said) = (Backoff::new(PAUSE, MAX_PAUSE), SayOnce::default());
    let (name, metrics) = (socket.display(), node.metrics);
    loop {
        let start = Instant::now();
        let serve = || Connection::register(socket, &calls)?.serve();
        let ended = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            metrics[Total::AgentThreadRestarts].inc();
            Err(anyhow!("the thread panicked"))
        });
        metrics[Level::NriConnected].set(0);
        let lasted = start.elapsed();
        // After a long connection the pause is short: a restarted runtime is back soon.
        if lasted > MAX_PAUSE {
            said.warn((), None);
        }
        match ended {
            Ok(()) => info!("{name}: the runtime closed the connection; connecting again"),
            Err(error) => {
                let why = error_chain(&*error);
                said.warn_of_retry(Some(format!("serve as an NRI plugin on {name}: {why}")));
            }
        }
        thread::sleep(backoff.after(lasted));
    }
}

/// Limit of containers between their create and their start. The oldest are forgotten: a create
/// that failed has no start.
const MAX_CONTAINERS: NonZeroUsize = NonZeroUsize::new(128).unwrap();

/// Limit of binds of these containers. A pod can have thousands of binds, and the kubelet repeats a
/// failed create with a new container id.
const MAX_KEPT_BINDS: usize = 8_000;

/// Answers the runtime's calls.
#[derive(Debug)]
struct Calls {
    node: &'static Node,
    /// The new containers, by their ids.
    created: Mutex<LruCache<String, CreatedBinds>>,
    /// Hashes mounts.
    hasher: RandomState,
    creating: Deadline,
    starting: Deadline,
    reports: Sender<AgentLine>,
}

/// The binds of a container between its create and its start.
#[derive(Debug)]
struct CreatedBinds {
    /// The sources that they had at the create.
    sources: ExpectedSources,
    /// The hashes of the checked mounts, until the runtime has the changes of all plugins.
    checked: HashSet<u64>,
}

impl Calls {
    /// Starts the thread that writes reports: a call waits neither for the log nor for the journal.
    fn new(node: &'static Node) -> Self {
        let (reports, received) = channel();
        let writing = spawn("nri-reports", move || {
            node.retry_with_backoff("report creates and starts through NRI", || {
                write_reports(&received, node);
                Ok(())
            })
        });
        if let Err(error) = writing {
            warn!("creates and starts through NRI are not reported: {error:#}");
        }
        Self {
            node,
            created: LruCache::new(MAX_CONTAINERS).into(),
            hasher: RandomState::new(),
            creating: Deadline::default(),
            starting: Deadline::default(),
            reports,
        }
    }

    fn report(&self, report: AgentLine) {
        // Without the thread there is no journal; its failure was reported.
        let _ = self.reports.send(report);
    }

    fn created(&self) -> MutexGuard<'_, LruCache<String, CreatedBinds>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the sources of a container that is about to be created, beside its earlier ones. If
    /// there are too many, those of the container with the most binds are forgotten.
    fn keep(&self, id: &str, mut sources: ExpectedSources, checked: HashSet<u64>) {
        let mut created = self.created();
        if let Some(earlier) = created.pop(id) {
            sources.extend(earlier.sources);
        }
        created.push(id.to_owned(), CreatedBinds { sources, checked });
        loop {
            let (mut all, mut most) = (0, (0, String::new()));
            for (id, binds) in created.iter() {
                let count = binds.sources.binds();
                all += count;
                if count > most.0 {
                    most = (count, id.clone());
                }
            }
            if all <= MAX_KEPT_BINDS {
                return;
            }
            created.pop(&most.1);
        }
    }
}

// The log and the journal of creates and starts.

/// Writes reports until the sender is gone.
fn write_reports(received: &Receiver<AgentLine>, node: &Node) {
    for report in received {
        let mut is_journaled = true;
        match &report {
            AgentLine::NriCreate(id, init, report) => {
                for problem in &report.problems {
                    warn!("container {id}: {problem}");
                }
                // The shim journals its own creates. A healthy create is not journaled again.
                is_journaled = !report.problems.is_empty();
                for bind in &report.binds {
                    is_journaled |= init.is_some() || bind.finding.verdict.is_finding();
                    match bind.log_message() {
                        Some(message) if bind.is_repaired() => info!("container {id}: {message}"),
                        Some(message) => warn!("container {id}: {message}"),
                        None => {}
                    }
                }
            }
            AgentLine::Refresh(line) => {
                for mount in &line.mounts {
                    let (place, id) = (&mount.destination, &line.id);
                    if mount.outcome.is_replaced() {
                        info!("container {id}: {place} shows the current file before it starts");
                    } else {
                        warn!("container {id} starts with an old file at {place}");
                    }
                }
            }
            AgentLine::Rebind(_) => {}
        }
        if is_journaled {
            node.reporting.journal(report);
        }
    }
}

// Work with a time limit, in a thread that is left alone when it is late.

/// Limit of threads that are late for a pod, for example behind a server that hangs. Beyond the limit
/// no more work is begun for this pod.
const MAX_LATE: usize = 4;

/// Begins work, and counts the threads of each pod that have not ended.
#[derive(Debug, Default)]
struct Deadline {
    /// A token for each pod, of which each thread has a clone.
    running: Mutex<BTreeMap<String, Arc<()>>>,
}

/// Why there is no result.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum NoResult {
    /// The time is up; the work goes on.
    #[error("it took more than {} ms", .0.as_millis())]
    Late(Duration),
    /// The thread ended without a result.
    #[error("it panicked")]
    Panicked,
    /// Too many earlier threads of the pod have not ended.
    #[error("{0} earlier ones of the pod have not ended")]
    Busy(usize),
    /// No thread could be started.
    #[error("no thread could be started")]
    NoThread,
}

impl NoResult {
    /// True if the time is up, or earlier work still takes too long.
    fn is_late(&self) -> bool {
        matches!(self, Self::Late(_) | Self::Busy(_))
    }
}

impl Deadline {
    /// The result of the work for a pod, if it is there in time.
    ///
    /// # Errors
    /// Names why it is not.
    fn within<T: Send + 'static>(
        &self,
        pod: &str,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let token = {
            let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.retain(|_, token| Arc::strong_count(token) > 1);
            let token = running.entry(pod.to_owned()).or_default();
            let threads = Arc::strong_count(token) - 1;
            if threads >= MAX_LATE {
                return Err(NoResult::Busy(threads));
            }
            Arc::clone(token)
        };
        let (send, receive) = sync_channel(1);
        let thread = thread::Builder::new().name("nri-create".to_owned());
        let started = thread.spawn(move || {
            let result = work();
            drop(token);
            // Nothing receives a late result.
            let _ = send.send(result);
        });
        if started.is_err() {
            return Err(NoResult::NoThread);
        }
        receive.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => NoResult::Late(limit),
            RecvTimeoutError::Disconnected => NoResult::Panicked,
        })
    }
}

#[cfg(test)]
mod deadline_tests {
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn work_that_is_late_or_panics_has_no_result() {
        let deadline = Deadline::default();
        let (_keep, never) = channel::<()>();
        assert_eq!(deadline.within("p", LONG, || 7), Ok(7));
        assert_eq!(
            deadline.within("p", SHORT, move || never.recv().is_ok()),
            Err(NoResult::Late(SHORT))
        );
        assert_eq!(
            deadline.within::<u8>("p", LONG, || panic!("as expected by a test")),
            Err(NoResult::Panicked)
        );
    }

    #[test]
    fn threads_that_hang_do_not_pile_up() {
        let deadline = Deadline::default();
        let keep: Vec<_> = (0..MAX_LATE)
            .map(|_| {
                let (keep, never) = channel::<()>();
                assert_eq!(
                    deadline.within("p", SHORT, move || never.recv().is_ok()),
                    Err(NoResult::Late(SHORT))
                );
                keep
            })
            .collect();
        let busy = deadline.within("p", LONG, || ());
        assert_eq!(busy, Err(NoResult::Busy(MAX_LATE)));
        assert_eq!(deadline.within("another", LONG, || ()), Ok(()));
        drop(keep);
        while matches!(deadline.within("p", LONG, || ()), Err(NoResult::Busy(_))) {
            thread::yield_now();
        }
        assert_eq!(deadline.within("p", LONG, || ()), Ok(()));
    }
}
