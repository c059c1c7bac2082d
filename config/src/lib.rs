//! `config.toml`: the settings of a node's operator, and the defaults for everything that is not
//! set.
//!
//! No content of the file keeps a container from starting, except a policy that says refuse and a
//! runtime that is not there. A mistake changes only the key that has it, and every mistake is
//! returned for the logs. A mistake that may be about any check, such as an unknown key, keeps all
//! checks from a repair.
#![forbid(unsafe_code)]

mod load;
mod parse;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{BelowEmptyDirs, Policy};
use toml::Value;

use crate::parse::{Choice, Slot};

pub use bindguard_core::refresh_request::RefreshMode;
pub use load::{Error, Instead, Loaded, Unused, keep_valid, load, load_by, load_without_file};
pub use parse::{InvalidToml, Warning};

/// The environment variable that names the config file.
pub const ENVIRONMENT: &str = "BINDGUARD_CONFIG";
/// The config file when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/bindguard/config.toml";
/// The last valid content of the file at [`DEFAULT_PATH`], kept by the installer and the agent.
pub const KEPT_PATH: &str = "/var/lib/bindguard/config.toml";

/// The file that a node gets: every table and key as a comment, with its default.
pub const SHIPPED: &str = include_str!("../config.toml");

/// The keys by which bindguard changes a node or a container. If a mistake can concern a key of this
/// list, the first three keys become "report", and the last key "off".
pub const CHANGING_KEYS: [&str; 4] = [
    "checks.stale-subpaths",
    "checks.host-root",
    "checks.mounts-below-emptydir",
    "refresh.mode",
];

/// The active settings of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    deadline_ms: u32,
    runtime: String,
    extra_directories: Vec<PathBuf>,
    journal_enabled: bool,
    journal: PathBuf,
    survey_seconds: u32,
    nri_enabled: bool,
    nri_socket: PathBuf,
    kubediag_enabled: bool,
    kubediag_listen: SocketAddr,
    policy: Policy,
    places: Places,
    agent: AgentConfig,
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

/// The events that the agent writes to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumIter, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum EventMode {
    /// None.
    Off,
    /// Those of type Warning.
    Warnings,
    /// All.
    All,
}

impl FromStr for EventMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut mode = Self::Off;
        match mode.set(text) {
            Some(()) => Ok(mode),
            None => Err(format!("expected {}", Slot::Word(&mut mode, "").expected())),
        }
    }
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
        Duration::from_millis(self.deadline_ms.into())
    }

    /// The OCI runtime that creates containers: a path, or a name to look for on `PATH`. `runc`
    /// unless set.
    pub fn runtime(&self) -> &Path {
        Path::new(&self.runtime)
    }

    /// The journal of admissions; `None` when it is switched off.
    pub fn journal(&self) -> Option<&Path> {
        self.journal_enabled.then_some(&self.journal)
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
        Ok((parsed.config, parsed.warnings))
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
        let mut keys = Vec::new();
        for (name, slot) in self.clone().slots() {
            let value = slot.shown();
            keys.push(ActiveKey { name, value });
        }
        keys
    }

    /// Every key of the file, once, in the order of the shipped file. Reading, showing and checking a
    /// config all go through this table, so they cannot disagree.
    fn slots(&mut self) -> [(&'static str, Slot<'_>); 30] {
        use Slot::{
            Address, AddressOrOff, Flag, Number, Path, PathOrNone, Paths, Program, TextOrNone, Word,
        };
        let (policy, agent) = (&mut self.policy, &mut self.agent);
        let kubernetes = &mut agent.kubernetes;
        [
            ("guard.deadline-ms", Number(&mut self.deadline_ms, 600_000)),
            (
                "guard.failed-repairs",
                Word(&mut policy.failed_repairs, "pass"),
            ),
            ("runtime.path", Program(&mut self.runtime)),
            ("kubelet.roots", Paths(&mut self.places.kubelet_roots)),
            (
                "checks.stale-subpaths",
                Word(&mut policy.stale_subpaths, "report"),
            ),
            ("checks.host-root", Word(&mut policy.host_root, "report")),
            (
                "checks.unmounted-volumes",
                Word(&mut policy.unmounted_volumes, "report"),
            ),
            (
                "checks.dead-sources",
                Word(&mut policy.dead_sources, "report"),
            ),
            ("checks.proof", Word(&mut policy.proof, "report")),
            (
                "checks.vanished-directories",
                Word(&mut policy.vanished_directories, "leave"),
            ),
            (
                "checks.mounts-below-emptydir",
                Word(&mut policy.below_emptydirs, "report"),
            ),
            (
                "host-root.scope",
                Word(&mut policy.host_root_scope, "host-root"),
            ),
            (
                "host-root.read-only",
                Word(&mut policy.read_only_binds, "keep"),
            ),
            (
                "host-root.extra-directories",
                Paths(&mut self.extra_directories),
            ),
            ("annotations.mode", Flag(&mut policy.pods_may.set_mode)),
            (
                "annotations.propagation",
                Flag(&mut policy.pods_may.set_propagation),
            ),
            ("journal.enabled", Flag(&mut self.journal_enabled)),
            ("journal.path", Path(&mut self.journal)),
            ("agent.metrics", AddressOrOff(&mut agent.metrics)),
            ("agent.socket", Path(&mut agent.socket)),
            (
                "agent.survey-seconds",
                Number(&mut self.survey_seconds, u32::MAX),
            ),
            ("agent.nri.enabled", Flag(&mut self.nri_enabled)),
            ("agent.nri.socket", Path(&mut self.nri_socket)),
            (
                "agent.kubernetes.kubeconfig",
                PathOrNone(&mut kubernetes.kubeconfig),
            ),
            ("agent.kubernetes.node", TextOrNone(&mut kubernetes.node)),
            ("agent.events.mode", Word(&mut kubernetes.events, "off")),
            (
                "agent.events.requests-per-minute",
                Number(&mut kubernetes.event_requests, 600),
            ),
            ("agent.kubediag.enabled", Flag(&mut self.kubediag_enabled)),
            ("agent.kubediag.listen", Address(&mut self.kubediag_listen)),
            ("refresh.mode", Word(&mut agent.refresh, "off")),
        ]
    }

    /// Applies the keys that switch on others.
    fn finished(mut self) -> Self {
        self.places
            .runtime_directories
            .extend_from_slice(&self.extra_directories);
        self.agent.survey = Duration::from_secs(self.survey_seconds.into());
        self.agent.nri = self.nri_enabled.then(|| self.nri_socket.clone());
        self.agent.kubediag = self.kubediag_enabled.then_some(self.kubediag_listen);
        self
    }

    /// The same settings without a change of the node: no check repairs, and nothing is refreshed.
    fn only_report(mut self) -> Self {
        let policy = &mut self.policy;
        policy.stale_subpaths = policy.stale_subpaths.without_repair();
        policy.host_root = policy.host_root.without_repair();
        if policy.below_emptydirs == BelowEmptyDirs::Detach {
            policy.below_emptydirs = BelowEmptyDirs::Report;
        }
        self.agent.refresh = RefreshMode::Off;
        self
    }
}

impl Default for Config {
    fn default() -> Self {
        let local = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        Self {
            deadline_ms: 2_000,
            runtime: "runc".to_owned(),
            extra_directories: Vec::new(),
            journal_enabled: true,
            journal: "/run/bindguard/journal.jsonl".into(),
            survey_seconds: 300,
            nri_enabled: false,
            nri_socket: "/var/run/nri/nri.sock".into(),
            kubediag_enabled: false,
            // Port 8090 is that of kubediag's own agent on the same node.
            kubediag_listen: local(9475),
            policy: Policy::default(),
            places: Places::default(),
            agent: AgentConfig {
                metrics: Some(local(9474)),
                socket: "/run/bindguard/agent.sock".into(),
                survey: Duration::from_secs(300),
                nri: None,
                refresh: RefreshMode::Annotated,
                kubernetes: KubernetesConfig {
                    kubeconfig: None,
                    node: None,
                    events: EventMode::Off,
                    event_requests: 6,
                },
                kubediag: None,
            },
        }
    }
}
