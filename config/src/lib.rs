//! `config.toml`: what a node's operator sets, and what is in force where nothing is set.
//!
//! A file that cannot be taken never keeps a container from starting: the defaults are in force and the reason is handed
//! along, for logs to say. Unknown keys are refused, because a misspelt key that is silently ignored is a policy that is
//! not in force.
#![forbid(unsafe_code)]

mod file;

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::policy::Policy;

/// Names the config file in the environment.
pub const ENVIRONMENT: &str = "BINDGUARD_CONFIG";
/// Where the config file is when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/bindguard/config.toml";

/// The file that a node gets: every key, commented out, with what is in force without it.
pub const SHIPPED: &str = include_str!("../config.toml");

/// What is in force on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    deadline: Duration,
    runtime: PathBuf,
    journal: Option<PathBuf>,
    policy: Policy,
}

impl Config {
    /// How long the guard may take before the shim goes on without it. 2 s unless set.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The OCI runtime that creates containers: a path, or a name to look for on `PATH`. `runc` unless set.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The journal of admissions; `None` when it is switched off.
    pub fn journal(&self) -> Option<&Path> {
        self.journal.as_deref()
    }

    /// What to look for and what to do about it.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Reads the text of a config file.
    ///
    /// # Errors
    /// With the line and what was expected, when it is not TOML, a key is unknown or a value is of the wrong kind.
    pub fn from_toml(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str::<file::File>(text).map(file::File::into_config)
    }

    /// Reads a config file.
    ///
    /// # Errors
    /// When it cannot be read, or as [`Config::from_toml`].
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Self::from_toml(&text).map_err(|source| Error::Parse { path: path.to_owned(), source: Box::new(source) })
    }
}

impl Default for Config {
    fn default() -> Self {
        file::File::default().into_config()
    }
}

/// Why a config file was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It is not a config.
    #[error("understand {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line, and what was expected there.
        #[source]
        source: Box<toml::de::Error>,
    },
}

impl Error {
    /// What is wrong, as TOML's own parser says it: with the line, over several lines.
    pub fn cause(&self) -> String {
        match self {
            Self::Read { source, .. } => source.to_string(),
            Self::Parse { source, .. } => source.to_string(),
        }
    }

    /// The error and its cause in one line.
    pub fn in_full(&self) -> String {
        match self {
            Self::Read { source, .. } => format!("{self}: {source}"),
            Self::Parse { source, .. } => format!("{self}: {}", source.to_string().trim_end().replace('\n', " ")),
        }
    }
}

/// A config that is in force, and why it is not the file's.
#[derive(Debug)]
pub struct Loaded {
    /// In force.
    pub config: Config,
    /// The file was there, or was asked for, and could not be taken: `config` is the default.
    pub problem: Option<Error>,
}

/// Reads the node's config: the file that `BINDGUARD_CONFIG` names, else `/etc/bindguard/config.toml` if it is there.
/// Never fails.
pub fn load() -> Loaded {
    let named = env::var_os(ENVIRONMENT).map(PathBuf::from);
    let path = named.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    match Config::from_file(path) {
        Ok(config) => Loaded { config, problem: None },
        Err(Error::Read { source, .. }) if named.is_none() && source.kind() == io::ErrorKind::NotFound => {
            Loaded { config: Config::default(), problem: None }
        }
        Err(problem) => Loaded { config: Config::default(), problem: Some(problem) },
    }
}
