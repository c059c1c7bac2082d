//! The agent's own state, for `bindguard status` and `bindguard doctor`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use bindguard_config::Config;
use bindguard_core::policy::Mode;
use bindguard_core::refresh_request::RefreshMode;
use bindguard_operator::agent_status::{AgentStatus, NriState, UnservedAddress};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::host::since_epoch;
use crate::sinks::metrics::Metrics;

/// The facts that do not change while the agent runs.
#[derive(Debug)]
pub struct StatusSource {
    started: OffsetDateTime,
    stale_subpaths: Mode,
    refresh: RefreshMode,
    is_nri_plugin: bool,
    serves_kubediag: bool,
    /// The addresses that cannot be bound, and why.
    unserved: Mutex<BTreeMap<SocketAddr, String>>,
}

impl StatusSource {
    /// The facts of an agent that starts now.
    pub fn new(config: &Config) -> Self {
        let agent = config.agent();
        Self {
            started: OffsetDateTime::UNIX_EPOCH + since_epoch(),
            stale_subpaths: config.policy().stale_subpaths,
            refresh: agent.refresh,
            is_nri_plugin: agent.nri.is_some(),
            serves_kubediag: agent.kubediag.is_some(),
            unserved: Mutex::default(),
        }
    }

    /// Notes whether an address is served, or why not. Returns true if the problem is new.
    pub fn note_address(&self, address: SocketAddr, problem: Option<String>) -> bool {
        let mut unserved = self.unserved.lock().unwrap_or_else(PoisonError::into_inner);
        match problem {
            Some(problem) => {
                let before = unserved.insert(address, problem);
                before.as_ref() != unserved.get(&address)
            }
            None => unserved.remove(&address).is_some(),
        }
    }

    pub fn status(&self, metrics: &Metrics, ready: bool) -> AgentStatus {
        let last_survey = metrics.last_survey.get();
        let last_survey =
            OffsetDateTime::from_unix_timestamp_nanos((last_survey * 1e9) as i128).ok();
        AgentStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            since: text(self.started),
            ready,
            last_survey: last_survey
                .filter(|time| *time > OffsetDateTime::UNIX_EPOCH)
                .map(text),
            stale_subpaths: self.stale_subpaths,
            refresh: self.refresh,
            nri: match (self.is_nri_plugin, metrics.nri.connected.get()) {
                (false, _) => NriState::Off,
                (true, 0) => NriState::Disconnected,
                (true, _) => NriState::Connected,
            },
            kubediag: self.serves_kubediag,
            silent_roots: u64::try_from(metrics.silent_roots.get()).unwrap_or_default(),
            unserved: self.listed(),
            hanging_children: metrics.hanging_children.listed(),
        }
    }

    fn listed(&self) -> Vec<UnservedAddress> {
        let unserved = self.unserved.lock().unwrap_or_else(PoisonError::into_inner);
        let unserved = unserved.iter().map(|(address, problem)| UnservedAddress {
            address: *address,
            problem: problem.clone(),
        });
        unserved.collect()
    }
}

fn text(time: OffsetDateTime) -> String {
    time.format(&Rfc3339).unwrap_or_default()
}
