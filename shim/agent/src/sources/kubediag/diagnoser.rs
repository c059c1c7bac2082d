//! subpathRemountDiagnoser: does the runtime's error name a subpath whose mount shows a deleted
//! file?
//!
//! It reads the results of both collectors and nothing else.

use serde::Deserialize;

use super::Strings;
use crate::sources::kubediag::{BUG_LINK, DIAGNOSIS, ENCOUNTERED, SOURCE, TARGET};
use bindguard_operator::node_report::ISSUE;

/// The parts of the runtime's error, in order, all in the first line of the error.
const PARTS: [&str; 5] = [
    "mounting",
    "volume-subpaths",
    "to rootfs",
    "at",
    "no such file or directory",
];

/// The mount of a subpath, as the mount table has it.
#[derive(Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The root of the mount, with the kernel's `/deleted`.
    source: String,
    target: String,
}

/// Why the pod does not have the fault.
#[derive(Debug, thiserror::Error)]
pub enum NotDiagnosed {
    #[error("parse the pod of {}", super::POD_DETAIL)]
    Pod(#[from] serde_json::Error),
    #[error("no container of the pod mounts a subPath of a configMap or secret")]
    NoSubPath,
    #[error("no container that is not ready has the error of a subPath that cannot be mounted")]
    OtherError,
    #[error("the error of the container names no source")]
    NoSource,
    #[error("the mount table has no mount of {0} that shows a deleted file")]
    NotDeleted(String),
}

impl From<Diagnosis> for Strings {
    fn from(Diagnosis { source, target }: Diagnosis) -> Self {
        let keys = [
            (DIAGNOSIS, ENCOUNTERED.to_owned()),
            (BUG_LINK, ISSUE.to_owned()),
            (SOURCE, source),
            (TARGET, target),
        ];
        keys.map(|(key, value)| (key.to_owned(), value)).into()
    }
}

/// Diagnoses a pod by its object and a mount table.
pub fn diagnose(pod: &str, mount_info: &str) -> Result<Diagnosis, NotDiagnosed> {
    let pod: Pod = serde_json::from_str(pod)?;
    if !pod.spec.has_kubelet_written_sub_path() {
        return Err(NotDiagnosed::NoSubPath);
    }
    let message = pod
        .status
        .container_statuses
        .iter()
        .find_map(ContainerStatus::message)
        .unwrap_or_default();
    if !is_failed_subpath(message) {
        return Err(NotDiagnosed::OtherError);
    }
    let source = source_of(message).ok_or(NotDiagnosed::NoSource)?;
    let deleted = mount_info
        .lines()
        .filter(|line| line.contains(source))
        .find_map(deleted_mount);
    deleted.ok_or_else(|| NotDiagnosed::NotDeleted(source.to_owned()))
}

/// kubediag's pattern `^.*mounting.*volume-subpaths.*to rootfs.*at.*no such file or directory.*`.
fn is_failed_subpath(message: &str) -> bool {
    let line = message.lines().next().unwrap_or_default();
    PARTS
        .iter()
        .try_fold(line, |rest, part| Some(rest.split_once(part)?.1))
        .is_some()
}

/// The quoted path between `mounting` and `to rootfs`. A runtime may quote the whole error again,
/// which escapes the quotes.
fn source_of(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("mounting")?;
    let (between, _) = rest.split_once("to rootfs")?;
    let mut quoted = between.splitn(3, '"').skip(1);
    let (source, _) = (quoted.next()?, quoted.next()?);
    Some(source.trim_matches('\\')).filter(|source| !source.is_empty())
}

/// The fourth and fifth field of a line whose fourth ends in `/deleted`.
fn deleted_mount(line: &str) -> Option<Diagnosis> {
    let mut fields = line.split(' ').skip(3);
    let (source, target) = (fields.next()?, fields.next()?);
    source.ends_with("/deleted").then(|| Diagnosis {
        source: source.to_owned(),
        target: target.to_owned(),
    })
}

/// The fields of a Pod that the diagnosis reads.
#[derive(Debug, Deserialize)]
struct Pod {
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    volume_mounts: Vec<VolumeMount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct VolumeMount {
    name: String,
    sub_path: String,
    sub_path_expr: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Volume {
    name: String,
    config_map: Option<serde::de::IgnoredAny>,
    secret: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerStatus {
    ready: bool,
    last_state: State,
    state: State,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct State {
    waiting: Option<StateText>,
    terminated: Option<StateText>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StateText {
    message: String,
}

impl Spec {
    fn has_kubelet_written_sub_path(&self) -> bool {
        let is_written = |name: &str| {
            let mut named = self.volumes.iter().filter(|volume| volume.name == name);
            named.any(|volume| volume.config_map.is_some() || volume.secret.is_some())
        };
        let mounts = self
            .containers
            .iter()
            .flat_map(|container| &container.volume_mounts);
        let with_sub_path =
            mounts.filter(|it| !it.sub_path.is_empty() || !it.sub_path_expr.is_empty());
        with_sub_path
            .into_iter()
            .any(|mount| is_written(&mount.name))
    }
}

impl ContainerStatus {
    /// The last error of a container that is not ready.
    fn message(&self) -> Option<&str> {
        let states = [
            &self.last_state.terminated,
            &self.state.waiting,
            &self.state.terminated,
        ];
        let first = states.into_iter().flatten().next().filter(|_| !self.ready);
        first.map(|state| state.message.as_str())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use serde_json::{Value, json};

    use super::*;

    const SUBPATH: &str = "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0";
    const ROOT: &str = "/kubelet/pods/u/volumes/kubernetes.io~configmap/conf/..2021_06_02_06_01_21.2/app.conf//deleted";

    fn pod(statuses: &Value) -> Value {
        json!({
            "spec": {
                "containers": [{"name": "app", "volumeMounts": [{"name": "conf", "mountPath": "/etc/app.conf", "subPath": "app.conf"}]}],
                "volumes": [{"name": "conf", "configMap": {"name": "app"}}],
            },
            "status": {"containerStatuses": statuses},
        })
    }

    /// The messages of runc 1.0 under dockerd, and of runc 1.3 under containerd.
    fn messages() -> [String; 2] {
        [
            format!(
                "OCI runtime create failed: rootfs_linux.go:58: mounting \\\"{SUBPATH}\\\" to rootfs \\\"/o/merged\\\" at \\\"/o/merged/etc/app.conf\\\" caused \\\"no such file or directory\\\"\": unknown"
            ),
            format!(
                "failed to create containerd task: error mounting \"{SUBPATH}\" to rootfs at \"/etc/app.conf\": mount src={SUBPATH}, dst=/etc/app.conf: no such file or directory: unknown"
            ),
        ]
    }

    fn table() -> String {
        format!(
            "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 20 8:1 {ROOT} {SUBPATH} rw shared:1 - ext4 /dev/sda1 rw\n"
        )
    }

    fn waiting(message: &str) -> Value {
        json!([{"name": "app", "ready": false, "state": {"waiting": {"reason": "CreateContainerError", "message": message}}}])
    }

    #[test]
    fn the_error_of_a_runtime_leads_to_the_deleted_mount() {
        for message in messages() {
            let found = diagnose(&pod(&waiting(&message)).to_string(), &table()).unwrap();
            assert_eq!(
                found,
                Diagnosis {
                    source: ROOT.to_owned(),
                    target: SUBPATH.to_owned()
                },
                "{message}"
            );
            let keys = Strings::from(found);
            assert_eq!(
                keys[DIAGNOSIS],
                "A kubernetes bug #68211 has been encountered on pod subpath remounting."
            );
            assert_eq!(
                keys[BUG_LINK],
                "https://github.com/kubernetes/kubernetes/issues/68211"
            );
            assert_eq!(
                (keys[SOURCE].as_str(), keys[TARGET].as_str(), keys.len()),
                (ROOT, SUBPATH, 4)
            );
        }
    }

    /// As kubediag chooses: the first container that is not ready; its last end takes precedence
    /// over its present state.
    #[test]
    fn the_message_is_that_of_the_first_container_that_is_not_ready() {
        let [message, _] = messages();
        let ended = json!({"terminated": {"message": message}});
        let other = json!({"waiting": {"message": "back-off 40s restarting failed container"}});
        for (statuses, is_found) in [
            (
                json!([{"ready": false, "lastState": ended, "state": other}]),
                true,
            ),
            (
                json!([{"ready": false, "lastState": other, "state": ended}]),
                true,
            ),
            (
                json!([{"ready": false, "lastState": {"terminated": {"message": ""}}, "state": ended}]),
                false,
            ),
            (json!([{"ready": false, "state": ended}]), true),
            (json!([{"ready": true, "lastState": ended}]), false),
            (
                json!([{"ready": true}, {"ready": false, "state": ended}]),
                true,
            ),
            (
                json!([{"ready": false, "state": other}, {"ready": false, "state": ended}]),
                false,
            ),
            (json!([]), false),
        ] {
            assert_eq!(
                diagnose(&pod(&statuses).to_string(), &table()).is_ok(),
                is_found,
                "{statuses}"
            );
        }
    }

    #[test]
    fn anything_else_is_no_such_fault() {
        let [_, message] = messages();
        let good = pod(&waiting(&message));
        let mut other_volume = good.clone();
        other_volume["spec"]["volumes"] = json!([{"name": "conf", "emptyDir": {}}]);
        let mut whole_volume = good.clone();
        whole_volume["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = "".into();
        for pod in [&other_volume, &whole_volume] {
            assert!(matches!(
                diagnose(&pod.to_string(), &table()),
                Err(NotDiagnosed::NoSubPath)
            ));
        }
        let split = pod(&waiting(&message.replace("to rootfs", "\nto rootfs")));
        assert!(matches!(
            diagnose(&split.to_string(), &table()),
            Err(NotDiagnosed::OtherError)
        ));
        let unquoted = pod(&waiting(&message.replace('"', "")));
        assert!(matches!(
            diagnose(&unquoted.to_string(), &table()),
            Err(NotDiagnosed::NoSource)
        ));
        let current = table().replace("//deleted", "");
        for table in ["", "no table", &current] {
            assert!(
                matches!(
                    diagnose(&good.to_string(), table),
                    Err(NotDiagnosed::NotDeleted(_))
                ),
                "{table}"
            );
        }
        for text in ["", "7", "{\"spec\":7}"] {
            assert!(
                matches!(diagnose(text, &table()), Err(NotDiagnosed::Pod(_))),
                "{text}"
            );
        }
    }
}
