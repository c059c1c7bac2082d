//! bindguard's own config on the node: installs the commented default if there is none, and keeps a
//! copy of a valid one.
//!
//! Some runtimes cannot pass on the OCI runtime that their own options name. Then `runtime.path`
//! must name it, or another runtime than before would create the containers.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use bindguard_config::{Config, DEFAULT_PATH, Loaded, SHIPPED, keep_valid};
use bindguard_core::error_chain;

use super::change::{self, Change};

/// The planned change of the config, and the mistakes that it has now.
#[derive(Debug, Default)]
pub struct SettingsPlan {
    /// The change, if there is one.
    pub change: Option<Change>,
    /// A line for each mistake.
    pub mistakes: Vec<String>,
}

/// Plans the change that gives the node a config, with `runtime` named in it where a runtime's
/// options need that.
///
/// # Errors
/// If the present file is not TOML: bindguard would not use it.
pub fn plan(runtime: Option<&Path>) -> Result<SettingsPlan> {
    let path = Path::new(DEFAULT_PATH);
    let Some(present) = change::read(path)? else {
        let text = with_runtime(SHIPPED, runtime)?;
        return Ok(SettingsPlan {
            change: Some(Change::of(path, Some(text.into_bytes()), 0o644)?),
            mistakes: Vec::new(),
        });
    };
    let loaded = Loaded::from_file(path).map_err(|error| {
        anyhow::anyhow!("{}; correct it, then run this again", error_chain(&error))
    })?;
    let mistakes = loaded.warnings.iter().map(ToString::to_string).collect();
    let Some(runtime) = runtime.filter(|runtime| loaded.config.runtime() != *runtime) else {
        return Ok(SettingsPlan {
            change: None,
            mistakes,
        });
    };
    ensure!(
        !loaded.set.contains(&RUNTIME_KEY),
        "{DEFAULT_PATH} has to say [runtime] path = \"{}\", because that is what creates containers now: nothing was changed",
        runtime.display()
    );
    let text = String::from_utf8(present).with_context(|| format!("read {DEFAULT_PATH}"))?;
    let text = with_runtime(&text, Some(runtime))?;
    Ok(SettingsPlan {
        change: Some(Change::of(path, Some(text.into_bytes()), 0o644)?),
        mistakes,
    })
}

/// Keeps the config for a time in which an edit has broken it.
pub fn keep() -> Result<()> {
    keep_valid().map_err(|error| anyhow::anyhow!(error_chain(&error)))
}

const RUNTIME_KEY: &str = "runtime.path";

/// The text with the runtime's path: before the first table, so that a table can be appended to the
/// file.
fn with_runtime(text: &str, runtime: Option<&Path>) -> Result<String> {
    let Some(runtime) = runtime else {
        return Ok(text.to_owned());
    };
    let line = format!(
        "{RUNTIME_KEY} = {}\n",
        toml::Value::String(runtime.display().to_string())
    );
    let header = text
        .lines()
        .position(|line| line.trim_start().starts_with("[runtime]"));
    let (at, line) = match header {
        Some(header) => (header + 1, line.replacen("runtime.", "", 1)),
        None => (
            text.lines()
                .take_while(|line| line.starts_with('#'))
                .count(),
            format!("\n{line}"),
        ),
    };
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    lines.insert(at.min(lines.len()), &line);
    let text = lines.concat();
    let config = Config::from_toml(&text).context("parse the config to write")?;
    ensure!(
        config.runtime() == runtime,
        "the config has no place for the runtime's path"
    );
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn a_table_can_be_appended_to_a_file_with_the_runtime() {
        for text in [
            SHIPPED,
            "",
            "[checks]\nhost-root = \"off\"\n",
            "[runtime]\n# mine\n",
            "# a",
        ] {
            let with = with_runtime(text, Some(Path::new("/usr/bin/crun"))).unwrap();
            let appended = format!("{with}\n[journal]\nenabled = false\n");
            let config = Config::from_toml(&appended).unwrap();
            assert!(
                config.runtime() == Path::new("/usr/bin/crun") && config.journal().is_none(),
                "{appended}"
            );
            assert!(
                text.lines()
                    .all(|line| with.lines().any(|kept| kept == line)),
                "{with}"
            );
        }
    }
}
