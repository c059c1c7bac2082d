//! Checks that the programs of bindguard and the OCI runtime exist, and that bindguard's programs
//! have the same version. A runtime with a known fault is named.

use super::Point;
use super::runtime_faults::known_fault;
use crate::pods::PodsOfVersion;

const NAME: &str = "programs";

/// A program as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramSeen {
    /// Its name.
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
) -> Point {
    if runtime.found.is_none() {
        let message = format!(
            "the OCI runtime {} is not found: no container can be created",
            runtime.name
        );
        return Point::failed(NAME, message, "bindguard config show");
    }
    let missing: Vec<&str> = ours
        .iter()
        .filter(|it| it.found.is_none())
        .map(|it| it.name.as_str())
        .collect();
    if !missing.is_empty() {
        let words = format!("{} not found in any folder of programs", missing.join(", "));
        return Point::failed(NAME, words, "bindguard install --dry-run");
    }
    let is_other = |it: &&ProgramSeen| {
        it.found
            .as_ref()
            .is_some_and(|(_, found)| !found.is_empty() && !found.contains(version))
    };
    if let Some(other) = ours.iter().find(is_other) {
        let (path, found) = other.found.clone().unwrap_or_default();
        let words = format!("{path} is {found}, and this bindguard is {version}");
        return Point::failed(NAME, words, "bindguard install --dry-run");
    }
    let (path, found) = runtime.found.clone().unwrap_or_default();
    if let Some(fault) = known_fault(&found, kernel) {
        return Point::failed(
            NAME,
            format!("{path}: {fault}"),
            format!("{path} --version"),
        );
    }
    let mut message = format!("bindguard {version}, and {path}: {found}");
    if !pods.is_empty() {
        let pods: Vec<String> = pods.iter().map(PodsOfVersion::summary).collect();
        message.push_str(&format!("; pods: {}", pods.join("; ")));
    }
    Point::ok(NAME, message)
}

#[cfg(test)]
mod tests {
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
