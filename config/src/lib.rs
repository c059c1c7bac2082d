//! `config.toml`: the settings of a node's operator, and the defaults for everything that is not
//! set.
//!
//! No content of the file keeps a container from starting, except a policy that says refuse and a
//! runtime that is not there. A mistake changes only the key that has it, and every mistake is
//! returned for the logs. A mistake that may be about any check, such as an unknown key, keeps all
//! checks from a repair.
#![forbid(unsafe_code)]

mod keys;
mod load;
mod parse;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{PodsMay, Policy};
use toml::Value;

use crate::keys::{Setting, Settings, Visitor};

pub use bindguard_core::refresh_request::RefreshMode;
pub use keys::{CHANGING_KEYS, EventMode};
pub use load::{
    FileWarning, Instead, Loaded, Unused, keep_valid, load, load_by, load_without_file,
};
pub use parse::{InvalidToml, Warning};

/// The environment variable that names the config file.
pub const ENVIRONMENT: &str = "BINDGUARD_CONFIG";
/// The config file when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/bindguard/config.toml";
/// The last valid content of the file at [`DEFAULT_PATH`], kept by the installer and the agent.
pub const KEPT_PATH: &str = "/var/lib/bindguard/config.toml";

/// The file that a node gets: every table and key as a comment, with its default.
pub const SHIPPED: &str = include_str!("../config.toml");

/// The active settings of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    settings: Settings,
    policy: Policy,
    agent: AgentConfig,
    places: Places,
}

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

/// A key and its active value.
#[derive(Debug, Clone, PartialEq)]
pub struct ActiveKey {
    /// `table.key`
    pub name: &'static str,
    /// The value, as the file would state it.
    pub value: Value,
}

impl Config {
    /// The time limit of the guard; after it the shim goes on without the guard. 2 s unless set.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.settings.deadline_ms.0.into())
    }

    /// The OCI runtime that creates containers: a path, or a name to look for on `PATH`. `runc`
    /// unless set.
    pub fn runtime(&self) -> &Path {
        Path::new(&self.settings.runtime.0)
    }

    /// The journal of admissions; `None` when it is switched off.
    pub fn journal(&self) -> Option<&Path> {
        if self.settings.journal_enabled {
            Some(&self.settings.journal)
        } else {
            None
        }
    }

    /// The checks, and the action for each.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The settings of the node agent.
    pub fn agent(&self) -> &AgentConfig {
        &self.agent
    }

    /// The same config with other settings of the node agent.
    #[must_use]
    pub fn with_agent(self, agent: AgentConfig) -> Self {
        Self { agent, ..self }
    }

    /// The directories of kubelets and runtimes.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Reads the text of a config file, and returns its mistakes with it.
    ///
    /// # Errors
    /// Names the line, if the text is not TOML.
    pub fn parse(text: &str) -> Result<(Self, Vec<Warning>), InvalidToml> {
        let parsed = parse::parse(text)?;
        Ok((Self::of(parsed.settings), parsed.warnings))
    }

    /// As [`Config::parse`], without the mistakes.
    ///
    /// # Errors
    /// Names the line, if the text is not TOML.
    pub fn from_toml(text: &str) -> Result<Self, InvalidToml> {
        Self::parse(text).map(|(config, _)| config)
    }

    /// Every key with its active value, in the order of the shipped file. Printed as
    /// `name = value`, the keys are this config.
    pub fn active_keys(&self) -> Vec<ActiveKey> {
        let mut shown = Shown(Vec::new());
        self.settings.clone().visit(&mut shown);
        shown.0
    }

    /// Reports, repairs nothing, and calls the runtime that a text names, which is not TOML as a
    /// whole.
    fn report_only(text: Option<&str>) -> Self {
        Self::of(match text {
            Some(text) => parse::salvaged_runtime(text),
            None => Settings::default().only_report(),
        })
    }

    fn of(settings: Settings) -> Self {
        let mut runtime_directories = Places::default().runtime_directories;
        runtime_directories.extend_from_slice(&settings.extra_directories);
        let node = Some(settings.node.clone());
        Self {
            agent: AgentConfig {
                metrics: settings.metrics,
                socket: settings.socket.clone(),
                survey: Duration::from_secs(settings.survey_seconds.0.into()),
                nri: settings.nri_enabled.then(|| settings.nri_socket.clone()),
                refresh: settings.refresh,
                kubernetes: KubernetesConfig {
                    kubeconfig: settings.kubeconfig.clone(),
                    node: node.filter(|node| !node.is_empty()),
                    events: settings.events,
                    event_requests: settings.event_requests.0,
                },
                kubediag: settings
                    .kubediag_enabled
                    .then_some(settings.kubediag_listen),
            },
            policy: Policy {
                stale_subpaths: settings.stale_subpaths,
                host_root: settings.host_root,
                host_root_scope: settings.scope,
                read_only_binds: settings.read_only,
                vanished_directories: settings.vanished_directories,
                failed_repairs: settings.failed_repairs,
                unmounted_volumes: settings.unmounted_volumes,
                dead_sources: settings.dead_sources,
                proof: settings.proof,
                below_emptydirs: settings.below_emptydirs,
                pods_may: PodsMay {
                    set_mode: settings.annotation_mode,
                    set_propagation: settings.annotation_propagation,
                },
                words_recurse: false,
            },
            places: Places {
                kubelet_roots: settings.kubelet_roots.clone(),
                runtime_directories,
            },
            settings,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::of(Settings::default())
    }
}

struct Shown(Vec<ActiveKey>);

impl Visitor for Shown {
    fn key<T: Setting>(&mut self, name: &'static str, value: &mut T, _if_unreadable: T) {
        self.0.push(ActiveKey {
            name,
            value: value.shown(),
        });
    }
}

/// The reason why a config file is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read, or its copy could not be written.
    #[error("{act} {}", path.display())]
    File {
        /// `read` or `write`.
        act: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It is not TOML.
    #[error("parse {}, line {}: {reason}", path.display(), reason.line)]
    Parse { path: PathBuf, reason: InvalidToml },
}

impl InvalidToml {
    fn of_file(self, path: &Path) -> Error {
        Error::Parse {
            path: path.to_owned(),
            reason: self,
        }
    }
}
