//! The settings of the node agent: `[agent]`, `[agent.nri]`, `[agent.kubediag]` and `[refresh]`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::refresh_request::RefreshMode;

use crate::kubernetes::KubernetesConfig;
use crate::settings::Settings;

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
    /// Selects the running containers to refresh.
    pub refresh: RefreshMode,
    /// Events and the node's state, for the API server.
    pub kubernetes: KubernetesConfig,
    /// The address of kubediag's processors; `None` if they are disabled.
    pub kubediag: Option<SocketAddr>,
}

impl AgentConfig {
    pub(crate) fn of(settings: &Settings) -> Self {
        Self {
            metrics: settings.metrics,
            socket: settings.socket.path(),
            survey: Duration::from_secs(settings.survey_seconds.0.into()),
            nri: settings.nri_enabled.then(|| settings.nri_socket.path()),
            kubediag: settings
                .kubediag_enabled
                .then_some(settings.kubediag_listen),
            refresh: settings.refresh,
            kubernetes: KubernetesConfig::of(settings),
        }
    }
}
