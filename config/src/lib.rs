//! `config.toml`: the settings of a node's operator, and the defaults for everything that is not set.
//!
//! An invalid file never keeps a container from starting: the defaults apply, and the reason is returned for the logs.
//! Unknown keys are refused, because a misspelt key that is silently ignored is a policy that does not apply.
#![forbid(unsafe_code)]

mod agent;
mod file;
mod kubernetes;

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;

pub use agent::AgentConfig;
pub use bindguard_core::refresh_request::RefreshMode;
pub use kubernetes::{EventMode, KubernetesConfig};

/// The environment variable that names the config file.
pub const ENVIRONMENT: &str = "BINDGUARD_CONFIG";
/// The config file when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/bindguard/config.toml";

/// A larger file is no config, and reading it would waste time.
const LARGEST: u64 = 1 << 20;

/// The file that a node gets: every key, commented out, with its default.
pub const SHIPPED: &str = include_str!("../config.toml");

/// The active settings of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    deadline: Duration,
    runtime: PathBuf,
    journal: Option<PathBuf>,
    policy: Policy,
    agent: AgentConfig,
    places: Places,
}

impl Config {
    /// The time limit of the guard; after it the shim goes on without the guard. 2 s unless set.
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

    /// The checks, and the action for each.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The settings of the node agent.
    pub fn agent(&self) -> &AgentConfig {
        &self.agent
    }

    /// The same with other settings of the node agent.
    #[must_use]
    pub fn with_agent(self, agent: AgentConfig) -> Self {
        Self { agent, ..self }
    }

    /// The directories of kubelets and runtimes.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Reads the text of a config file.
    ///
    /// # Errors
    /// Names the line and the expected value, if the text is not TOML, a key is unknown or a value is of the wrong kind.
    pub fn from_toml(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str::<file::File>(text).map(file::File::into_config)
    }

    /// Reads a config file.
    ///
    /// # Errors
    /// When it cannot be read, or as [`Config::from_toml`].
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        Self::from_file_by(path, read_here)
    }

    fn from_file_by(path: &Path, read: impl FnOnce(&Path, u64) -> io::Result<Vec<u8>>) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let bytes = read(path, LARGEST + 1).map_err(failed)?;
        if bytes.len() as u64 > LARGEST {
            return Err(failed(io::Error::other("it is larger than 1 MiB, and so is no config of bindguard's")));
        }
        let text = String::from_utf8(bytes).map_err(|_| failed(io::Error::other("it is not text")))?;
        Self::from_toml(&text).map_err(|reason| Error::Parse {
            path: path.to_owned(),
            line: line_of(&reason, &text),
            reason,
        })
    }
}

fn read_here(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Default for Config {
    fn default() -> Self {
        file::File::default().into_config()
    }
}

/// The reason why a config file was not accepted.
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
    /// It is not a config.
    #[error("parse {}, line {line}: {}", path.display(), one_line(reason))]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line that is invalid, counted from 1.
        line: usize,
        /// The parser's error. Its own text spans several lines.
        reason: toml::de::Error,
    },
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().trim_end().replace('\n', " ")
}

fn line_of(error: &toml::de::Error, text: &str) -> usize {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    before.matches('\n').count() + 1
}

/// The active config, and the reason if it is not the file's.
#[derive(Debug)]
pub struct Loaded {
    /// The active config.
    pub config: Config,
    /// The file exists, or the environment names it, and it is invalid or unreadable: `config` is the default.
    pub problem: Option<Error>,
}

/// Reads the node's config: the file that `BINDGUARD_CONFIG` names, else `/etc/bindguard/config.toml` if it exists. Never
/// fails.
pub fn load() -> Loaded {
    load_by(|path, most| {
        // Opening a fifo would wait for a writer, with no time limit.
        match fs::metadata(path)?.file_type().is_fifo() {
            true => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a fifo")),
            false => read_here(path, most),
        }
    })
}

/// As [`load`], with the caller's function to read a file, or its first bytes up to a limit: for example one that never waits
/// for a server.
pub fn load_by(read: impl FnOnce(&Path, u64) -> io::Result<Vec<u8>>) -> Loaded {
    let named = env::var_os(ENVIRONMENT).map(PathBuf::from);
    let path = named.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    match Config::from_file_by(path, read) {
        Ok(config) => Loaded { config, problem: None },
        Err(Error::Read { source, .. }) if named.is_none() && source.kind() == io::ErrorKind::NotFound => {
            Loaded { config: Config::default(), problem: None }
        }
        Err(problem) => Loaded { config: Config::default(), problem: Some(problem) },
    }
}
