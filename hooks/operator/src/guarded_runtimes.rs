//! The runtimes of a daemon that call the guard, by the daemon's active configuration as JSON.

use std::path::Path;

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use serde::Serialize;
use serde_json::Value;

/// A running daemon and its runtimes that call the guard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GuardedRuntimes {
    /// `containerd`, `dockerd` or `crio`.
    pub daemon: &'static str,
    /// The names of the runtimes.
    pub runtimes: Vec<String>,
    /// True if the default runtime calls the guard.
    pub default: bool,
}

impl GuardedRuntimes {
    /// By the configuration that containerd's CRI plugin reports: `config` in the answer to
    /// `Status` with `verbose`.
    pub fn of_containerd(config: &Value) -> Self {
        Self::from_config(
            "containerd",
            &config["containerd"],
            "runtimes",
            "defaultRuntimeName",
        )
    }

    /// `runtimes` and `default` are the names of the members with the runtimes and with the name of
    /// the default runtime.
    pub fn from_config(
        daemon: &'static str,
        config: &Value,
        runtimes: &str,
        default: &str,
    ) -> Self {
        let entries = config[runtimes].as_object().into_iter().flatten();
        let names: Vec<String> = entries
            .filter(|(_, entry)| calls_guard(entry))
            .map(|(name, _)| name.clone())
            .collect();
        let default = config[default]
            .as_str()
            .is_some_and(|default| names.iter().any(|name| name == default));
        Self {
            daemon,
            runtimes: names,
            default,
        }
    }
}

fn calls_guard(entry: &Value) -> bool {
    match entry {
        Value::String(text) => {
            let name = Path::new(text).file_name();
            text == SHIM_RUNTIME_TYPE || name.is_some_and(|name| name == SHIM || name == WRAPPER)
        }
        Value::Object(members) => members.values().any(calls_guard),
        Value::Array(items) => items.iter().any(calls_guard),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_way_into_the_guard_is_found() {
        let config = json!({ "containerd": { "defaultRuntimeName": "wrapped", "runtimes": {
            "path": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "/b/containerd-shim-bindguard-v2" },
            "runc": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "" },
            "typed": { "runtimeType": "io.containerd.bindguard.v2" },
            "wrapped": { "runtimeType": "io.containerd.runc.v2", "options": { "BinaryName": "/b/bindguard-runtime" } },
        } } });
        let found = GuardedRuntimes::of_containerd(&config);
        assert_eq!(found.runtimes, ["path", "typed", "wrapped"]);
        assert!(found.default);
        assert!(!GuardedRuntimes::of_containerd(&json!({ "containerd": {} })).default);
    }
}
