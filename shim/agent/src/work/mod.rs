//! The work: re-binds on the host, refreshes of containers with a queue and a time limit each, and
//! surveys. [`Node`] is the state that all threads and tasks share, from the agent's start to its end.

pub mod kubelet_root;
pub mod queue;
pub mod refresher;
pub mod survey;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bindguard_config::Config;
use bindguard_core::report::{JournalLine, UnreadLine};
use bindguard_guard::refresh::HelperProcess;

use crate::limits::retry_with_backoff;
use crate::pods::PodLookup;
use crate::sinks::Reporting;
use crate::sinks::metrics::{Metrics, Total};

#[derive(Debug)]
pub struct Node {
    pub config: Config,
    /// A mistake in the config of the fleet, which makes the agent's pod unready: the rollout stops.
    pub ignored_config: Option<String>,
    /// The socket of the CRI.
    pub cri: PathBuf,
    /// Since 1970.
    pub started: Duration,
    pub metrics: &'static Metrics,
    pub pods: &'static PodLookup,
    pub reporting: Reporting,
    /// Starts the children in containers; `None` if no container is entered.
    pub helper: Option<&'static HelperProcess>,
    /// True once every kubelet root that answers is watched.
    pub ready: AtomicBool,
    /// The addresses that cannot be bound, and why.
    pub unserved: Mutex<BTreeMap<SocketAddr, String>>,
}

impl Node {
    /// A node whose runtime does not answer, without a journal, events and a helper process.
    #[cfg(test)]
    pub fn silent(config: &str) -> &'static Self {
        let config = Config::from_toml(config).expect("a config");
        Self::of_tests(config, PodLookup::unanswered())
    }

    /// The same, with this socket of the CRI.
    #[cfg(test)]
    pub fn silent_at(socket: &std::path::Path) -> &'static Self {
        Self::of_tests(Config::default(), PodLookup::unanswered_at(socket))
    }

    #[cfg(test)]
    fn of_tests(config: Config, pods: &'static PodLookup) -> &'static Self {
        let metrics = Metrics::new();
        Box::leak(Box::new(Self {
            config,
            ignored_config: None,
            cri: PathBuf::from("/nowhere.sock"),
            started: Duration::ZERO,
            metrics,
            pods,
            reporting: Reporting::off(metrics),
            helper: None,
            ready: AtomicBool::new(false),
            unserved: Mutex::default(),
        }))
    }

    /// Counts a line of the journal, and hands it to the events.
    pub fn journaled(&self, line: &Result<JournalLine, UnreadLine>) {
        self.metrics.journaled(line);
        if let Ok(line) = line {
            self.reporting.journaled(line);
        }
    }

    pub fn retry_with_backoff(&self, what: &str, work: impl FnMut() -> io::Result<()>) {
        retry_with_backoff(what, &self.metrics[Total::AgentThreadRestarts], work);
    }
}
