//! With `--restart-slot` a node restarts its runtime only while the node has a slot of the cluster.
//! A healthy runtime frees the slot. After a failed restart no node gets a slot until an operator
//! clears the mark.

use bindguard_integration::prelude::*;
use std::io::Write;

use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::programs::AGENT;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
const SLOTS: [&str; 2] = ["slot-0", "slot-1"];
const FAILED: &str = "bindguard.io/restart-failed";

#[test]
fn story() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let fleet = Fleet::new(node)?;
        SLOTS
            .iter()
            .for_each(|slot| fleet.insert(slot, Some("another-node")));
        let waits = fleet.bindguard(&["install", "--restart"])?;
        ensure!(
            waits.code() == 1 && waits.stdout.contains("waits for a slot: other nodes have"),
            "{waits:?}"
        );
        ensure!(fleet.restarts() == 0, "it restarted without a slot");
        ensure!(
            waits
                .stdout
                .contains("run      systemctl restart containerd"),
            "the restart is not owed: {waits:?}"
        );

        fleet.insert("slot-1", None);
        let works = fs::read_to_string(node.programs().join("systemctl"))?;
        let breaks = format!("{works}exit 3\n");
        write_program(&node.programs().join("systemctl"), &breaks)?;
        let failed = fleet.bindguard(&["install", "--restart"])?;
        ensure!(failed.code() == 2, "{failed:?}");
        let slot = fleet.lease("slot-1")?;
        ensure!(slot["spec"]["holderIdentity"] == "node-1", "{slot}");
        let mark = fleet.lease("slot-0")?["metadata"]["annotations"].clone();
        ensure!(mark[FAILED] == "node-1", "{mark}");
        let annotations = json!({ "annotations": mark, "name": "slot-0", "resourceVersion": "8" });
        let marked = json!({ "kind": "Lease", "metadata": annotations, "spec": {} });
        fleet.api.insert(&format!("{LEASES}/slot-0"), marked);
        let before = fleet.api.requests().len();
        let stopped = fleet.other_node_says("take\ntake\n")?;
        ensure!(
            stopped.matches("wait the rollout has stopped").count() == 2,
            "a bad change goes on: {stopped}"
        );
        // its two slots and the mark; thousands of nodes wait for an operator
        let requests = fleet.api.requests().len() - before;
        ensure!(
            requests == 3,
            "{requests} requests of a node that cannot go on"
        );

        // the node recovers, and an operator clears the mark
        write_program(&node.programs().join("systemctl"), &works)?;
        let done = fleet.bindguard(&["install", "--restart"])?.success()?;
        ensure!(done.contains("ran      systemctl"), "{done}");
        let slot = fleet.lease("slot-1")?;
        ensure!(slot["spec"]["holderIdentity"].is_null(), "{slot}");
        ensure!(fleet.other_node_takes()?.starts_with("wait"));
        fleet.insert("slot-0", None);
        ensure!(fleet.other_node_takes()? == "granted");
        let holders = [fleet.lease("slot-0")?, fleet.lease("slot-1")?]
            .map(|slot| slot["spec"]["holderIdentity"].clone());
        ensure!(holders.contains(&json!("node-2")), "{holders:?}");

        // a pod that ended after its restart still holds the slot: the next pod on the node frees
        // it
        fleet.insert("slot-1", Some("node-1"));
        fleet.bindguard(&["install", "--restart"])?.success()?;
        let slot = fleet.lease("slot-1")?;
        ensure!(slot["spec"]["holderIdentity"].is_null(), "{slot}");
        Ok(())
    });
}

/// A node of a cluster, and the API server.
struct Fleet<'n> {
    node: &'n Node,
    api: KubeApi,
}

impl<'n> Fleet<'n> {
    fn new(node: &'n Node) -> Result<Self> {
        let api = KubeApi::start_with_tls()?;
        Ok(Self { node, api })
    }

    fn insert(&self, slot: &str, holder: Option<&str>) {
        let lease = json!({
            "kind": "Lease",
            "metadata": { "name": slot, "resourceVersion": "7" },
            "spec": { "holderIdentity": holder },
        });
        self.api.insert(&format!("{LEASES}/{slot}"), lease);
    }

    fn lease(&self, slot: &str) -> Result<Value> {
        let lease = self.api.object(&format!("{LEASES}/{slot}"));
        lease.context("the lease is gone")
    }

    fn helper(&self) -> Vec<String> {
        let agent = self.node.under_test().join(AGENT).display().to_string();
        let words = [&agent, "restart-slot", "--namespace", "kube-system"];
        let leases = SLOTS.iter().flat_map(|slot| ["--lease", slot]);
        words.into_iter().chain(leases).map(str::to_owned).collect()
    }

    fn bindguard(&self, words: &[&str]) -> Result<Finished> {
        let mut command = Agent::with_account(self.node, &[], &self.api)?;
        command
            .arg(self.node.under_test().join(CLI))
            .args(words)
            .args(["--restart-slot", &self.helper().join(" ")]);
        run(command)
    }

    fn other_node_takes(&self) -> Result<String> {
        self.other_node_says("take\n")
    }

    /// The answers to the installer of a second node.
    fn other_node_says(&self, lines: &str) -> Result<String> {
        let mut command = Agent::with_account(self.node, &[], &self.api)?;
        command
            .env("NODE_NAME", "node-2")
            .args(self.helper())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().context("start the helper")?;
        let mut stdin = process.stdin.take().context("its stdin")?;
        stdin.write_all(lines.as_bytes())?;
        drop(stdin);
        let said = process.wait_with_output()?.stdout;
        Ok(String::from_utf8(said)?.trim_end().to_owned())
    }

    fn restarts(&self) -> usize {
        let log = fs::read_to_string(self.node.programs().join("systemctl.log"));
        log.map_or(0, |log| log.lines().count())
    }
}
