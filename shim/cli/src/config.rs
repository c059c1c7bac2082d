//! `bindguard config`: is the file what it should be, and what may stand in it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_config::{Config, DEFAULT_PATH, ENVIRONMENT, SHIPPED};
use clap::Subcommand;

/// Verbs of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Say whether the config file can be taken; if not, the line and what was expected there.
    Check {
        /// The file; without it, the one that is in force.
        file: Option<PathBuf>,
    },
    /// Print a config with every key, its meaning, and what is in force without it.
    Default,
}

impl ConfigVerb {
    /// Runs it; `asked` is the file that `--config` names.
    pub fn run(self, asked: Option<PathBuf>) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check { file } => check(&file.or(asked).unwrap_or_else(in_force)),
            Self::Default => {
                io::stdout().write_all(SHIPPED.as_bytes())?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

fn check(path: &Path) -> anyhow::Result<ExitCode> {
    match Config::from_file(path) {
        Ok(_) => {
            println!("{} is good", path.display());
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => anyhow::bail!("{error:#}: {}", error.cause()),
    }
}

fn in_force() -> PathBuf {
    std::env::var_os(ENVIRONMENT).map_or_else(|| DEFAULT_PATH.into(), PathBuf::from)
}
