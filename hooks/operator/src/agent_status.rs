//! The state of the node agent, as it reports it on its unix socket, and the doctor's point for it.
//!
//! The agent writes this form and the command line reads it. A newer agent may send more keys,
//! which are skipped. The agent is optional: a node without an agent has no fault.

use std::net::SocketAddr;

use bindguard_core::policy::Mode;
use bindguard_core::refresh_request::RefreshMode;
use serde::{Deserialize, Serialize};

use crate::doctor::Check;

/// The path of the status on the agent's socket.
pub const STATUS_PATH: &str = "/v1/status";

/// The state of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum AgentState {
    /// No socket is there: the agent is optional.
    Absent,
    /// A socket is there, and no agent answers.
    Silent { problem: String },
    /// It runs.
    Running(Box<AgentStatus>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub version: String,
    pub pid: u32,
    /// When it started: RFC 3339, UTC.
    pub since: String,
    /// True once every kubelet root that answers is watched.
    pub ready: bool,
    /// When the last survey of the node ended: RFC 3339, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_survey: Option<String>,
    /// The action for stale subpaths.
    pub stale_subpaths: Mode,
    /// The containers that it refreshes.
    pub refresh: RefreshMode,
    /// Its connection as an NRI plugin.
    pub nri: NriState,
    /// True if it serves kubediag's processors.
    #[serde(default)]
    pub kubediag: bool,
    /// The number of kubelet roots that do not answer.
    pub silent_roots: u64,
    /// Addresses on which the agent cannot serve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<UnservedAddress>,
    /// Children of the agent that hang in containers. Until a child ends, its container is not refreshed.
    #[serde(default)]
    pub hanging_children: Vec<HangingChild>,
}

/// An address on which the agent cannot serve, and tries again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnservedAddress {
    pub address: SocketAddr,
    pub problem: String,
}

/// A child of the agent that hangs in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangingChild {
    /// The container's name for people.
    pub container: String,
    pub id: String,
    /// The pid of the child.
    pub pid: u32,
}

/// The agent as an NRI plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NriState {
    /// The config does not enable it.
    Off,
    Connected,
    /// No runtime accepts it now.
    Disconnected,
}

/// The point for it. `is_unit`: a systemd unit runs it, and no DaemonSet.
pub fn agent(state: &AgentState, is_unit: bool) -> Check {
    let logs = match is_unit {
        true => "journalctl --unit bindguard-agent --since -1h",
        false => {
            "kubectl get pods --all-namespaces --selector app.kubernetes.io/name=bindguard-agent --output wide"
        }
    };
    let status = match state {
        AgentState::Absent => return Check::ok("no node agent runs; it is optional"),
        AgentState::Silent { problem } => {
            let message = format!("the node agent does not answer, or ended: {problem}");
            return Check::failed(message, logs);
        }
        AgentState::Running(status) => status,
    };
    if status.nri == NriState::Disconnected {
        return Check::failed(
            "the node agent is enabled as an NRI plugin, and no runtime accepts it",
            logs,
        );
    }
    if status.silent_roots > 0 {
        let silent = status.silent_roots;
        let message = format!("{silent} kubelet roots do not answer the node agent");
        return Check::failed(message, "bindguard diagnose");
    }
    if let Some(first) = status.hanging_children.first() {
        let children = status.hanging_children.iter();
        let children = children.map(|it| format!("process {} in {}", it.pid, it.container));
        let message = format!(
            "a file server or FUSE daemon of a container does not answer the node agent, and the container is not refreshed: {}",
            Vec::from_iter(children).join(", ")
        );
        return Check::failed(message, format!("cat /proc/{}/stack", first.pid));
    }
    if let Some(UnservedAddress { address, problem }) = status.unserved.first() {
        let message = format!(
            "the node agent cannot serve on {address}, and another process may answer there: {problem}"
        );
        let command = format!("ss -tlnp sport = :{}", address.port());
        return Check::failed(message, command);
    }
    Check::ok(describe(status))
}

/// The agent in a single line.
pub fn describe(status: &AgentStatus) -> String {
    let survey = match (&status.last_survey, status.ready) {
        (_, false) => ", first survey not done".to_owned(),
        (Some(time), true) => format!(", last survey {}", seconds(time)),
        (None, true) => String::new(),
    };
    let refresh = match status.refresh {
        RefreshMode::Off => "refreshes no container",
        RefreshMode::Annotated => "refreshes annotated pods",
        RefreshMode::All => "refreshes all pods",
    };
    let nri = match status.nri {
        NriState::Off => "",
        NriState::Connected => ", NRI plugin",
        NriState::Disconnected => ", NRI plugin without a runtime",
    };
    let kubediag = if status.kubediag {
        ", kubediag processors"
    } else {
        ""
    };
    format!(
        "{} since {}{survey}, {refresh}{nri}{kubediag}",
        status.version,
        seconds(&status.since)
    )
}

/// A time in UTC without the part of its second.
pub fn seconds(time: &str) -> String {
    let whole = time.split('.').next().unwrap_or(time);
    format!("{}Z", whole.trim_end_matches('Z'))
}

#[cfg(test)]
mod tests {
    use bindguard_core::policy::Mode;

    use super::*;
    use crate::doctor::PointStatus;

    #[test]
    fn a_time_says_that_it_is_utc() {
        for time in ["2026-11-21T05:10:00.25Z", "2026-11-21T05:10:00Z"] {
            assert_eq!(seconds(time), "2026-11-21T05:10:00Z");
        }
    }

    fn running(nri: NriState, silent_roots: u64) -> AgentState {
        AgentState::Running(Box::new(AgentStatus {
            version: "0.2.0".to_owned(),
            pid: 7,
            since: "2026-11-21T05:00:00.5Z".to_owned(),
            ready: true,
            last_survey: Some("2026-11-21T05:10:00Z".to_owned()),
            stale_subpaths: Mode::Repair,
            refresh: RefreshMode::Annotated,
            nri,
            kubediag: false,
            silent_roots,
            unserved: Vec::new(),
            hanging_children: Vec::new(),
        }))
    }

    #[test]
    fn an_address_of_another_process_is_named() {
        let AgentState::Running(mut status) = running(NriState::Off, 0) else {
            panic!("it runs")
        };
        status.unserved.push(UnservedAddress {
            address: ([127, 0, 0, 1], 9474).into(),
            problem: "Address already in use".to_owned(),
        });
        let point = agent(&AgentState::Running(status), true);
        assert_eq!(point.status, PointStatus::Failed);
        assert!(
            point.message.contains("127.0.0.1:9474"),
            "{}",
            point.message
        );
        assert_eq!(point.command.as_deref(), Some("ss -tlnp sport = :9474"));
    }

    #[test]
    fn a_child_that_hangs_is_named_with_its_container() {
        let AgentState::Running(mut status) = running(NriState::Off, 0) else {
            panic!("it runs")
        };
        status.hanging_children = ["default/web container app", "db"]
            .map(|container| HangingChild {
                container: container.to_owned(),
                id: "bb344d713010".to_owned(),
                pid: 41,
            })
            .to_vec();
        let point = agent(&AgentState::Running(status), true);
        assert_eq!(point.status, PointStatus::Failed);
        let named = "process 41 in default/web container app, process 41 in db";
        assert!(point.message.ends_with(named), "{}", point.message);
        assert_eq!(point.command.as_deref(), Some("cat /proc/41/stack"));
    }

    #[test]
    fn a_node_without_an_agent_has_no_fault_and_one_with_a_dead_agent_has() {
        let silent = AgentState::Silent {
            problem: "Connection refused".to_owned(),
        };
        for (state, status) in [
            (AgentState::Absent, PointStatus::Ok),
            (silent, PointStatus::Failed),
            (running(NriState::Off, 0), PointStatus::Ok),
            (running(NriState::Connected, 0), PointStatus::Ok),
            (running(NriState::Disconnected, 0), PointStatus::Failed),
            (running(NriState::Off, 1), PointStatus::Failed),
        ] {
            assert_eq!(agent(&state, true).status, status, "{state:?}");
        }
        let message = agent(&running(NriState::Connected, 0), true).message;
        let expected = "0.2.0 since 2026-11-21T05:00:00Z, last survey 2026-11-21T05:10:00Z, refreshes annotated pods, NRI plugin";
        assert_eq!(message, expected);
    }

    #[test]
    fn a_newer_agent_may_report_more() {
        let AgentState::Running(status) = running(NriState::Off, 0) else {
            panic!("it runs")
        };
        let mut json = serde_json::to_value(&*status).unwrap();
        json["events"] = "on".into();
        assert_eq!(
            serde_json::from_value::<AgentStatus>(json).unwrap(),
            *status
        );
    }
}
