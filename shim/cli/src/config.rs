//! `bindguard config`: checks the config file, prints the active settings, or prints a config with
//! every key. And `bindguard version`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use bindguard_config::{
    ActiveKey, CHANGING_KEYS, DEFAULT_PATH, ENVIRONMENT, Instead, KEPT_PATH, Loaded, SHIPPED, load,
};
use bindguard_core::error_chain;
use clap::Subcommand;
use serde::Serialize;
use toml::Value;

use crate::named_file::check_answers;
use crate::show::{Output, print_remark, print_text};

/// Verbs of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Check the config file, and print the line of each mistake.
    Check {
        /// The file to check (default: the file that bindguard reads).
        file: Option<PathBuf>,
    },
    /// Print the active settings and the origin of each value.
    Show {
        #[command(flatten)]
        output: Output,
    },
    /// Print a config with every key, its meaning and its default.
    Default,
}

impl ConfigVerb {
    /// `config` is the file that `--config` names.
    pub fn run(self, config: Option<PathBuf>) -> Result<ExitCode> {
        match self {
            Self::Check { file } => {
                let named = file
                    .or(config)
                    .or_else(|| std::env::var_os(ENVIRONMENT).map(PathBuf::from));
                let is_named = named.is_some();
                let file = named.unwrap_or_else(|| DEFAULT_PATH.into());
                check_answers(&file)?;
                check(&file, is_named)
            }
            Self::Show { output } => show(config, output),
            Self::Default => {
                print_text(SHIPPED)?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// A node without the file has every default, which is no error.
fn check(path: &Path, is_named: bool) -> Result<ExitCode> {
    let is_missing = path
        .symlink_metadata()
        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let name = path.display();
    let mut text = String::new();
    if is_missing && !is_named {
        text = format!("no {name}: every setting has its default\n");
    } else {
        for warning in valid(path)?.warnings {
            text += &format!("{warning}\n");
        }
        if !text.is_empty() {
            print_text(&text)?;
            return Ok(ExitCode::FAILURE);
        }
        text = format!("{name} has no mistake\n");
    }
    print_text(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the active config as a valid config file.
fn show(named: Option<PathBuf>, output: Output) -> Result<ExitCode> {
    let is_named = named.is_some();
    let path = named.unwrap_or_else(in_force);
    check_answers(&path)?;
    let loaded = if is_named { valid(&path)? } else { load() };
    loaded.remarks().iter().for_each(print_remark);
    let keys = shown(&loaded, &path);
    let width = keys.iter().map(|key| key.key.len()).max().unwrap_or(0);
    let mut text = String::new();
    for ShownKey { key, value, origin } in &keys {
        text += &format!("{key:<width$} = {value}  # {origin}");
        // The shim gets the runtime from containerd's file.
        if *key == "runtime.path" {
            text += "; not under bindguard's shim, which runs containerd's BinaryName";
        }
        text.push('\n');
    }
    output.print(&keys, &text)?;
    Ok(ExitCode::from(u8::from(loaded.only_reports)))
}

fn valid(path: &Path) -> Result<Loaded> {
    Loaded::from_file(path).map_err(|error| {
        anyhow!(
            "{}; `bindguard config default` prints a valid config",
            error_chain(&error)
        )
    })
}

/// The config file without `--config`.
pub fn in_force() -> PathBuf {
    std::env::var_os(ENVIRONMENT).map_or_else(|| DEFAULT_PATH.into(), PathBuf::from)
}

// The active settings, key by key, with the origin of each value.

/// An active setting.
#[derive(Debug, Serialize)]
struct ShownKey {
    /// `table.key`
    key: &'static str,
    value: Value,
    /// The file that sets the value; `default` if none does; `report-only` if a mistake keeps the key
    /// from its own value.
    origin: String,
}

/// Every key of the config, in the order of the shipped file. `path`: the node's file.
fn shown(loaded: &Loaded, path: &Path) -> Vec<ShownKey> {
    let (file, unset) = match loaded.problem.as_ref().map(|problem| problem.instead) {
        None => (path.display().to_string(), "default"),
        Some(Instead::Kept) => (KEPT_PATH.to_owned(), "default"),
        Some(Instead::ReportOnly) => (String::new(), "report-only"),
    };
    let mut shown = Vec::new();
    for ActiveKey { name, value } in loaded.config.active_keys() {
        let origin = if loaded.only_reports && CHANGING_KEYS.contains(&name) {
            "report-only"
        } else if loaded.set.contains(&name) {
            &file
        } else {
            unset
        };
        shown.push(ShownKey {
            key: name,
            value,
            origin: origin.to_owned(),
        });
    }
    shown
}

/// Prints the version, and the revision of the sources, which the Makefile sets.
pub fn print_version() -> Result<ExitCode> {
    let revision = option_env!("BINDGUARD_REVISION").filter(|it| !it.is_empty());
    let (version, revision) = (env!("CARGO_PKG_VERSION"), revision.unwrap_or("unknown"));
    print_text(&format!("bindguard {version}, revision {revision}\n"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod origin_tests {
    use bindguard_config::Config;

    use super::*;
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let documented = documented("`config show`");
        let config = Config::from_toml("guard.deadline-ms = 500\n").unwrap();
        let loaded = Loaded {
            config,
            problem: None,
            warnings: Vec::new(),
            text: String::new(),
            set: vec!["guard.deadline-ms"],
            only_reports: false,
        };
        let mut keys = shown(&loaded, Path::new("/etc/bindguard/config.toml"));
        // the document shows two of them
        keys.retain(|key| documented.contains(&format!("{:?}", key.key)));
        assert_eq!(
            serde_json::to_string_pretty(&keys).unwrap(),
            documented.trim_end()
        );
    }
}
