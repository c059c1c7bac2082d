//! containerd's effective configuration, from `containerd config dump`: imports and defaults are
//! included.

use anyhow::Context;
use bindguard_installer::running::{Daemon, containerds, is_hidden};
use bindguard_operator::doctor::{self, ContainerdSeen, Point, RuntimeEntry};
use bindguard_operator::pods::Pods;
use bindguard_operator::root_program::RootProgram;
use toml::{Table, Value};

use crate::pods::running_pods;

/// The CRI plugin's tables: of version 2, and of version 3 of the config.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The point on containerd. `pods`: those that run.
pub fn point(pods: &Pods) -> Point {
    let found = containerds();
    if found.is_empty() && is_hidden("containerd") {
        return doctor::containerd(Err(
            "a containerd runs, and only root may read its arguments: run this as root",
        ));
    }
    match found
        .first()
        .map(|containerd| seen(containerd, pods))
        .transpose()
    {
        Ok(seen) => doctor::containerd(Ok(seen.as_ref())),
        Err(error) => doctor::containerd(Err(&format!("{error:#}"))),
    }
}

fn seen(containerd: &Daemon, pods: &Pods) -> anyhow::Result<ContainerdSeen> {
    let program = containerd
        .program()
        .context("read which program containerd is")?;
    let program = RootProgram::open(&program)?
        .with_context(|| format!("run {}: no such file", program.display()))?;
    let version = program.output(&["--version"])?;
    let mut words = vec!["config", "dump"];
    let path = containerd.config().map(|path| path.display().to_string());
    if let Some(path) = &path {
        words.splice(0..0, ["--config", path.as_str()]);
    }
    let dump = program.output(&words)?;
    let table: Table = dump
        .parse()
        .context("parse the output of `containerd config dump`")?;
    let (runtimes, default_runtime) = runtimes(&table);
    let mut reasons = Vec::new();
    for entry in &runtimes {
        if entry.name == default_runtime || entry.calls_guard() {
            reasons.extend(unusable(&entry.runtime_path));
            reasons.extend(unusable(&entry.binary_name));
        }
    }
    let is_default = |entry: &RuntimeEntry| entry.name == default_runtime;
    if !runtimes.is_empty() && !runtimes.iter().any(is_default) {
        reasons.push(format!(
            "its default runtime {default_runtime:?} is not configured"
        ));
    }
    Ok(ContainerdSeen {
        version: number(&version),
        runtimes,
        default_runtime,
        pods: running_pods(pods),
        unusable: reasons,
    })
}

/// Why a program cannot be run. The kernel refuses this access also on a file system that is
/// mounted noexec.
fn unusable(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        return None;
    }
    let error = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).err()?;
    Some(format!("{path}: {}", std::io::Error::from(error)))
}

/// `containerd github.com/containerd/containerd 1.7.24 ...`: the word that begins with a digit,
/// without a `v`.
fn number(version: &str) -> String {
    let words = version
        .split_whitespace()
        .map(|word| word.trim_start_matches('v'));
    let number = words
        .into_iter()
        .find(|word| word.starts_with(|first: char| first.is_ascii_digit()));
    number
        .unwrap_or("of unknown version")
        .split(['~', '+'])
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn runtimes(table: &Table) -> (Vec<RuntimeEntry>, String) {
    let plugins = table.get("plugins");
    let containerd = PLUGINS
        .iter()
        .find_map(|plugin| plugins?.get(plugin)?.get("containerd"));
    let Some(containerd) = containerd else {
        return (Vec::new(), String::new());
    };
    let word = |value: &Value, key: &str| {
        value
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let entries = containerd
        .get("runtimes")
        .and_then(Value::as_table)
        .into_iter()
        .flatten();
    let entries = entries.map(|(name, entry)| RuntimeEntry {
        name: name.clone(),
        runtime_type: word(entry, "runtime_type"),
        runtime_path: word(entry, "runtime_path"),
        binary_name: entry
            .get("options")
            .map(|options| word(options, "BinaryName"))
            .unwrap_or_default(),
        systemd_cgroup: entry
            .get("options")
            .and_then(|options| options.get("SystemdCgroup")?.as_bool())
            .unwrap_or(false),
    });
    (entries.collect(), word(containerd, "default_runtime_name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_the_config_are_read() {
        for plugin in PLUGINS {
            let text = format!(
                "[plugins.\"{plugin}\".containerd]\ndefault_runtime_name = \"runc\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.x]\nruntime_type = \"t\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.x.options]\nBinaryName = \"b\"\n"
            );
            let (entries, default) = runtimes(&text.parse().unwrap());
            assert_eq!(
                (
                    entries[0].name.as_str(),
                    entries[0].binary_name.as_str(),
                    default.as_str()
                ),
                ("x", "b", "runc")
            );
        }
    }

    #[test]
    fn versions_are_found() {
        assert_eq!(
            number("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1"),
            "1.6.20"
        );
        assert_eq!(
            number("containerd github.com/containerd/containerd/v2 v2.1.9 abc"),
            "2.1.9"
        );
    }
}
