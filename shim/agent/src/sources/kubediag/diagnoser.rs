//! subpathRemountDiagnoser: does the runtime's error name a subpath whose mount shows a deleted
//! file?
//!
//! It reads the results of both collectors and nothing else.

use anyhow::{Context, Result, bail, ensure};
use bindguard_operator::node_report::ISSUE;
use serde::Deserialize;

use super::{BUG_LINK, DIAGNOSIS, ENCOUNTERED, POD_DETAIL, SOURCE, Strings, TARGET};

/// The parts of the runtime's error, in order, all in the first line of the error: kubediag's
/// pattern `^.*mounting.*volume-subpaths.*to rootfs.*at.*no such file or directory.*`.
const PARTS: [&str; 5] = [
    "mounting",
    "volume-subpaths",
    "to rootfs",
    "at",
    "no such file or directory",
];

/// Diagnoses a pod by its object and a mount table: the mount of the subpath, with the kernel's
/// `/deleted` in its root.
///
/// # Errors
/// Why the pod does not have the fault.
pub fn diagnose(pod: &str, mount_info: &str) -> Result<Strings> {
    let pod: Pod =
        serde_json::from_str(pod).with_context(|| format!("parse the pod of {POD_DETAIL}"))?;
    ensure!(
        pod.spec.has_kubelet_written_sub_path(),
        "no container of the pod mounts a subPath of a configMap or secret"
    );
    let mut statuses = pod.status.container_statuses.iter();
    let message = statuses.find_map(ContainerStatus::message);
    let message = message.unwrap_or_default();
    let mut rest = message.lines().next().unwrap_or_default();
    for part in PARTS {
        let Some((_, behind)) = rest.split_once(part) else {
            bail!(
                "no container that is not ready has the error of a subPath that cannot be mounted"
            );
        };
        rest = behind;
    }
    let Some(source) = source_of(message) else {
        bail!("the error of the container names no source");
    };
    for line in mount_info.lines().filter(|line| line.contains(source)) {
        let mut fields = line.split(' ').skip(3);
        if let (Some(root), Some(target)) = (fields.next(), fields.next())
            && root.ends_with("/deleted")
        {
            let keys = [
                (DIAGNOSIS, ENCOUNTERED),
                (BUG_LINK, ISSUE),
                (SOURCE, root),
                (TARGET, target),
            ];
            return Ok(keys
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into());
        }
    }
    bail!("the mount table has no mount of {source} that shows a deleted file")
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
        for mount in self.containers.iter().flat_map(|it| &it.volume_mounts) {
            let mut named = self.volumes.iter().filter(|it| it.name == mount.name);
            let has_sub_path = !mount.sub_path.is_empty() || !mount.sub_path_expr.is_empty();
            if has_sub_path && named.any(|it| it.config_map.is_some() || it.secret.is_some()) {
                return true;
            }
        }
        false
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

    fn fails(diagnosed: Result<Strings>, why: &str) -> bool {
        diagnosed.is_err_and(|error| error.to_string().contains(why))
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
            let keys = found;
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
                (ROOT, SUBPATH, 4),
                "{message}"
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
            assert!(fails(
                diagnose(&pod.to_string(), &table()),
                "mounts a subPath of"
            ));
        }
        let split = pod(&waiting(&message.replace("to rootfs", "\nto rootfs")));
        assert!(fails(
            diagnose(&split.to_string(), &table()),
            "has the error of a subPath"
        ));
        let unquoted = pod(&waiting(&message.replace('"', "")));
        assert!(fails(
            diagnose(&unquoted.to_string(), &table()),
            "names no source"
        ));
        let current = table().replace("//deleted", "");
        for table in ["", "no table", &current] {
            assert!(
                fails(diagnose(&good.to_string(), table), "shows a deleted file"),
                "{table}"
            );
        }
        for text in ["", "7", "{\"spec\":7}"] {
            assert!(
                fails(diagnose(text, &table()), "parse the pod of collector"),
                "{text}"
            );
        }
    }
}
