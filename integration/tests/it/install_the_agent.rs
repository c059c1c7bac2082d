//! `bindguard install --agent` brings the node agent with its program, unit and
//! enablement, and `uninstall` removes all of it.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use bindguard_integration::{Generation, Node, Setup};

const UNIT: &str = "/etc/systemd/system/bindguard-agent.service";
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/bindguard-agent.service";

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1).cri().bare().story(|node| {
        let there = |path: &str| Path::new(path).symlink_metadata().is_ok();
        ensure!(!there(UNIT), "this machine has the agent");
        let said = node
            .bindguard(["install", "--agent", "--restart"])?
            .success()?;
        let unit = fs::read_to_string(UNIT)?;
        ensure!(
            unit.contains("ExecStart=/usr/local/bin/bindguard-agent\n"),
            "{unit}"
        );
        ensure!(
            fs::read_link(ENABLED)? == Path::new(UNIT),
            "not enabled: {said}"
        );
        ensure!(
            fs::metadata("/usr/local/bin/bindguard-agent")?.is_file(),
            "no program"
        );
        requested(node, &["daemon-reload", "restart bindguard-agent"])?;
        let again = node.bindguard(["install", "--agent", "--dry-run"])?;
        ensure!(again.code() == 0, "not idempotent: {again:?}");
        node.bindguard(["uninstall", "--restart"])?.success()?;
        requested(node, &["stop bindguard-agent"])?;
        for left in [
            UNIT,
            ENABLED,
            "/usr/local/bin/bindguard-agent",
            "/usr/local/lib/bindguard",
            "/var/lib/bindguard",
        ] {
            ensure!(!there(left), "{left} is left");
        }
        Ok(())
    });
}

/// A node of a story has no systemd: the requests are recorded.
fn requested(node: &Node, words: &[&str]) -> Result<()> {
    let requests = fs::read_to_string(node.programs().join("systemctl.log"))?;
    let missing: Vec<_> = words
        .iter()
        .filter(|word| !requests.lines().any(|line| line == **word))
        .collect();
    ensure!(missing.is_empty(), "{missing:?} is not in {requests}");
    Ok(())
}
