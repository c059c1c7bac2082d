//! Under construction.

use std::time::Duration;

/// What a node's operator set.
#[derive(Debug, Clone)]
pub struct Config {
    deadline: Duration,
}

impl Config {
    /// How long the guard may take before the shim goes on without it.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }
}

/// Why a config file was not taken.
#[derive(Debug, thiserror::Error)]
#[error("config")]
pub struct Error;

/// A config that is in force, and why it is not the file's.
#[derive(Debug)]
pub struct Loaded {
    /// In force.
    pub config: Config,
    /// The file was there and could not be taken.
    pub problem: Option<Error>,
}

/// Reads the node's config; never fails.
pub fn load() -> Loaded {
    Loaded { config: Config { deadline: Duration::from_secs(2) }, problem: None }
}
