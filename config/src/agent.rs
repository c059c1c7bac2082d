//! The tables of the node agent: `[agent]`, `[agent.nri]`, `[agent.kubediag]` and `[refresh]`. Those for Kubernetes have a file of their own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::refresh_request::RefreshMode;
use serde::Deserialize;

use crate::file::Absolute;
use crate::kubernetes::{Events, Kubernetes, KubernetesConfig, NodeState};

/// The settings of the node agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfig {
    /// The address of `/metrics`, `/healthz` and `/readyz`; `None` when it is switched off.
    pub metrics: Option<SocketAddr>,
    /// The unix socket of everything that the agent serves.
    pub socket: PathBuf,
    /// The time between two surveys of the node.
    pub survey: Duration,
    /// The runtime's NRI socket; `None` if the agent is no NRI plugin.
    pub nri: Option<PathBuf>,
    /// The containers that are refreshed while they run.
    pub refresh: RefreshMode,
    /// Events and the node's state, for the API server.
    pub kubernetes: KubernetesConfig,
    /// The address of kubediag's processors; `None` if they are disabled.
    pub kubediag: Option<SocketAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct Agent {
    metrics: Metrics,
    socket: Option<Absolute>,
    survey_seconds: Seconds,
    nri: Nri,
    kubediag: Kubediag,
    kubernetes: Kubernetes,
    events: Events,
    node_state: NodeState,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Nri {
    enabled: bool,
    socket: Option<Absolute>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct Refresh {
    mode: RefreshMode,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Kubediag {
    enabled: bool,
    listen: Listen,
}

/// The address of kubediag's processors. Port 8090 is that of kubediag's own agent on the same node.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Listen(SocketAddr);

impl Default for Listen {
    fn default() -> Self {
        Self(SocketAddr::from(([127, 0, 0, 1], 9475)))
    }
}

impl TryFrom<String> for Listen {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        text.parse().map(Self).map_err(|_| InvalidValue::Listen(text))
    }
}

/// Why a value of these tables is refused.
#[derive(Debug, thiserror::Error)]
enum InvalidValue {
    #[error("{0:?} is no address, expected \"IP:PORT\" or \"off\"")]
    Address(String),
    #[error("{0:?} is no address, expected \"IP:PORT\"")]
    Listen(String),
    #[error("0 is no interval, expected 1 or more")]
    Interval,
}

/// An address, or "off".
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Metrics(Option<SocketAddr>);

impl Default for Metrics {
    fn default() -> Self {
        Self(Some(SocketAddr::from(([127, 0, 0, 1], 9474))))
    }
}

impl TryFrom<String> for Metrics {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            address => match address.parse() {
                Ok(address) => Ok(Self(Some(address))),
                Err(_) => Err(InvalidValue::Address(text)),
            },
        }
    }
}

/// A number of seconds above zero.
#[derive(Debug, Deserialize)]
#[serde(try_from = "u64")]
struct Seconds(Duration);

impl Default for Seconds {
    fn default() -> Self {
        Self(Duration::from_secs(300))
    }
}

impl TryFrom<u64> for Seconds {
    type Error = InvalidValue;

    fn try_from(seconds: u64) -> Result<Self, InvalidValue> {
        match seconds {
            0 => Err(InvalidValue::Interval),
            seconds => Ok(Self(Duration::from_secs(seconds))),
        }
    }
}

impl Agent {
    pub(crate) fn with(self, refresh: &Refresh) -> AgentConfig {
        AgentConfig {
            metrics: self.metrics.0,
            socket: self.socket.map_or_else(|| "/run/bindguard/agent.sock".into(), |socket| socket.0),
            survey: self.survey_seconds.0,
            nri: self
                .nri
                .enabled
                .then(|| self.nri.socket.map_or_else(|| "/var/run/nri/nri.sock".into(), |Absolute(socket)| socket)),
            kubediag: self.kubediag.enabled.then_some(self.kubediag.listen.0),
            refresh: refresh.mode,
            kubernetes: KubernetesConfig::of(self.kubernetes, &self.events, &self.node_state),
        }
    }
}
