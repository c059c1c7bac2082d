//! The second case of kubernetes#127602: the volume changes after the runtime mounted the file, and
//! before the process starts. The stock shim starts the process with the old file. With the agent
//! as an NRI plugin no container starts with an old file, under any shim.

use bindguard_integration::kubelet::{Behaviour, Subpath};
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The starts with the plugin.
const STARTS: u32 = 20;
/// The starts of a control run, in which every start is late, because the runtime waits for the
/// update.
const CONTROLS: u32 = 3;
const PLUGIN: &str = "agent.nri.enabled = true\n";

mod older {
    use super::*;

    #[test]
    fn containerd_1_7() {
        Setup::on(Generation::V1_7)
            .nri()
            .obedient_runtime()
            .story(story);
    }
}

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .nri()
        .obedient_runtime()
        .story(story);
}

fn story(node: &Node) -> Result<()> {
    let stock = old_starts(node, None, CONTROLS)?;
    let reporting = old_starts(
        node,
        Some("agent.nri.enabled = true\nchecks.stale-subpaths = 'report'\n"),
        CONTROLS,
    )?;
    let plugin = old_starts(node, Some(PLUGIN), STARTS)?;
    eprintln!(
        "started with old content: stock {stock} and policy `report` {reporting} of {CONTROLS}, \
         plugin {plugin} of {STARTS}"
    );
    ensure!(
        stock == CONTROLS && reporting == CONTROLS,
        "no start was late"
    );
    ensure!(plugin == 0, "{plugin} containers started with old content");
    a_plugin_that_hangs(node)?;
    let complaint = node.log()?;
    let complaint = complaint.lines().find(|line| {
        line.contains("level=warn") && line.contains("bindguard") && line.contains("StateChange")
    });
    ensure!(complaint.is_none(), "{complaint:?}");
    Ok(())
}

/// A container, and the moment between the runtime's mounts and its start.
struct Scene {
    pod: bindguard_integration::Pod,
    volume: Volume,
    subpath: Subpath,
    cri: Cri,
    sandbox: Sandbox,
    gate: Gate,
}

impl Scene {
    fn make(node: &Node) -> Result<Self> {
        let pod = node.kubelet().pod("uid-late")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
        let subpath = volume.subpath("app", 0, "count");
        subpath.bind()?;
        let cri = node.cri()?;
        Ok(Self {
            sandbox: cri.run_pod("runc", "late", pod.uid())?,
            gate: Gate::of(&node.programs()),
            pod,
            volume,
            subpath,
            cri,
        })
    }

    /// The content that a container reads after its volume changed to `number` before the start.
    /// `meanwhile` runs after the change.
    fn read_after(
        &self,
        number: u32,
        meanwhile: impl FnOnce() -> Result<()> + Send,
    ) -> Result<String> {
        self.subpath.bind_again(Behaviour::Since1_19)?;
        let mounts = [mount(
            self.subpath.target(),
            "/etc/count",
            PropagationPrivate,
        )];
        self.gate.close_after("create")?;
        let (volume, gate) = (&self.volume, &self.gate);
        let id = thread::scope(|scope| {
            let update = scope.spawn(move || {
                let updated = gate
                    .wait_for_call()
                    .and_then(|()| volume.update(&[("count", &number.to_string())]))
                    .and_then(|()| meanwhile());
                gate.open()?;
                updated
            });
            let words = ["sleep", "1000000"];
            let started = self
                .cri
                .start_container(&self.sandbox, "app", &words, &mounts);
            let updated = update.join().map_err(|_| anyhow!("the thread panicked"))?;
            updated.and(started)
        })?;
        let read = self.cri.read(&id, "/etc/count")?;
        self.cri.stop(&id, 0)?;
        self.cri.remove(&id)?;
        Ok(read)
    }

    fn end(self) -> Result<()> {
        self.cri.remove_pod(&self.sandbox)?;
        self.pod.delete()
    }
}

fn old_starts(node: &Node, agent: Option<&str>, starts: u32) -> Result<u32> {
    let agent = agent.map(|config| Agent::start(node, config)).transpose()?;
    if let Some(agent) = &agent {
        until("the plugin is registered", || {
            Ok(agent.figure("bindguard_nri_connected") == 1.0)
        })?;
    }
    let scene = Scene::make(node)?;
    let mut old = 0;
    for number in 1..=starts {
        let read = scene.read_after(number, || Ok(()))?;
        old += u32::from(read != number.to_string());
    }
    scene.end()?;
    if let Some(agent) = &agent {
        let refreshed = agent.figure("bindguard_nri_starts_total{answer=\"refreshed\"}");
        ensure!(
            refreshed == f64::from(starts - old),
            "{refreshed} starts are counted as refreshed"
        );
    }
    Ok(old)
}

/// The runtime closes its connection to such a plugin, and starts the container.
fn a_plugin_that_hangs(node: &Node) -> Result<()> {
    let agent = Agent::start(node, PLUGIN)?;
    until("the plugin is registered", || {
        Ok(agent.figure("bindguard_nri_connected") == 1.0)
    })?;
    let scene = Scene::make(node)?;
    let pid = Pid::from_raw(agent.pid().try_into()?);
    let read = scene.read_after(1, move || Ok(kill(pid, Signal::SIGSTOP)?));
    agent.go_on()?;
    let read = read.context("the container was not started")?;
    ensure!(read == "0", "{read}");
    scene.end()
}
