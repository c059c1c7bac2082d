//! `bindguard config`: checks the config file, prints the active settings, or prints a config with every key.

mod origin;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_config::{Config, DEFAULT_PATH, ENVIRONMENT, Error, SHIPPED};
use bindguard_core::error_chain;
use clap::Subcommand;
use toml::Table;

use crate::show::{print_json, print_text};
use crate::time_limits::check_answers;

/// Verbs of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Check the config file. If it is invalid, print the line and the expected value.
    Check {
        /// The file to check (default: the file that bindguard reads).
        file: Option<PathBuf>,
    },
    /// Print the active settings and the origin of each value.
    Show {
        /// Print the settings as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print a config with every key, its meaning and its default.
    Default,
}

impl ConfigVerb {
    /// Runs it; `config` is the file that `--config` names.
    pub fn run(self, config: Option<PathBuf>) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check { file } => {
                let named = file.or(config).or_else(|| std::env::var_os(ENVIRONMENT).map(PathBuf::from));
                let file = named.clone().unwrap_or_else(|| DEFAULT_PATH.into());
                check_answers(&file)?;
                check(&file, named.is_some())
            }
            Self::Show { json } => show(config, json),
            Self::Default => {
                print_text(SHIPPED)?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// A node without the file has every default, which is no error.
fn check(path: &Path, is_named: bool) -> anyhow::Result<ExitCode> {
    match Config::from_file(path) {
        Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound && !is_named => {
            print_text(&format!("no {}: every setting has its default\n", path.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(_) => {
            print_text(&format!("{} is good\n", path.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => anyhow::bail!("{}; `bindguard config default` prints a valid config", error_chain(&error)),
    }
}

/// The node's own file may be missing: then every value is a default. A named file must exist.
fn show(config: Option<PathBuf>, json: bool) -> anyhow::Result<ExitCode> {
    let is_named = config.is_some() || std::env::var_os(ENVIRONMENT).is_some();
    let path = config.unwrap_or_else(in_force);
    check_answers(&path)?;
    let table = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_named => None,
        text => {
            let text = text.with_context(|| format!("read {}", path.display()))?;
            Config::from_file(&path)?;
            Some(text.parse::<Table>().with_context(|| format!("parse {}", path.display()))?)
        }
    };
    let keys = origin::in_force(table.as_ref().map(|table| (path.as_path(), table)));
    if json {
        print_json(&keys)?;
    } else {
        let width = keys.iter().map(|key| key.key.len()).max().unwrap_or(0);
        let line = |key: &origin::InForce| format!("{:<width$} = {}  # {}\n", key.key, key.value, key.origin);
        print_text(&keys.iter().map(line).collect::<String>())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The config file without `--config`.
pub fn in_force() -> PathBuf {
    std::env::var_os(ENVIRONMENT).map_or_else(|| DEFAULT_PATH.into(), PathBuf::from)
}
