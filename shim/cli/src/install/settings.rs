//! bindguard's own config on the node: installs the commented default if there is none.
//!
//! Some doors cannot pass on the OCI runtime that the runtime's own options name. Then `runtime.path` must name it, or another
//! runtime than before would create the containers.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use bindguard_config::{Config, DEFAULT_PATH, SHIPPED};

use super::change::{self, Change};

const COMMENTED: &str = "# path = \"runc\"";

/// The change that gives the node a config, with `runtime` named in it where a door needs that.
pub fn plan(runtime: Option<&Path>) -> Result<Option<Change>> {
    let path = Path::new(DEFAULT_PATH);
    if change::read(path)?.is_some() {
        if let Some(runtime) = runtime {
            let config = Config::from_file(path)?;
            ensure!(
                config.runtime() == runtime,
                "{DEFAULT_PATH} has to say [runtime] path = \"{}\", because that is what creates containers now: nothing was changed",
                runtime.display()
            );
        }
        return Ok(None);
    }
    let text = match runtime {
        Some(runtime) => {
            SHIPPED.replace(COMMENTED, &format!("path = {}", toml::Value::String(runtime.display().to_string())))
        }
        None => SHIPPED.to_owned(),
    };
    let config = Config::from_toml(&text).context("parse the config to write")?;
    ensure!(
        runtime.is_none_or(|runtime| config.runtime() == runtime),
        "the config has no place for the runtime's path"
    );
    Change::of(path, Some(text.into_bytes()), 0o644).map(Some)
}
