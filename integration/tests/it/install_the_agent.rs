//! `bindguard install --agent` brings the node agent with its program, unit and
//! enablement, and `uninstall` removes all of it.

use bindguard_integration::prelude::*;

const UNIT: &str = "/etc/systemd/system/bindguard-agent.service";
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/bindguard-agent.service";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
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
        upgraded_without_the_option(node)?;
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

/// A second build of the same version gets its own folder. The agent goes with the other programs.
fn upgraded_without_the_option(node: &Node) -> Result<()> {
    let second = node.disk().join("second");
    fs::create_dir(&second)?;
    // a program that any process still writes to cannot be run
    let mut copy = Command::new("sh");
    copy.args([
        "-ec",
        "cp -L \"$1\"/* \"$2\"; printf ' ' >> \"$2/$3\"",
        "sh",
    ])
    .args([&node.disk().join("dist"), &second])
    .arg(GUARD);
    run(copy)?.success()?;
    let mut command = node.command(second.join(CLI))?;
    command.args(["install", "--restart"]);
    let said = run(command)?.success()?;
    ensure!(
        said.contains("ran      systemctl restart bindguard-agent"),
        "the agent runs its former program: {said}"
    );
    ensure!(
        fs::metadata("/usr/local/bin/bindguard-agent")?.is_file(),
        "an upgrade removed the agent's program"
    );
    Ok(())
}

/// The unit is there, and the agent does not run: a later call reports its start again.
#[test]
fn started_after_a_failure() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let systemctl = node.programs().join("systemctl");
        let works = fs::read_to_string(&systemctl)?;
        write_program(&systemctl, "#!/bin/sh\nexit 3\n")?;
        let failed = node.bindguard(["install", "--agent", "--restart"])?;
        ensure!(failed.code() == 2, "{failed:?}");
        let again = node
            .bindguard(["install", "docker", "--agent"])?
            .success()?;
        ensure!(
            again.contains("run      systemctl daemon-reload")
                && again.contains("run      systemctl restart bindguard-agent"),
            "the start of the agent is forgotten: {again}"
        );
        write_program(&systemctl, &works)?;
        node.bindguard(["install", "--agent", "--restart"])?
            .success()?;
        requested(node, &["daemon-reload", "restart bindguard-agent"])?;
        let done = node.bindguard(["install", "--agent"])?.success()?;
        ensure!(!done.contains("systemctl"), "still owed: {done}");
        node.bindguard(["uninstall", "--restart"])?.success()?;
        ensure!(!fs::exists("/var/lib/bindguard")?, "a record is left");
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
