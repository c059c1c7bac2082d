//! Pods with as many annotations as the API server accepts, 256 KiB each. The agent has the memory
//! limit of the unit and the chart, and keeps only bindguard's annotations. A pod beside these pods
//! gets its files.

use bindguard_integration::memory_limit::MemoryLimit;
use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The limit of the unit and of the chart.
const LIMIT: u64 = 64 << 20;
const PODS: usize = 7;
/// Keys of 5 bytes without a value.
const KEYS: usize = 50_000;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let keys: Vec<String> = (0..KEYS).map(|key| format!("{key:05}")).collect();
        let annotations: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), "")).collect();
        let mut sandboxes = Vec::new();
        for pod in 0..PODS {
            let (name, uid) = (format!("many-{pod}"), format!("uid-many-{pod}"));
            sandboxes.push(cri.run_annotated_pod("runc", &name, &uid, &annotations)?);
        }
        let pod = node.kubelet().pod("uid-neighbour")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let mounts = [mount(subpath.bind()?, "/app.conf", PropagationPrivate)];
        let opt_in = [("bindguard.io/refresh", "true")];
        let sandbox = cri.run_annotated_pod("runc", "neighbour", pod.uid(), &opt_in)?;
        let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        sandboxes.push(sandbox);

        let agent = Agent::start(node, "")?;
        let limit = MemoryLimit::of(agent.pid(), LIMIT)?;
        // The agent ends first: the cgroup must be empty.
        let limited = (agent, limit);
        let (agent, limit) = (&limited.0, &limited.1);
        for content in ["two", "three"] {
            survey_goes_on(agent, limit)?;
            volume.update(&[("app.conf", content)])?;
            until("the neighbour reads the new file", || {
                ensure!(limit.killed()? == 0, "the kernel killed the agent");
                Ok(cri.read(&app, "/app.conf")? == content)
            })?;
        }
        drop(limited);
        for sandbox in &sandboxes {
            cri.remove_pod(sandbox)?;
        }
        pod.delete()
    });
}

/// A survey lists all pods.
fn survey_goes_on(agent: &Agent, limit: &MemoryLimit) -> Result<()> {
    let surveys = agent.figure("bindguard_agent_surveys_total");
    until("the agent surveys the node", || {
        let report = agent.get("/v1/report");
        ensure!(limit.killed()? == 0, "the kernel killed the agent");
        ensure!(report.starts_with("HTTP/1.1 200"), "{report}");
        Ok(agent.figure("bindguard_agent_surveys_total") > surveys)
    })
}
