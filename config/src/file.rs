//! The file's own shape: tables, keys and their kinds.

use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, FailedRepair, Mode, PodsMay, Policy, ReadOnlyBinds, Scope, Vanished};
use serde::Deserialize;

use crate::Config;
use crate::agent::{Agent, Refresh};

const DEADLINE_MS: u64 = 2_000;
const JOURNAL: &str = "/run/bindguard/journal.jsonl";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct File {
    guard: Guard,
    runtime: Runtime,
    kubelet: Kubelet,
    checks: Checks,
    host_root: HostRoot,
    annotations: Annotations,
    journal: Journal,
    agent: Agent,
    refresh: Refresh,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Guard {
    deadline_ms: Option<u64>,
    failed_repairs: FailedRepair,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Runtime {
    path: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Kubelet {
    roots: Option<Vec<Absolute>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Checks {
    stale_subpaths: Mode,
    host_root: Mode,
    unmounted_volumes: Alarm,
    dead_sources: Alarm,
    vanished_directories: Vanished,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct HostRoot {
    scope: Scope,
    read_only: ReadOnlyBinds,
    extra_directories: Vec<Absolute>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Annotations {
    mode: bool,
    propagation: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Journal {
    enabled: bool,
    path: Option<Absolute>,
}

impl Default for Journal {
    fn default() -> Self {
        Self { enabled: true, path: None }
    }
}

/// An absolute path. A relative one would depend on the directory from which a runtime is called, and match nothing.
#[derive(Debug, Deserialize)]
#[serde(try_from = "PathBuf")]
pub(crate) struct Absolute(pub(crate) PathBuf);

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not absolute, expected \"/...\"")]
pub(crate) struct RelativePath(PathBuf);

impl TryFrom<PathBuf> for Absolute {
    type Error = RelativePath;

    fn try_from(path: PathBuf) -> Result<Self, RelativePath> {
        if path.is_absolute() { Ok(Self(path)) } else { Err(RelativePath(path)) }
    }
}

fn paths(absolute: Vec<Absolute>) -> impl Iterator<Item = PathBuf> {
    absolute.into_iter().map(|Absolute(path)| path)
}

impl File {
    pub(crate) fn into_config(self) -> Config {
        let defaults = Places::default();
        let mut runtime_directories = defaults.runtime_directories;
        runtime_directories.extend(paths(self.host_root.extra_directories));
        let journal = self.journal.path.map_or_else(|| JOURNAL.into(), |Absolute(path)| path);
        Config {
            agent: self.agent.with(&self.refresh),
            deadline: Duration::from_millis(self.guard.deadline_ms.unwrap_or(DEADLINE_MS)),
            runtime: self.runtime.path.unwrap_or_else(|| "runc".into()),
            journal: self.journal.enabled.then_some(journal),
            policy: Policy {
                stale_subpaths: self.checks.stale_subpaths,
                host_root: self.checks.host_root,
                host_root_scope: self.host_root.scope,
                read_only_binds: self.host_root.read_only,
                vanished_directories: self.checks.vanished_directories,
                failed_repairs: self.guard.failed_repairs,
                unmounted_volumes: self.checks.unmounted_volumes,
                dead_sources: self.checks.dead_sources,
                pods_may: PodsMay { set_mode: self.annotations.mode, set_propagation: self.annotations.propagation },
            },
            places: Places {
                kubelet_roots: self.kubelet.roots.map_or(defaults.kubelet_roots, |roots| paths(roots).collect()),
                runtime_directories,
            },
        }
    }
}
