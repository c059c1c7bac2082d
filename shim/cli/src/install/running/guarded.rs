//! The runtimes of a running daemon that call the guard, by its active configuration.

use std::path::Path;

use anyhow::Result;
use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use serde::Serialize;
use serde_json::Value;

use super::{Daemon, containerds, cri_status, crio_config, docker_info};

/// A running daemon and those of its runtimes that call the guard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GuardedRuntimes {
    /// `containerd`, `dockerd` or `crio`.
    pub daemon: &'static str,
    /// The names of the runtimes.
    pub runtimes: Vec<String>,
    /// True if one of them is the default.
    pub default: bool,
}

/// The running daemons; an error for each that does not report its configuration.
pub fn guarded_runtimes() -> Vec<Result<GuardedRuntimes>> {
    let containerds = containerds();
    let of_containerd = containerds.iter().filter_map(|containerd| {
        let config = cri_status::active_config(containerd).transpose()?;
        Some(config.map(|config| of("containerd", &config["containerd"], "runtimes", "defaultRuntimeName")))
    });
    let of_docker = Daemon::named("dockerd")
        .into_iter()
        .map(|_| docker_info().map(|info| of("dockerd", &info, "Runtimes", "DefaultRuntime")));
    let of_crio = Daemon::named("crio").into_iter().map(|_| {
        let config = serde_json::to_value(crio_config()?)?;
        Ok(of("crio", &config["crio"]["runtime"], "runtimes", "default_runtime"))
    });
    of_containerd.chain(of_docker).chain(of_crio).collect()
}

fn of(daemon: &'static str, config: &Value, runtimes: &str, default: &str) -> GuardedRuntimes {
    let entries = config[runtimes].as_object().into_iter().flatten();
    let names: Vec<String> = entries.filter(|(_, entry)| calls_guard(entry)).map(|(name, _)| name.clone()).collect();
    let default = config[default].as_str().is_some_and(|default| names.iter().any(|name| name == default));
    GuardedRuntimes { daemon, runtimes: names, default }
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
        let config = json!({ "defaultRuntimeName": "wrapped", "runtimes": {
            "path": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "/b/containerd-shim-bindguard-v2" },
            "runc": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "" },
            "typed": { "runtimeType": "io.containerd.bindguard.v2" },
            "wrapped": { "runtimeType": "io.containerd.runc.v2", "options": { "BinaryName": "/b/bindguard-runtime" } },
        } });
        let found = of("containerd", &config, "runtimes", "defaultRuntimeName");
        assert_eq!(found.runtimes, ["path", "typed", "wrapped"]);
        assert!(found.default);
        assert!(!of("containerd", &json!({ "runtimes": {} }), "runtimes", "defaultRuntimeName").default);
    }
}
