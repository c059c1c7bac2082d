//! Issue 16: a failing systemctl does not hide the change that was made, and the restart is tried
//! again until it succeeds.

use std::fs;

use anyhow::{Result, ensure};
use bindguard_integration::process::write_program;
use bindguard_integration::{Generation, Node, Setup};
use nix::sys::signal::Signal;

#[test]
fn story() {
    Setup::on(Generation::V2_1).cri().bare().story(|node| {
        let systemctl = node.programs().join("systemctl");
        let works = fs::read_to_string(&systemctl)?;
        write_program(
            &systemctl,
            "#!/bin/sh\necho \"$*\" >> \"${0%/*}/failed.log\"\nexit 3\n",
        )?;
        let failed = node.bindguard(["install", "--restart"])?;
        ensure!(
            failed.code() == 2 && failed.stderr.contains("exit status: 3"),
            "{failed:?}"
        );
        ensure!(
            failed.stdout.contains("+++ /etc/containerd/config.toml"),
            "no diff of what was changed: {failed:?}"
        );
        let again = node.bindguard(["install", "--restart"])?;
        ensure!(
            again.code() == 2,
            "a second call hides the failure: {again:?}"
        );
        ensure!(
            fs::read_to_string(node.programs().join("failed.log"))?
                .lines()
                .count()
                == 2,
            "it was not tried again"
        );

        let owed = node.bindguard(["install"])?.success()?;
        ensure!(
            owed.contains("run      systemctl restart containerd"),
            "the restart is forgotten: {owed}"
        );
        write_program(&systemctl, &works)?;
        let done = node.bindguard(["install", "--restart"])?.success()?;
        ensure!(
            done.contains("ran      systemctl restart containerd"),
            "{done}"
        );
        nothing_is_owed(node, &[])?;

        // an operator who restarts containerd by hand needs no word of it to bindguard
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        nothing_is_owed(node, &["--default"])?;
        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?.success()?;
        ensure!(!fs::exists("/var/lib/bindguard")?, "a record is left");
        Ok(())
    });
}

fn nothing_is_owed(node: &Node, options: &[&str]) -> Result<()> {
    let said = node
        .bindguard([&["install", "--restart"], options].concat())?
        .success()?;
    ensure!(
        !said.contains("systemctl"),
        "a restart that was done is still owed: {said}"
    );
    Ok(())
}
