//! The state of this node, as annotations of the agent's own pod: `kubectl get pods` shows them as
//! a table.
//!
//! ```text
//! survey ────────────────┐
//! re-binds, journal ─────┼─► NodeState ─► publisher: changed? a minute since the last time? ─► patch of the own pod
//! CRI (guarded runtimes) ┘
//! ```

mod publisher;

use std::collections::BTreeMap;

use bindguard_core::report::{BindRecord, JournalLine, Outcome, Report};
use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use bindguard_operator::node_report::NodeReport;
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::watch::{Receiver, Sender, channel};

use crate::wall_clock::since_epoch;

pub use self::publisher::{OwnPod, Publisher};

/// Names and values.
pub type Annotations = BTreeMap<String, String>;

const NONE: &str = "none";

/// The state that the threads contribute to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// The findings of the last survey, by verdict.
    findings: Option<BTreeMap<&'static str, usize>>,
    /// The last repair or refresh, in seconds since 1970.
    last_repair: Option<i64>,
}

/// Takes contributions from any thread. Without a publisher they go nowhere.
#[derive(Debug, Clone)]
pub struct StateSink(Option<Sender<NodeState>>);

impl StateSink {
    /// Drops everything.
    pub fn off() -> Self {
        Self(None)
    }

    /// Both ends.
    pub fn on() -> (Self, Receiver<NodeState>) {
        let (sender, receiver) = channel(NodeState::default());
        (Self(Some(sender)), receiver)
    }

    /// A survey ended.
    pub fn surveyed(&self, report: &NodeReport) {
        let Some(state) = &self.0 else { return };
        let mut findings = BTreeMap::new();
        for bind in report.binds.iter().filter(|bind| bind.is_finding()) {
            *findings.entry(bind.bind.verdict().as_str()).or_default() += 1;
        }
        state.send_modify(|state| state.findings = Some(findings));
    }

    /// The agent re-bound something.
    pub fn rebound(&self, report: &Report) {
        if report
            .binds
            .iter()
            .any(|bind| bind.outcome.as_ref().is_some_and(is_repair))
        {
            self.repaired();
        }
    }

    /// A create or an operator repaired something.
    pub fn journaled(&self, line: &JournalLine) {
        let is_repaired = |bind: &BindRecord<'_>| bind.outcome.as_deref().is_some_and(is_repair);
        let has_repair = match line {
            JournalLine::Create(line) | JournalLine::NriCreate(line) => {
                line.report.binds.iter().any(is_repaired)
            }
            JournalLine::Rebind(line) => line.binds.iter().any(is_repaired),
            JournalLine::Refresh(line) => {
                line.mounts.iter().any(|mount| mount.outcome.is_replaced())
            }
        };
        if has_repair {
            self.repaired();
        }
    }

    /// Something is repaired now.
    pub fn repaired(&self) {
        if let Some(state) = &self.0 {
            state.send_modify(|state| {
                state.last_repair = i64::try_from(since_epoch().as_secs()).ok()
            });
        }
    }

    /// True if the state is published.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }
}

fn is_repair(outcome: &Outcome) -> bool {
    outcome.is_repaired() && !matches!(outcome, Outcome::AlreadyCurrent)
}

impl NodeState {
    /// The annotations of the agent's pod.
    fn annotations(&self, guarded: Option<&GuardedRuntimes>) -> Annotations {
        let findings = self.findings.as_ref().map(|findings| {
            let words: Vec<_> = findings
                .iter()
                .map(|(verdict, count)| format!("{verdict}={count}"))
                .collect();
            if words.is_empty() {
                NONE.to_owned()
            } else {
                words.join(",")
            }
        });
        let last_repair = self
            .last_repair
            .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
        named([
            ("version", Some(env!("CARGO_PKG_VERSION").to_owned())),
            ("guarded-runtimes", guarded.map(for_people)),
            ("findings", findings),
            (
                "last-repair",
                last_repair.and_then(|time| time.format(&Rfc3339).ok()),
            ),
        ])
    }
}

/// The annotations of the installer's pod, from `bindguard status --json`. `None` if this is not
/// its output.
pub fn from_status(status: &Value) -> Option<Annotations> {
    let daemons = status["daemons"].as_array()?.iter().map(|daemon| {
        let runtimes = daemon["runtimes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        runtimes_for_people(
            daemon["daemon"].as_str().unwrap_or_default(),
            &runtimes.collect::<Vec<_>>(),
            daemon["default"] == true,
        )
    });
    let daemons: Vec<String> = daemons.collect();
    let is_owed = !status["restart_owed"].as_array()?.is_empty();
    Some(named([
        ("version", status["version"].as_str().map(str::to_owned)),
        (
            "guarded-runtimes",
            Some(if daemons.is_empty() {
                NONE.to_owned()
            } else {
                daemons.join("; ")
            }),
        ),
        ("restart-owed", Some(is_owed.to_string())),
        (
            "findings",
            status["findings"].as_u64().map(|count| count.to_string()),
        ),
    ]))
}

fn for_people(guarded: &GuardedRuntimes) -> String {
    let runtimes: Vec<&str> = guarded.runtimes.iter().map(String::as_str).collect();
    runtimes_for_people(guarded.daemon, &runtimes, guarded.default)
}

fn runtimes_for_people(daemon: &str, runtimes: &[&str], is_default: bool) -> String {
    match (runtimes.is_empty(), is_default) {
        (true, _) => format!("{daemon}: {NONE}"),
        (false, false) => format!("{daemon}: {}", runtimes.join(",")),
        (false, true) => format!("{daemon}: {} (default)", runtimes.join(",")),
    }
}

fn named<const N: usize>(values: [(&str, Option<String>); N]) -> Annotations {
    values
        .into_iter()
        .filter_map(|(name, value)| Some((format!("bindguard.io/{name}"), value?)))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use serde_json::json;

    use super::*;

    fn values(annotations: &Annotations) -> Vec<(&str, &str)> {
        annotations
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect()
    }

    #[test]
    fn the_agents_state_is_a_few_words() {
        let state = NodeState {
            findings: Some(BTreeMap::from([("dead", 1), ("stale", 2)])),
            last_repair: Some(1_800_000_000),
        };
        let guarded = GuardedRuntimes {
            daemon: "containerd",
            runtimes: vec!["bindguard".to_owned()],
            default: true,
        };
        assert_eq!(
            values(&state.annotations(Some(&guarded))),
            [
                ("bindguard.io/findings", "dead=1,stale=2"),
                (
                    "bindguard.io/guarded-runtimes",
                    "containerd: bindguard (default)"
                ),
                ("bindguard.io/last-repair", "2027-01-15T08:00:00Z"),
                ("bindguard.io/version", env!("CARGO_PKG_VERSION")),
            ]
        );
        let unknown = NodeState::default().annotations(None);
        assert_eq!(
            values(&unknown),
            [("bindguard.io/version", env!("CARGO_PKG_VERSION"))]
        );
    }

    #[test]
    fn the_installers_state_comes_from_status() {
        let status = json!({
            "version": "0.1.0", "findings": 3, "restart_owed": ["systemctl restart containerd"],
            "daemons": [{"daemon": "containerd", "runtimes": ["bindguard", "other"], "default": false}],
        });
        assert_eq!(
            values(&from_status(&status).unwrap()),
            [
                ("bindguard.io/findings", "3"),
                (
                    "bindguard.io/guarded-runtimes",
                    "containerd: bindguard,other"
                ),
                ("bindguard.io/restart-owed", "true"),
                ("bindguard.io/version", "0.1.0"),
            ]
        );
        assert_eq!(from_status(&json!({"error": "no"})), None);
    }
}
