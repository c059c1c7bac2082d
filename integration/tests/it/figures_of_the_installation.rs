//! The agent's figures distinguish a guarded node from a node without a guard: what is installed, whether
//! the running containerd has it, what is missing, and mistakes in the config.

use std::fs;

use anyhow::{Result, ensure};
use bindguard_integration::waiting::until;
use bindguard_integration::{Agent, Generation, Node, Setup};
use nix::sys::signal::Signal;

const FIGURES: [&str; 5] = [
    "bindguard_installed{version=\"0.1.0\"}",
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

fn figures_are(node: &Node, when: &str, wanted: [f64; 5]) -> Result<()> {
    let agent = Agent::start(node, "")?;
    let now = || FIGURES.map(|name| agent.figure(name));
    let counted = until("the agent counts the installation", || Ok(now() == wanted));
    ensure!(counted.is_ok(), "{when}: {:?}, not {wanted:?}", now());
    Ok(())
}
