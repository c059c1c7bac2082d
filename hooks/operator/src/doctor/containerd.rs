//! Checks containerd's effective runtimes: a runtime must use bindguard, and this containerd must
//! support the runtime's settings.

use std::path::Path;

use bindguard_core::program_names::{SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use serde::Serialize;
use serde_json::Value;

use super::Check;
use crate::doctor::kernel::known_fault;
use crate::pods::PodsOfVersion;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerdSeen {
    /// Its version, such as `1.7.24`.
    pub version: String,
    /// The runtimes of `containerd config dump`.
    pub runtimes: Vec<RuntimeEntry>,
    /// The runtime of pods without a RuntimeClass.
    pub default_runtime: String,
    /// The pods that run now.
    pub pods: RunningPods,
    /// The reasons why bindguard's runtimes, or the default, start no container.
    pub unusable: Vec<String>,
}

/// Running pods, by the shim under which they were created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunningPods {
    pub all: usize,
    /// The pods whose creates run no guard.
    pub unguarded: usize,
}

impl RunningPods {
    /// The sentence about pods that an installation does not reach; empty if there are none.
    /// `is_default`: new pods run under bindguard without a RuntimeClass.
    pub fn not_reached(self, is_default: bool) -> String {
        match self.unguarded {
            0 => String::new(),
            unguarded if !is_default => format!(
                "; {unguarded} of {} running pods do not select it: bindguard repair reaches them",
                self.all
            ),
            unguarded => format!(
                "; {unguarded} of {} running pods keep another shim until they are created anew, also for containers that restart: delete them, or use bindguard repair",
                self.all
            ),
        }
    }
}

/// A runtime of containerd's CRI plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeEntry {
    pub name: String,
    pub runtime_type: String,
    pub runtime_path: String,
    /// `options.BinaryName`
    pub binary_name: String,
    /// `options.SystemdCgroup`
    pub systemd_cgroup: bool,
}

impl RuntimeEntry {
    /// True if this runtime runs the guard.
    pub fn calls_guard(&self) -> bool {
        let names = |path: &str, name: &str| path.rsplit('/').next() == Some(name);
        self.is_by_type() || names(&self.runtime_path, SHIM) || names(&self.binary_name, WRAPPER)
    }

    fn is_by_type(&self) -> bool {
        self.runtime_type.contains("bindguard")
    }
}

/// The point for containerd. `Ok(None)`: none runs here; `Err`: why containerd could not be
/// queried.
pub fn containerd(seen: Result<Option<&ContainerdSeen>, &str>) -> Check {
    let seen = match seen {
        Ok(Some(seen)) => seen,
        Ok(None) => return Check::ok("none runs here"),
        Err(why) => return Check::unknown(why),
    };
    let (mut guarded, mut others) = (Vec::new(), Vec::new());
    for entry in &seen.runtimes {
        if entry.calls_guard() {
            guarded.push(entry);
        } else if matches!(&*entry.runtime_type, "" | "io.containerd.runc.v2") {
            others.push(entry);
        }
    }
    let version = &seen.version;
    let problem = if guarded.is_empty() {
        Some(format!(
            "containerd {version} has no runtime of bindguard's: no pod is guarded"
        ))
    } else if let Some(why) = seen.unusable.first() {
        Some(format!(
            "containerd {version} cannot start containers: {why}"
        ))
    } else {
        other_cgroup_driver(&guarded, &others)
    };
    if let Some(problem) = problem {
        return Check::failed(problem, "bindguard install --dry-run");
    }
    let names: Vec<&str> = guarded.iter().map(|entry| entry.name.as_str()).collect();
    let is_default = names.contains(&seen.default_runtime.as_str());
    let default = if is_default {
        ", for every new pod"
    } else {
        ", for new pods that select it"
    };
    let not_reached = seen.pods.not_reached(is_default);
    let names = names.join(", ");
    Check::ok(format!(
        "containerd {version}: bindguard is the runtime {names}{default}{not_reached}"
    ))
}

/// Finds a bindguard runtime whose cgroup driver differs from every other runtime of runc's kind:
/// `install` copies bindguard's runtime from a runtime of runc's kind. A runtime of bindguard's own
/// type needs no check: the shim detects the driver from the form of the cgroup's path.
fn other_cgroup_driver(guarded: &[&RuntimeEntry], others: &[&RuntimeEntry]) -> Option<String> {
    let runc = others.iter().find(|entry| entry.name == "runc");
    let usual = runc.or(others.first())?;
    let entry = guarded.iter().find(|entry| {
        let differs = |other: &&RuntimeEntry| other.systemd_cgroup != entry.systemd_cgroup;
        !entry.is_by_type() && others.iter().all(differs)
    })?;
    Some(format!(
        "SystemdCgroup is {} for {} and {} for {}: its pods get another cgroup driver than the kubelet expects",
        usual.systemd_cgroup, usual.name, entry.systemd_cgroup, entry.name
    ))
}

// Checks that the programs of bindguard and the OCI runtime exist, and that bindguard's programs
// have the same version. A runtime with a known fault is named.

/// A program as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramSeen {
    pub name: String,
    /// The program's path and reported version; `None`: not found.
    pub found: Option<(String, String)>,
}

/// The point for the programs. `ours`: the programs of bindguard, all expected to have `version`;
/// `runtime`: runc, or the runtime that the config names; `kernel`: the kernel's release. `pods`:
/// the pods under bindguard's shim. A pod under another version is no fault: a pod keeps its shim
/// until the pod is created anew.
pub fn programs(
    version: &str,
    ours: &[ProgramSeen],
    runtime: &ProgramSeen,
    kernel: &str,
    pods: &[PodsOfVersion],
) -> Check {
    let Some((path, found)) = &runtime.found else {
        let message = format!(
            "the OCI runtime {} is not found: no container can be created",
            runtime.name
        );
        return Check::failed(message, "bindguard config show");
    };
    let (mut missing, mut other) = (Vec::new(), None);
    for program in ours {
        match &program.found {
            None => missing.push(program.name.as_str()),
            Some((path, found)) if !found.is_empty() && !found.contains(version) => {
                other = other.or(Some((path, found)));
            }
            Some(_) => {}
        }
    }
    let mut problem = None;
    if !missing.is_empty() {
        let missing = missing.join(", ");
        problem = Some(format!("{missing} not found in any folder of programs"));
    } else if let Some((path, found)) = other {
        problem = Some(format!(
            "{path} is {found}, and this bindguard is {version}"
        ));
    }
    if let Some(problem) = problem {
        return Check::failed(problem, "bindguard install --dry-run");
    }
    if let Some(fault) = known_fault(found, kernel) {
        let command = format!("{path} --version");
        return Check::failed(format!("{path}: {fault}"), command);
    }
    let mut message = format!("bindguard {version}, and {path}: {found}");
    if !pods.is_empty() {
        let pods: Vec<String> = pods.iter().map(PodsOfVersion::summary).collect();
        message.push_str(&format!("; pods: {}", pods.join("; ")));
    }
    Check::ok(message)
}

// The runtimes of a daemon that call the guard, by the active configuration as JSON.

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
    use super::super::PointStatus;
    use super::*;

    #[test]
    fn only_the_default_reaches_pods_that_are_created_anew() {
        let pods = RunningPods {
            all: 3,
            unguarded: 2,
        };
        assert!(
            pods.not_reached(true)
                .contains("until they are created anew")
        );
        let selected = pods.not_reached(false);
        assert!(
            selected.contains("2 of 3 running pods do not select it") && !selected.contains("anew"),
            "{selected}"
        );
    }

    fn seen(version: &str, entry: RuntimeEntry) -> ContainerdSeen {
        ContainerdSeen {
            version: version.to_owned(),
            runtimes: vec![entry],
            default_runtime: "runc".to_owned(),
            pods: RunningPods::default(),
            unusable: Vec::new(),
        }
    }

    #[test]
    fn each_way_into_the_guard_counts() {
        let entry = RuntimeEntry {
            name: "bindguard".to_owned(),
            runtime_type: "io.containerd.runc.v2".to_owned(),
            runtime_path: "/usr/local/bin/containerd-shim-bindguard-v2".to_owned(),
            binary_name: String::new(),
            systemd_cgroup: false,
        };
        for version in ["1.7.24", "2.1.9"] {
            let status = containerd(Ok(Some(&seen(version, entry.clone())))).status;
            assert_eq!(status, PointStatus::Ok, "{version}");
        }
        let noexec = ContainerdSeen {
            unusable: vec!["/opt/x: Permission denied".to_owned()],
            ..seen("2.1.9", entry.clone())
        };
        assert_eq!(containerd(Ok(Some(&noexec))).status, PointStatus::Failed);
        let plain = RuntimeEntry {
            runtime_path: String::new(),
            ..entry
        };
        assert_eq!(
            containerd(Ok(Some(&seen("2.1.9", plain.clone())))).status,
            PointStatus::Failed
        );
        let wrapper = RuntimeEntry {
            binary_name: "/opt/bindguard-runtime".to_owned(),
            ..plain
        };
        assert_eq!(
            containerd(Ok(Some(&seen("2.1.9", wrapper)))).status,
            PointStatus::Ok
        );
        assert_eq!(containerd(Err("no")).status, PointStatus::Unknown);
    }

    #[test]
    fn the_cgroup_driver_is_runcs() {
        let runc = RuntimeEntry {
            name: "runc".to_owned(),
            systemd_cgroup: true,
            ..RuntimeEntry::default()
        };
        let entry = |systemd_cgroup| RuntimeEntry {
            name: "bindguard".to_owned(),
            runtime_path: "/bin/containerd-shim-bindguard-v2".to_owned(),
            systemd_cgroup,
            ..RuntimeEntry::default()
        };
        let gpu = RuntimeEntry {
            name: "nvidia".to_owned(),
            ..RuntimeEntry::default()
        };
        for (systemd_cgroup, more, state) in [
            (true, None, PointStatus::Ok),
            (false, None, PointStatus::Failed),
            (false, Some(gpu), PointStatus::Ok),
        ] {
            let runtimes = [runc.clone(), entry(systemd_cgroup)]
                .into_iter()
                .chain(more)
                .collect();
            let seen = ContainerdSeen {
                runtimes,
                ..seen("2.1.9", runc.clone())
            };
            assert_eq!(containerd(Ok(Some(&seen))).status, state);
        }
    }
}

#[cfg(test)]
mod programs_tests {
    use super::super::PointStatus;
    use super::*;

    fn seen(name: &str, found: Option<&str>) -> ProgramSeen {
        ProgramSeen {
            name: name.to_owned(),
            found: found.map(|message| (format!("/bin/{name}"), message.to_owned())),
        }
    }

    #[test]
    fn a_missing_program_or_another_version_is_bad() {
        let runc = seen("runc", Some("runc version 1.1.5"));
        let programs = |version: &str, ours: &[ProgramSeen], runtime: &ProgramSeen| {
            programs(version, ours, runtime, "6.12.0", &[])
        };
        let crun = seen("crun", Some("crun version 1.27"));
        assert_eq!(programs("0.2.0", &[], &crun).status, PointStatus::Failed);
        assert_eq!(
            programs("0.2.0", &[seen("shim", Some("shim 0.2.0"))], &runc).status,
            PointStatus::Ok
        );
        assert_eq!(
            programs("0.2.0", &[seen("shim", Some("shim 0.0.9"))], &runc).status,
            PointStatus::Failed
        );
        assert_eq!(
            programs("0.2.0", &[seen("shim", None)], &runc).status,
            PointStatus::Failed
        );
        assert!(
            programs("0.2.0", &[], &seen("runc", None))
                .message
                .contains("runc is not found")
        );
    }
}

#[cfg(test)]
mod guarded_tests {
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
