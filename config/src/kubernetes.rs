//! The settings of the agent as a client of the API server: the tables `[agent.kubernetes]`
//! and `[agent.events]`.

use std::path::PathBuf;

use crate::event_mode::EventMode;
use crate::settings::Settings;

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
}

impl KubernetesConfig {
    pub(crate) fn of(settings: &Settings) -> Self {
        let named = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        Self {
            kubeconfig: named(&settings.kubeconfig.0).map(PathBuf::from),
            node: named(&settings.node),
            events: settings.events,
            event_requests: settings.event_requests.0,
        }
    }
}
