//! bindguard's own config on the node: installs the commented default if there is no config, and
//! keeps a copy of a valid config.
//!
//! Some runtimes cannot pass on the OCI runtime that their own options name. Then `runtime.path`
//! must name the OCI runtime. Otherwise a different runtime than before would create the
//! containers.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_config::{Config, DEFAULT_PATH, Loaded, SHIPPED};
use bindguard_core::error_chain;
use bindguard_operator::root_program::open_of_root;

use crate::change::{self, Change, Content, Owner};
use crate::config_text::with_value;
use crate::record::{self, Record, USUAL_RUNTIME};
use crate::running::is_gone;

/// The config that every node of a fleet gets.
#[derive(Debug)]
pub struct NodeConfig {
    text: String,
    /// Replaces a file that was edited on the node.
    is_forced: bool,
}

impl NodeConfig {
    /// Reads and checks it, before the root is changed.
    ///
    /// # Errors
    /// If it cannot be read, or is not TOML.
    pub fn read(file: &Path, is_forced: bool) -> Result<Self> {
        let (text, file) = (change::read_text(file)?, file.display());
        let text = text.with_context(|| format!("read {file}: no such file"))?;
        Config::parse(&text).map_err(|mistake| {
            let line = mistake.line;
            anyhow!("parse {file}, line {line}: {mistake}; nothing was changed")
        })?;
        Ok(Self { text, is_forced })
    }
}

/// The planned change of the config, and the mistakes that it has.
#[derive(Debug, Default)]
pub struct SettingsPlan {
    /// The change of the config file, if its content differs.
    pub change: Option<Change>,
    /// A line for each mistake.
    pub mistakes: Vec<String>,
    /// The hash of the config that the node is to have.
    pub wanted: Option<String>,
    /// Why the node keeps a config that differs.
    pub kept: Option<String>,
}

/// Plans the change that gives the node a config, with `runtime` named in it where a runtime's
/// options need that. `None`: every runtime passes its own.
///
/// # Errors
/// If the present file is not TOML: bindguard would not use it.
pub fn plan(
    runtime: Option<&Path>,
    node_config: Option<&NodeConfig>,
    record: &Record,
) -> Result<SettingsPlan> {
    let path = Path::new(DEFAULT_PATH);
    // its `runtime.path` is a program that root runs
    open_of_root(path).context("read the config")?;
    let present = change::read(path)?;
    let unusual = runtime.filter(|runtime| *runtime != Path::new(USUAL_RUNTIME));
    match (node_config, present) {
        (Some(config), present) => of_the_fleet(config, present, unusual, record),
        (None, None) => written(with_runtime(SHIPPED, unusual)?),
        (None, Some(present)) => of_the_node(present, runtime),
    }
}

/// The config of the fleet. A file that was edited on this node is replaced only on request, and none
/// is replaced by a text with a mistake.
fn of_the_fleet(
    config: &NodeConfig,
    present: Option<Vec<u8>>,
    runtime: Option<&Path>,
    record: &Record,
) -> Result<SettingsPlan> {
    let (parsed, warnings) = Config::parse(&config.text)?;
    let names_another = runtime.filter(|runtime| parsed.runtime() != *runtime);
    let text = with_runtime(&config.text, names_another)
        .context("the config of the fleet names another runtime than creates containers now")?;
    let hash = record::hash(text.as_bytes());
    let mistakes: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    // After a rollback: the newer version knew every key.
    let was_valid = record.node_config.as_ref() == Some(&hash);
    if !mistakes.is_empty() && !was_valid {
        let mut plan = match (present, runtime) {
            // The defaults would repair. With a mistake the text repairs nothing.
            (None, _) => written(text)?,
            (Some(present), Some(runtime)) => of_the_node(present, Some(runtime))?,
            (Some(_), None) => SettingsPlan::default(),
        };
        plan.wanted = record.node_config.clone();
        plan.kept = Some(format!(
            "the config of the fleet has a mistake, and this node keeps its {DEFAULT_PATH}: {}; correct the config, or install a version that knows the key",
            mistakes.join("; ")
        ));
        return Ok(plan);
    }
    let mut plan = SettingsPlan::default();
    let entry = record.entry(&change::resolved(Path::new(DEFAULT_PATH)));
    match present {
        Some(present) if present == text.as_bytes() => {}
        Some(present)
            if !config.is_forced
                && present != SHIPPED.as_bytes()
                && !entry.is_some_and(|it| it.is_as_written(&Content::File(present.clone()))) =>
        {
            plan.kept = Some(format!(
                "{DEFAULT_PATH} was edited on this node and stays; to replace the file, use --force-node-config"
            ));
        }
        _ => plan = written(text)?,
    }
    plan.wanted = Some(hash);
    for mistake in mistakes {
        plan.mistakes
            .push(format!("the config of the fleet, {mistake}"));
    }
    Ok(plan)
}

fn of_the_node(present: Vec<u8>, runtime: Option<&Path>) -> Result<SettingsPlan> {
    let loaded = Loaded::from_file(Path::new(DEFAULT_PATH))
        .map_err(|error| anyhow!("{}; correct it, then run this again", error_chain(&error)))?;
    let mut plan = SettingsPlan::default();
    let named = loaded.config.runtime();
    let mut mistakes: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    if let Some(runtime) = runtime.filter(|runtime| named != *runtime) {
        let text = String::from_utf8(present).with_context(|| format!("read {DEFAULT_PATH}"))?;
        if !loaded.set.contains(&RUNTIME_KEY) {
            plan = written(with_runtime(&text, Some(runtime))?)?;
        } else if named.is_absolute() && is_gone(named) {
            // an earlier install named the runtime behind the default, and that is gone
            let (named, new) = (named.display(), runtime.display());
            mistakes.push(format!(
                "{DEFAULT_PATH} names {named}, which cannot be run: {new} takes its place"
            ));
            plan = written(with_path(&text, runtime)?)?;
        } else {
            ensure!(
                runtime == Path::new(USUAL_RUNTIME),
                "{DEFAULT_PATH} has to say [runtime] path = \"{}\", because that is what creates containers now: nothing was changed",
                runtime.display()
            );
        }
    }
    plan.mistakes = mistakes;
    Ok(plan)
}

fn written(text: String) -> Result<SettingsPlan> {
    let path = Path::new(DEFAULT_PATH);
    let change = Change::text(Owner::Bindguard, path, text)?;
    Ok(SettingsPlan {
        change: Some(change),
        ..SettingsPlan::default()
    })
}

/// The key of the OCI runtime that bindguard-runtime calls.
pub const RUNTIME_KEY: &str = "runtime.path";

/// The text with the runtime's path.
fn with_runtime(text: &str, runtime: Option<&Path>) -> Result<String> {
    let Some(runtime) = runtime else {
        return Ok(text.to_owned());
    };
    let present: toml::Table = toml::from_str(text)?;
    let named = present.get("runtime").and_then(|table| table.get("path"));
    ensure!(
        named.is_none(),
        "[runtime] path has to be \"{}\"",
        runtime.display()
    );
    let text = with_path(text, runtime)?;
    let config = Config::from_toml(&text).context("parse the config to write")?;
    ensure!(
        config.runtime() == runtime,
        "the config has no place for the runtime's path"
    );
    Ok(text)
}

fn with_path(text: &str, runtime: &Path) -> Result<String> {
    let literal = toml::Value::from(runtime.display().to_string()).to_string();
    with_value(text, &["runtime", "path"], &literal)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_with_the_runtime_takes_another_key() {
        for text in [
            SHIPPED,
            "",
            "[checks]\nhost-root = \"off\"\n",
            "[runtime]\n# mine\n",
            "[runtime]",
            "[ runtime ] # mine\n",
            "# a",
        ] {
            let with = with_runtime(text, Some(Path::new("/usr/bin/crun"))).unwrap();
            let set = if text == SHIPPED {
                with.replace("\n# enabled = true\n", "\nenabled = false\n")
            } else {
                format!("{with}\n[journal]\nenabled = false\n")
            };
            let config = Config::from_toml(&set).unwrap();
            assert!(
                config.runtime() == Path::new("/usr/bin/crun") && config.journal().is_none(),
                "{set}"
            );
            assert!(
                text.lines()
                    .all(|line| with.lines().any(|kept| kept == line)),
                "{with}"
            );
        }
    }

    /// The defaults would repair, and an older file may.
    #[test]
    fn a_mistake_in_the_config_of_the_fleet_keeps_the_nodes_config() {
        let mistaken = "[checks]\nstale-subpath = \"report\"\n";
        let config = NodeConfig {
            text: mistaken.to_owned(),
            is_forced: true,
        };
        let plan = |present: Option<&str>, record: serde_json::Value| {
            let record = serde_json::from_value(record).unwrap();
            of_the_fleet(&config, present.map(Into::into), None, &record).unwrap()
        };
        let installed =
            json!({ "version": 1, "files": [], "node_config": "hash of the old config" });
        let kept = plan(Some(SHIPPED), installed.clone());
        assert!(kept.change.is_none() && kept.wanted.as_deref() == Some("hash of the old config"));
        let sentence = kept.kept.unwrap();
        assert!(
            sentence.contains("line 2: unknown key `checks.stale-subpath`"),
            "{sentence}"
        );

        let first = plan(None, json!({ "version": 1, "files": [] }));
        let written = first.change.unwrap().after;
        assert_eq!(written, Some(Content::File(mistaken.into())));
        assert!(first.kept.is_some() && first.wanted.is_none());
        assert!(plan(Some(mistaken), installed).kept.is_some());

        // a newer version knew the key, and was rolled back
        let hash = record::hash(mistaken.as_bytes());
        let back = plan(
            Some(mistaken),
            json!({ "version": 1, "files": [], "node_config": hash }),
        );
        assert!(back.kept.is_none() && back.change.is_none() && !back.mistakes.is_empty());
    }

    #[test]
    fn a_runtime_that_the_text_names_stays() {
        let crun = Some(Path::new("/usr/bin/crun"));
        assert!(with_runtime("[runtime]\npath = \"runc\"\n", crun).is_err());
        let inline = with_runtime("runtime = {}\n", crun).unwrap();
        assert_eq!(inline, "runtime = { path = \"/usr/bin/crun\" }\n");
    }
}
