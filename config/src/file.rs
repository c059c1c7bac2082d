//! The file's own shape: tables, keys and their kinds.

use std::path::PathBuf;
use std::time::Duration;

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
    failed_repairs: OnFailure,
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
    stale_subpaths: Choice,
    host_root: Choice,
    unmounted_volumes: Warn,
    dead_sources: Warn,
    vanished_directories: Lost,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct HostRoot {
    scope: Reach,
    read_only: ReadOnly,
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

impl TryFrom<PathBuf> for Absolute {
    type Error = String;

    fn try_from(path: PathBuf) -> Result<Self, String> {
        if path.is_absolute() {
            Ok(Self(path))
        } else {
            Err(format!("{path:?} is no path from the root, expected \"/...\""))
        }
    }
}

fn paths(absolute: Vec<Absolute>) -> impl Iterator<Item = PathBuf> {
    absolute.into_iter().map(|Absolute(path)| path)
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Choice {
    #[default]
    Repair,
    Report,
    Off,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Warn {
    #[default]
    Report,
    Refuse,
    Off,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Lost {
    #[default]
    Leave,
    Remake,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum OnFailure {
    #[default]
    Pass,
    Refuse,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reach {
    HostRoot,
    #[default]
    RuntimeDirs,
    AnySubmounts,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ReadOnly {
    #[default]
    Rslave,
    Keep,
}

impl Warn {
    fn into_alarm(self) -> Alarm {
        match self {
            Self::Report => Alarm::Report,
            Self::Refuse => Alarm::Refuse,
            Self::Off => Alarm::Off,
        }
    }
}

impl Choice {
    fn into_mode(self) -> Mode {
        match self {
            Self::Repair => Mode::Repair,
            Self::Report => Mode::Report,
            Self::Off => Mode::Off,
        }
    }
}

impl File {
    pub(crate) fn into_config(self) -> Config {
        let defaults = Policy::default();
        let mut runtime_directories = defaults.runtime_directories;
        runtime_directories.extend(paths(self.host_root.extra_directories));
        Config {
            agent: self.agent.with(&self.refresh),
            deadline: Duration::from_millis(self.guard.deadline_ms.unwrap_or(DEADLINE_MS)),
            runtime: self.runtime.path.unwrap_or_else(|| "runc".into()),
            journal: self
                .journal
                .enabled
                .then(|| self.journal.path.map_or_else(|| JOURNAL.into(), |Absolute(path)| path)),
            policy: Policy {
                stale_subpaths: self.checks.stale_subpaths.into_mode(),
                host_root: self.checks.host_root.into_mode(),
                host_root_scope: match self.host_root.scope {
                    Reach::HostRoot => Scope::HostRoot,
                    Reach::RuntimeDirs => Scope::RuntimeDirectories,
                    Reach::AnySubmounts => Scope::AnySubmounts,
                },
                read_only_binds: match self.host_root.read_only {
                    ReadOnly::Rslave => ReadOnlyBinds::MakeRslave,
                    ReadOnly::Keep => ReadOnlyBinds::Keep,
                },
                vanished_directories: match self.checks.vanished_directories {
                    Lost::Leave => Vanished::Leave,
                    Lost::Remake => Vanished::Remake,
                },
                failed_repairs: match self.guard.failed_repairs {
                    OnFailure::Pass => FailedRepair::Pass,
                    OnFailure::Refuse => FailedRepair::Refuse,
                },
                unmounted_volumes: self.checks.unmounted_volumes.into_alarm(),
                dead_sources: self.checks.dead_sources.into_alarm(),
                pods_may: PodsMay { set_mode: self.annotations.mode, set_propagation: self.annotations.propagation },
                kubelet_roots: self.kubelet.roots.map_or(defaults.kubelet_roots, |roots| paths(roots).collect()),
                runtime_directories,
            },
        }
    }
}
