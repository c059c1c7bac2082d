//! Bindguard was the default of a node, and is removed while pods of both kinds run. Each
//! step of the removal ends: the default goes back, then the handler goes with its last pod, then
//! the programs. The pods' containers restart all the while.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::agent::Agent;
use bindguard_integration::programs::SHIM;
use k8s_cri::v1::MountPropagation::{PropagationHostToContainer, PropagationPrivate};

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const PROGRAM: &str = "/usr/local/bin/bindguard-runtime";

fn story(generation: Generation) {
    Setup::on(generation).cri().bare().story(|node| {
        let before = fs::read(node.containerd_config())?;
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let by_class = Pod::run(node, "bindguard", "by-class")?;
        let by_default = Pod::run(node, "", "by-default")?;

        let first = node.bindguard(["uninstall"])?;
        ensure!(
            first.code() == 1 && first.stdout.contains("run      systemctl restart"),
            "the default does not go back: {first:?}"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        for_pods_only(node, &["handler bindguard kept for 1 pod"])?;
        ensure!(
            is_guarded(node)?
                == json!([{ "daemon": "containerd", "runtimes": ["bindguard"], "default": false }]),
            "the running containerd has another state"
        );
        kept(
            node,
            &json!({ "handler_kept_for_pods": 1, "programs_kept_for_pods": 2 }),
        )?;
        agent_counts(node, [1.0, 2.0])?;
        let by_class = by_class.restarted(node)?;
        let by_default = by_default.restarted(node)?;

        by_class.remove(node)?;
        let second = node.bindguard(["uninstall"])?;
        ensure!(second.code() == 1, "{second:?}");
        ensure!(
            fs::read(node.containerd_config())? == before,
            "the handler stays without a pod"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        until("the shim of the removed pod has ended", || {
            Ok(node
                .bindguard(["uninstall"])?
                .stdout
                .contains("kept for 1 pod"))
        })?;
        for_pods_only(node, &["programs kept for 1 pod (default/by-default)"])?;
        kept(
            node,
            &json!({ "handler_kept_for_pods": 0, "programs_kept_for_pods": 1 }),
        )?;
        by_default.restarted(node)?.remove(node)?;
        until("nothing needs the programs", || {
            Ok(node.bindguard(["uninstall"])?.code() == 0)
        })?;
        ensure!(!Path::new(PROGRAM).exists(), "a program is left");
        ensure!(!fs::exists("/var/lib/bindguard")?, "a record is left");
        node.bindguard(["uninstall", "--dry-run", "--complete"])?
            .success()?;
        Ok(())
    });
}

on_newest_and_older!(story);

/// An install takes a removal back that pods have held up.
#[test]
fn installed_again_before_its_end() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let pod = Pod::run(node, "bindguard", "by-class")?;
        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?;
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let status = status(node)?;
        ensure!(
            status["removal"].is_null() && status["daemons"][0]["default"] == true,
            "{status}"
        );
        let drift = node.bindguard(["install", "--default", "--dry-run"])?;
        ensure!(drift.code() == 0, "{drift:?}");
        pod.restarted(node)?.remove(node)
    });
}

/// A timer finishes only an operator's own uninstall.
#[test]
fn of_one_runtime_is_finished_alone() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        node.bindguard(["install", "containerd", "docker"])?
            .success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let pod = Pod::run(node, "bindguard", "by-class")?;
        let docker = fs::read("/etc/docker/daemon.json")?;
        let first = node.bindguard(["uninstall", "containerd"])?;
        ensure!(first.code() == 1, "{first:?}");
        kept(
            node,
            &json!({ "handler_kept_for_pods": 1, "programs_kept_for_pods": 0 }),
        )?;
        pod.remove(node)?;
        node.bindguard(["uninstall", "--pending"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall", "--pending"])?.success()?;
        ensure!(
            fs::read("/etc/docker/daemon.json")? == docker && Path::new(PROGRAM).exists(),
            "Docker's runtime is removed, too"
        );
        kept(node, &Value::Null)?;
        node.bindguard(["uninstall", "docker"])?.success()?;
        node.bindguard(["uninstall"])?.success()?;
        Ok(())
    });
}

/// The pod of the chart's removal was created while bindguard was the default. The pod ends its
/// sandbox, and the kubelet makes a new sandbox.
mod by_a_pod_that_was_guarded {
    use super::*;

    fn story(generation: Generation) {
        Setup::on(generation).cri().bare().story(|node| {
            let systemctl = node.programs().join("systemctl");
            symlink(&systemctl, "/usr/local/sbin/systemctl")?;
            let image = node.disk().join("image");
            fs::create_dir(&image)?;
            for name in [SHIM, GUARD, CLI] {
                fs::copy(node.under_test().join(name), image.join(name))?;
            }
            let before = fs::read(node.containerd_config())?;
            node.bindguard(["install", "--default"])?.success()?;
            node.restart_containerd(Signal::SIGTERM)?;

            let (sandbox, container) = removing(node, &image)?;
            let log = node.programs().join("systemctl.log");
            until("containerd is to be restarted", || Ok(log.exists()))
                .with_context(|| said(node, &container))?;
            node.restart_containerd(Signal::SIGTERM)?;
            until("the pod has left its sandbox", || {
                Ok(!node.cri()?.is_ready(&sandbox)?)
            })
            .with_context(|| said(node, &container))?;
            node.cri()?.remove(&container)?;
            node.cri()?.remove_pod(&sandbox)?;
            ensure!(Path::new(PROGRAM).exists(), "the pod ran without its shim");

            let (sandbox, _) = removing(node, &image)?;
            until("nothing needs the programs", || {
                Ok(!fs::exists("/var/lib/bindguard")?)
            })?;
            ensure!(!Path::new(PROGRAM).exists(), "a program is left");
            ensure!(fs::read(node.containerd_config())? == before);
            ensure!(
                node.cri()?.is_ready(&sandbox)?,
                "a pod under the runtime's own shim ends itself"
            );
            node.cri()?.remove_pod(&sandbox)
        });
    }

    on_newest_and_older!(story);

    fn said(node: &Node, container: &str) -> String {
        let logs = node.cri().and_then(|cri| cri.logs(container));
        logs.unwrap_or_else(|error| format!("{error:#}"))
    }

    fn removing(node: &Node, image: &Path) -> Result<(Sandbox, String)> {
        let cri = node.cri()?;
        let sandbox = cri.run_node_pod("bindguard")?;
        let words = ["uninstall", "--root", "/host", "--restart", "--stay"];
        let program = ["env", "PATH=/usr/local/bin", "/usr/local/bin/bindguard"];
        let words = [&program[..], &words].concat();
        let mounts = [
            mount(Path::new("/"), "/host", PropagationHostToContainer),
            mount(image, "/usr/local/bin", PropagationPrivate),
        ];
        let container = cri.start_container(&sandbox, "remove", &words, &mounts)?;
        Ok((sandbox, container))
    }
}

/// The node is as clean as its pods permit: nothing is left to do for an operator, and the
/// readiness probe of the chart's pod succeeds.
fn for_pods_only(node: &Node, reasons: &[&str]) -> Result<()> {
    let again = node.bindguard(["uninstall"])?;
    ensure!(again.code() == 1, "pods need more: {again:?}");
    for reason in reasons {
        ensure!(again.stdout.contains(reason), "no {reason:?}: {again:?}");
    }
    ensure!(
        !again.stdout.contains("systemctl"),
        "a restart is owed: {again:?}"
    );
    let probe = node.bindguard(["uninstall", "--dry-run"])?;
    ensure!(probe.code() == 0, "the pod is not ready: {probe:?}");
    let probe = node.bindguard(["uninstall", "--dry-run", "--complete"])?;
    ensure!(
        probe.code() == 1,
        "a part is left, and the pod of the chart's hook is ready: {probe:?}"
    );
    Ok(())
}

fn status(node: &Node) -> Result<Value> {
    Ok(serde_json::from_str(
        &node.bindguard(["status", "--json"])?.stdout,
    )?)
}

fn is_guarded(node: &Node) -> Result<Value> {
    Ok(status(node)?["daemons"].clone())
}

fn kept(node: &Node, wanted: &Value) -> Result<()> {
    let status = status(node)?;
    ensure!(status["removal"] == *wanted, "{status}");
    Ok(())
}

fn agent_counts(node: &Node, wanted: [f64; 2]) -> Result<()> {
    let names = ["handler", "programs"].map(|part| format!("bindguard_{part}_kept_for_pods"));
    let agent = Agent::start(node, "")?;
    until("the agent counts the pods", || {
        Ok(names.each_ref().map(|name| agent.figure(name)) == wanted)
    })
}

/// A pod with a container.
struct Pod {
    sandbox: Sandbox,
    container: String,
}

impl Pod {
    fn run(node: &Node, handler: &str, name: &str) -> Result<Self> {
        let cri = node.cri()?;
        let sandbox = cri.run_pod(handler, name, name)?;
        let container = started(&cri, &sandbox)?;
        Ok(Self { sandbox, container })
    }

    fn restarted(self, node: &Node) -> Result<Self> {
        let cri = node.cri()?;
        cri.stop(&self.container, 0)?;
        cri.remove(&self.container)?;
        let container = started(&cri, &self.sandbox)?;
        Ok(Self { container, ..self })
    }

    fn remove(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)
    }
}

fn started(cri: &Cri, sandbox: &Sandbox) -> Result<String> {
    let container = cri.start_container(sandbox, "app", &SLEEP, &[])?;
    ensure!(
        cri.exec(&container, &["true"])?.code == 0,
        "nothing can be run in it"
    );
    Ok(container)
}
