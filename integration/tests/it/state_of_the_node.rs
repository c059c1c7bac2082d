//! `kubectl get pods` shows the fleet: the agent and the installer annotate their own pods with the
//! node's state, and only if it changed.

use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_integration::agent::TOKEN;
use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::scenes::only_a_current_mount;
use bindguard_integration::waiting::{until, until_within};
use bindguard_integration::{Agent, Generation, Setup, VolumeKind};
use serde_json::{Value, json};

const POD: &str = "/api/v1/namespaces/kube-system/pods/agent-1";
/// The first request comes within a minute.
const FIRST: Duration = Duration::from_secs(90);

#[test]
fn of_the_agent() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let api = api()?;
        let _agent = Agent::start_with_account(node, "agent.node-state.enabled = true\n", &api)?;
        let pod = node.kubelet().pod("uid-1")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        subpath.bind()?;
        volume.update(&[("app.conf", "two")])?;
        until("it is re-bound", || {
            Ok(only_a_current_mount(&subpath).is_ok())
        })?;
        let state = annotations(&api)?;
        ensure!(
            state["bindguard.io/guarded-runtimes"]
                .as_str()
                .is_some_and(|text| text.contains("bindguard")),
            "{state}"
        );
        ensure!(
            state["bindguard.io/findings"] == "none" && state["bindguard.io/version"].is_string(),
            "{state}"
        );
        ensure!(
            state["bindguard.io/last-repair"]
                .as_str()
                .is_some_and(|text| text.ends_with('Z')),
            "{state}"
        );
        ensure!(
            state["kept"] == "yes",
            "another annotation is gone: {state}"
        );
        only_patches_of_its_own_pod(&api)?;
        pod.delete()
    });
}

/// The second container of the installer's pod.
#[test]
fn of_the_installer() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let api = api()?;
        let agent = node.under_test().join("bindguard-agent");
        let bindguard = node.under_test().join("bindguard");
        let mut command = Agent::with_account(node, &[], &api)?;
        command
            .arg(&agent)
            .args(["annotate-pod", "--every", "1", "--"])
            .arg(bindguard)
            .args(["status", "--json"]);
        let _annotating = Annotating::start(command)?;
        let state = annotations(&api)?;
        ensure!(
            state["bindguard.io/guarded-runtimes"]
                .as_str()
                .is_some_and(|text| text.contains("bindguard")),
            "{state}"
        );
        ensure!(
            state["bindguard.io/restart-owed"] == "false" && state["bindguard.io/findings"] == "0",
            "{state}"
        );
        std::thread::sleep(Duration::from_secs(5));
        ensure!(
            api.requests().len() == 1,
            "it wrote again what did not change: {:?}",
            api.requests()
        );
        only_patches_of_its_own_pod(&api)
    });
}

fn api() -> Result<KubeApi> {
    let api = KubeApi::start_with_tls()?;
    api.insert(
        POD,
        json!({"kind": "Pod", "metadata": {"name": "agent-1", "annotations": {"kept": "yes"}}}),
    );
    Ok(api)
}

fn annotations(api: &KubeApi) -> Result<Value> {
    let mut state = Value::Null;
    until_within(FIRST, "the pod is annotated", || {
        state = api.object(POD).context("the pod is gone")?["metadata"]["annotations"].clone();
        Ok(state["bindguard.io/findings"].is_string())
    })?;
    Ok(state)
}

fn only_patches_of_its_own_pod(api: &KubeApi) -> Result<()> {
    let bearer = format!("Bearer {TOKEN}");
    for seen in api.requests() {
        ensure!(
            seen.method == "PATCH" && seen.path == POD && seen.authorization == bearer,
            "{seen:?}"
        );
    }
    Ok(())
}

/// `annotate-pod`; it ends with this value.
struct Annotating(Child);

impl Annotating {
    fn start(mut command: Command) -> Result<Self> {
        Ok(Self(command.spawn().context("start annotate-pod")?))
    }
}

impl Drop for Annotating {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
