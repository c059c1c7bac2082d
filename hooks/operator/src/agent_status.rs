//! The state of the node agent, as it reports it on its unix socket.
//!
//! The agent writes this form and the command line reads it. A newer agent may send more keys,
//! which are skipped.

use std::net::SocketAddr;

use bindguard_core::policy::Mode;
use bindguard_core::refresh_request::RefreshMode;
use serde::{Deserialize, Serialize};

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
