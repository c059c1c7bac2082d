//! Part three: a configMap changes while its container runs (kubernetes#50345).

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::table::{Observation, Table};
use crate::agent::Agent;
use crate::cri::{Cri, Sandbox, mount};
use crate::node::Node;
use crate::{Volume, VolumeKind};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const FILE: &str = "/etc/app/app.conf";
const STEP: &str = "a running container, its configMap changed";
const SLEEP: [&str; 2] = ["sleep", "1000000"];

/// Time limit for a change that is expected.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn show(node: &Node, table: &mut Table) -> Result<()> {
    println!(
        "\n4. Two containers run, each with one file of a configMap (subPath). The configMaps change."
    );
    let cri = node.cri()?;
    let agent = Agent::start(node, "").context("start the node agent")?;
    let plain = Scene::start(node, &cri, "plain", &[])?;
    let opted_in = Scene::start(node, &cri, "refreshed", &[("bindguard.io/refresh", "true")])?;
    println!(
        "   both read `colour = blue`; the second pod has the annotation bindguard.io/refresh: \"true\""
    );
    for scene in [&plain, &opted_in] {
        scene.volume.update(&[("app.conf", "colour = green")])?;
    }
    println!("   the kubelet writes `colour = green`");
    let began = Instant::now();
    let new = opted_in.wait_for("colour = green")?;
    println!(
        "   the second container reads `{new}` after {} ms, without a restart",
        began.elapsed().as_millis()
    );
    // The agent works on both volumes at once, so a refresh of the first pod would be done by now.
    let old = plain.read()?;
    println!("   the first one reads `{old}`: it did not opt in");
    table.add(Observation {
        step: STEP,
        runtime: "without the annotation",
        seen: format!("reads `{old}`"),
        is_as_said: old == "colour = blue",
    });
    table.add(Observation {
        step: STEP,
        runtime: "with the annotation, and the agent",
        seen: format!("reads `{new}`"),
        is_as_said: new == "colour = green",
    });
    drop(agent);
    plain.end()?;
    opted_in.end()
}

/// A pod with a container.
struct Scene<'a> {
    node: &'a Node,
    cri: &'a Cri,
    uid: String,
    volume: Volume,
    sandbox: Sandbox,
    container: String,
}

impl<'a> Scene<'a> {
    fn start(
        node: &'a Node,
        cri: &'a Cri,
        name: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Self> {
        let uid = format!("uid-{name}");
        let pod = node.kubelet().pod(&uid)?;
        let volume = pod.volume(
            VolumeKind::ConfigMap,
            "conf",
            &[("app.conf", "colour = blue")],
        )?;
        let mounts = [mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            FILE,
            PropagationPrivate,
        )];
        let sandbox = cri.run_annotated_pod("runc", name, &uid, annotations)?;
        let container = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Self {
            node,
            cri,
            uid,
            volume,
            sandbox,
            container,
        })
    }

    fn read(&self) -> Result<String> {
        self.cri.read(&self.container, FILE)
    }

    /// The content, as soon as the content is as expected, or after the time limit.
    fn wait_for(&self, expected: &str) -> Result<String> {
        let began = Instant::now();
        loop {
            let content = self.read()?;
            if content == expected || began.elapsed() > REFRESH_TIMEOUT {
                return Ok(content);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(self) -> Result<()> {
        self.cri.remove_pod(&self.sandbox)?;
        self.node.kubelet().pod(&self.uid)?.delete()
    }
}
