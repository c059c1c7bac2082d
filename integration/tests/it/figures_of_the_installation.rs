//! The agent's figures distinguish a guarded node from a node without a guard: what is installed, whether
//! the running containerd has it, what is missing, what other tools changed, and mistakes in the config.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::time::SystemTime;

use bindguard_integration::waiting::until_within;

const FIGURES: [&str; 5] = [
    concat!(
        "bindguard_installed{version=\"",
        env!("CARGO_PKG_VERSION"),
        "\"}"
    ),
    "bindguard_guarded_runtimes",
    "bindguard_restarts_owed",
    "bindguard_missing_files",
    "bindguard_config_mistakes",
];

#[test]
fn story() {
    Setup::on(Generation::V2_1).cri().bare().story(|node| {
        figures_are(node, "before", [0.0; 5])?;
        node.bindguard(["install"])?.success()?;
        figures_are(node, "installed", [1.0, 0.0, 1.0, 0.0, 0.0])?;
        node.restart_containerd(Signal::SIGTERM)?;
        figures_are(node, "active", [1.0, 1.0, 0.0, 0.0, 0.0])?;
        fs::remove_file("/usr/local/bin/bindguard-runtime")?;
        // the node's config, by BINDGUARD_CONFIG
        fs::write(node.disk().join("bindguard.toml"), "[chekcs]\nproof = 1\n")?;
        figures_are(node, "damaged", [1.0, 1.0, 0.0, 1.0, 1.0])
    });
}

const DRIFT: &str = "bindguard_node_drift{} ";

/// The installer's pod checks the node once a minute. Without such a pod the figure is absent.
#[test]
fn changes_by_other_tools() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        ensure!(drift(node)?.is_none(), "nothing checks the node");

        let mut command = node.command(node.under_test().join(CLI))?;
        command.args(["install", "--default", "--stay"]);
        let mut pod = InstallerPod(command.spawn().context("start the installer's pod")?);
        let counts = "/run/bindguard/drift-count";
        until("the installer's pod checks the node", || {
            Ok(fs::exists(counts)?)
        })?;
        ensure!(drift(node)?.as_deref() == Some("0"), "{:?}", drift(node)?);

        let file = &node.containerd_drop_in();
        let text = fs::read_to_string(file)?;
        let edited = text.replace("name = \"bindguard\"", "name = \"runc\"");
        ensure!(edited != text, "no default in {text}");
        fs::write(file, &edited)?;
        // the pod's interval is a minute
        until_within(Duration::from_secs(180), "the edit is counted", || {
            Ok(fs::read_to_string(counts)? == "1\n")
        })?;
        ensure!(drift(node)?.as_deref() == Some("1"), "{:?}", drift(node)?);

        pod.stop()?;
        let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
        File::options()
            .write(true)
            .open(counts)?
            .set_modified(an_hour_ago)?;
        ensure!(drift(node)?.is_none(), "nothing checks the node any more");
        Ok(())
    });
}

/// The figure of an agent that starts now.
fn drift(node: &Node) -> Result<Option<String>> {
    let agent = Agent::start(node, "")?;
    until("the agent counts the installation", || {
        Ok(agent.figure("bindguard_guarded_runtimes") > 0.0)
    })?;
    let text = agent.get("/metrics");
    let value = text.lines().find_map(|line| line.strip_prefix(DRIFT));
    Ok(value.map(|value| value.trim().to_owned()))
}

/// The process of a pod. Drop ends the process.
struct InstallerPod(Child);

impl InstallerPod {
    fn stop(&mut self) -> Result<()> {
        kill(Pid::from_raw(self.0.id().try_into()?), Signal::SIGTERM)?;
        let ended = self.0.wait()?;
        ensure!(ended.success(), "it ended with {ended}");
        Ok(())
    }
}

impl Drop for InstallerPod {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn figures_are(node: &Node, when: &str, wanted: [f64; 5]) -> Result<()> {
    let agent = Agent::start(node, "")?;
    let now = || FIGURES.map(|name| agent.figure(name));
    let counted = until("the agent counts the installation", || Ok(now() == wanted));
    ensure!(counted.is_ok(), "{when}: {:?}, not {wanted:?}", now());
    Ok(())
}
