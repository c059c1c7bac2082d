//! `config.toml`: the settings of a node's operator, and the defaults for everything that is not
//! set.
//!
//! No content of the file keeps a container from starting, except a policy that says refuse and a
//! runtime that is not there. A mistake changes only the key that has it, and every mistake is
//! returned for the logs. A mistake that may be about any check, such as an unknown key, keeps all
//! checks from a repair.
#![forbid(unsafe_code)]

mod agent;
mod event_mode;
mod kubernetes;
mod load;
mod parse;
mod settings;
mod value;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{PodsMay, Policy};
use toml::Value;

use crate::parse::ParsedSettings;
use crate::settings::{Settings, Visitor};
use crate::value::Setting;

pub use agent::AgentConfig;
pub use bindguard_core::refresh_request::RefreshMode;
pub use event_mode::EventMode;
pub use kubernetes::KubernetesConfig;
pub use load::{
    FileWarning, Instead, Loaded, Unused, keep_valid, load, load_by, load_without_file,
};
pub use parse::{InvalidToml, Warning};
pub use settings::CHANGING_KEYS;

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
        let path = || Path::new(&self.settings.journal.0);
        self.settings.journal_enabled.then(path)
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
        let ParsedSettings {
            settings, warnings, ..
        } = parse::parse(text)?;
        Ok((Self::of(settings), warnings))
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
        let defaults = Places::default();
        let mut runtime_directories = defaults.runtime_directories;
        runtime_directories.extend(settings.extra_directories.iter().map(value::Absolute::path));
        Self {
            agent: AgentConfig::of(&settings),
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
                kubelet_roots: settings
                    .kubelet_roots
                    .iter()
                    .map(value::Absolute::path)
                    .collect(),
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
    /// It could not be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It is not TOML.
    #[error("parse {}, line {}: {reason}", path.display(), reason.line)]
    Parse {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        reason: InvalidToml,
    },
    /// Its copy could not be written.
    #[error("write {}", path.display())]
    Keep {
        /// The copy.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl InvalidToml {
    fn of_file(self, path: &Path) -> Error {
        Error::Parse {
            path: path.to_owned(),
            reason: self,
        }
    }
}
