//! `config.toml`: what a node's operator sets, and what is in force where nothing is set.
//!
//! A file that cannot be taken never keeps a container from starting: the defaults are in force and the reason is handed
//! along, for logs to say. Unknown keys are refused, because a misspelt key that is silently ignored is a policy that is
//! not in force.
#![forbid(unsafe_code)]

mod file;

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::policy::Policy;

/// Names the config file in the environment.
pub const ENVIRONMENT: &str = "BINDGUARD_CONFIG";
/// Where the config file is when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/bindguard/config.toml";

/// More than this is no config, and would take its reader's time for nothing.
const LARGEST: u64 = 1 << 20;

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
        Self::from_file_by(path, read_here)
    }

    fn from_file_by(path: &Path, read: impl FnOnce(&Path, u64) -> io::Result<Vec<u8>>) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let bytes = read(path, LARGEST + 1).map_err(failed)?;
        if bytes.len() as u64 > LARGEST {
            return Err(failed(io::Error::other("it is larger than 1 MiB, and so is no config of bindguard's")));
        }
        let text = String::from_utf8(bytes).map_err(|_| failed(io::Error::other("it is not text")))?;
        Self::from_toml(&text).map_err(|source| Error::Parse {
            path: path.to_owned(),
            line: line_of(&source, &text),
            source,
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
    #[error("understand {}, line {line}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line that cannot be taken, counted from 1.
        line: usize,
        /// What was expected there.
        #[source]
        source: toml::de::Error,
    },
}

fn line_of(error: &toml::de::Error, text: &str) -> usize {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    before.matches('\n').count() + 1
}

impl Error {
    /// The error and its cause in one line.
    pub fn in_full(&self) -> String {
        match self {
            Self::Read { source, .. } => format!("{self}: {source}"),
            Self::Parse { source, .. } => format!("{self}: {}", source.message().trim_end().replace('\n', " ")),
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
    load_by(|path, most| {
        // Opening a fifo would wait for a writer, and nobody is there to give up.
        match fs::metadata(path)?.file_type().is_fifo() {
            true => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a fifo")),
            false => read_here(path, most),
        }
    })
}

/// The same, for who has a way of their own to read a file, or its first so many bytes: without waiting for a server, say.
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
