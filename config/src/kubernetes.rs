//! The settings of the agent as a client of the API server: the tables `[agent.kubernetes]`, `[agent.events]` and `[agent.node-state]`.

use std::path::PathBuf;

use serde::Deserialize;

use crate::file::{Absolute, RelativePath};

/// The agent's settings for Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// The kubeconfig; `None` for the service account of the agent's pod.
    pub kubeconfig: Option<PathBuf>,
    /// The node's name; `None` for `$NODE_NAME`, else the host's name.
    pub node: Option<String>,
    /// The events that are written.
    pub events: EventMode,
    /// The number of requests for events in a minute, in the long run.
    pub event_requests: u32,
    /// True if the agent annotates its own pod with the node's state.
    pub node_state: bool,
}

/// The events that the agent writes to the API server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventMode {
    /// None.
    #[default]
    Off,
    /// Those of type Warning.
    Warnings,
    /// All.
    All,
}

impl std::str::FromStr for EventMode {
    type Err = InvalidMode;

    fn from_str(text: &str) -> Result<Self, InvalidMode> {
        match text {
            "off" => Ok(Self::Off),
            "warnings" => Ok(Self::Warnings),
            "all" => Ok(Self::All),
            _ => Err(InvalidMode),
        }
    }
}

/// The text is no mode.
#[derive(Debug, thiserror::Error)]
#[error("expected \"off\", \"warnings\" or \"all\"")]
pub struct InvalidMode;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Kubernetes {
    kubeconfig: Kubeconfig,
    node: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct Events {
    mode: EventMode,
    requests_per_minute: PerMinute,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NodeState {
    enabled: bool,
}

/// An absolute path; empty for none.
#[derive(Debug, Default, Deserialize)]
#[serde(try_from = "PathBuf")]
struct Kubeconfig(Option<PathBuf>);

impl TryFrom<PathBuf> for Kubeconfig {
    type Error = RelativePath;

    fn try_from(path: PathBuf) -> Result<Self, RelativePath> {
        if path.as_os_str().is_empty() {
            return Ok(Self(None));
        }
        Absolute::try_from(path).map(|Absolute(path)| Self(Some(path)))
    }
}

/// A rate.
#[derive(Debug, Deserialize)]
#[serde(try_from = "u32")]
struct PerMinute(u32);

impl Default for PerMinute {
    fn default() -> Self {
        Self(6)
    }
}

/// Why a rate is refused.
#[derive(Debug, thiserror::Error)]
#[error("{0} is out of range, expected 1 to 600")]
struct InvalidRate(u32);

impl TryFrom<u32> for PerMinute {
    type Error = InvalidRate;

    fn try_from(rate: u32) -> Result<Self, InvalidRate> {
        match rate {
            1..=600 => Ok(Self(rate)),
            rate => Err(InvalidRate(rate)),
        }
    }
}

impl KubernetesConfig {
    pub(crate) fn of(kubernetes: Kubernetes, events: &Events, node_state: &NodeState) -> Self {
        Self {
            kubeconfig: kubernetes.kubeconfig.0,
            node: Some(kubernetes.node).filter(|node| !node.is_empty()),
            events: events.mode,
            event_requests: events.requests_per_minute.0,
            node_state: node_state.enabled,
        }
    }
}
