//! Containers that fill their own mount tables, with and without a request for live refresh: the
//! agent, limited to the memory that it is shipped with, reports them and goes on. Their neighbour
//! gets its files.

use bindguard_integration::foreign_mounts::make_long_mounts;
use bindguard_integration::memory_limit::MemoryLimit;
use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The limit of the unit and of the chart.
const LIMIT: u64 = 64 << 20;
const OPT_IN: [(&str, &str); 1] = [("bindguard.io/refresh", "true")];

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let outside = Pod::run(node, &cri, "outside", &[])?;
        let inside = Pod::run(node, &cri, "inside", &OPT_IN)?;
        let neighbour = Pod::run(node, &cri, "neighbour", &OPT_IN)?;
        let agent = Agent::start(node, "")?;
        let limit = MemoryLimit::of(agent.pid(), LIMIT)?;
        // The agent ends first: the cgroup must be empty.
        let limited = (agent, limit);
        let (agent, limit) = (&limited.0, &limited.1);
        make_long_mounts(cri.pid(&outside.container)?, 3000)?;
        make_long_mounts(cri.pid(&inside.container)?, 3000)?;

        survey_goes_on(node, agent, limit)?;
        neighbour_is_refreshed(node, &cri, &[&inside, &neighbour])?;
        survey_goes_on(node, agent, limit)?;
        diagnose_reports_both(node)?;
        drop(limited);
        [outside, inside, neighbour]
            .into_iter()
            .try_for_each(|pod| pod.remove(node, &cri))
    });
}

fn survey_goes_on(node: &Node, agent: &Agent, limit: &MemoryLimit) -> Result<()> {
    // A report is served again for ten seconds.
    let surveys = agent.figure("bindguard_agent_surveys_total");
    until("the agent surveys the node", || {
        let report = agent.get("/v1/report");
        ensure!(report.starts_with("HTTP/1.1 200"), "{report}");
        Ok(agent.figure("bindguard_agent_surveys_total") > surveys)
    })?;
    ensure!(limit.killed()? == 0, "the kernel killed the agent");
    let log = fs::read_to_string(node.disk().join("agent.log"))?;
    for pod in ["outside", "inside"] {
        let unknown = format!("the mounts of default/{pod} container app are unknown: ");
        ensure!(
            log.contains(&unknown) && log.contains("the mount table is too large"),
            "no {unknown:?} in {log}"
        );
    }
    Ok(())
}

fn neighbour_is_refreshed(node: &Node, cri: &Cri, pods: &[&Pod]) -> Result<()> {
    pods.iter()
        .try_for_each(|pod| pod.volume.update(&[("app.conf", "two")]))?;
    until("the neighbour reads the new file", || {
        Ok(cri.read(&pods[1].container, "/etc/app/app.conf")? == "two")
    })?;
    until("the agent reports the other container", || {
        let log = fs::read_to_string(node.disk().join("agent.log"))?;
        Ok(log.contains("refresh default/inside container app: "))
    })?;
    ensure!(
        cri.read(&pods[0].container, "/etc/app/app.conf")? == "one",
        "it was refreshed without its mount table"
    );
    Ok(())
}

/// A container with unknown mounts is not reported as current.
fn diagnose_reports_both(node: &Node) -> Result<()> {
    let done = node.bindguard(["diagnose", "--json"])?;
    let report: Value = serde_json::from_str(&done.stdout)?;
    let problems = report["problems"].to_string();
    for pod in ["outside", "inside"] {
        ensure!(
            problems.contains(&format!("default/{pod} container app: ")),
            "no {pod} in {problems}"
        );
    }
    ensure!(
        problems.contains("too large") && !problems.contains("neighbour"),
        "{problems}"
    );
    Ok(())
}

/// A pod with a container that reads a subPath.
struct Pod {
    uid: String,
    sandbox: Sandbox,
    container: String,
    volume: Volume,
}

impl Pod {
    fn run(node: &Node, cri: &Cri, name: &str, annotations: &[(&str, &str)]) -> Result<Self> {
        let pod = node.kubelet().pod(&format!("uid-{name}"))?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let mounts = [mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app/app.conf",
            PropagationPrivate,
        )];
        let sandbox = cri.run_annotated_pod("runc", name, pod.uid(), annotations)?;
        let container = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        Ok(Self {
            uid: pod.uid().to_owned(),
            sandbox,
            container,
            volume,
        })
    }

    fn remove(self, node: &Node, cri: &Cri) -> Result<()> {
        cri.remove_pod(&self.sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod(&self.uid)?.delete().is_ok())
        })
    }
}
