//! Issue 16: a failing systemctl does not hide the change that was made, and the restart is tried
//! again until it succeeds.

use bindguard_integration::prelude::*;

#[test]
fn story() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
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
        ensure!(failures(node)? == 2, "it was not tried again");

        // the readiness probe of a pod that restarts, and of a pod that does not
        let probe = node.bindguard(["install", "--restart", "--dry-run"])?;
        ensure!(probe.code() == 1, "a restart is owed: {probe:?}");
        node.bindguard(["install", "--dry-run"])?.success()?;
        // the process of a pod goes on
        let mut pod = node.command(node.under_test().join(CLI))?;
        pod.args(["install", "--restart", "--stay"]);
        let mut pod = pod.spawn().context("start the pod's process")?;
        until("the pod's process has failed twice", || {
            ensure!(
                pod.try_wait()?.is_none(),
                "it ends, and its next start is too early"
            );
            Ok(failures(node)? == 4)
        })?;

        let owed = node.bindguard(["install"])?.success()?;
        ensure!(
            owed.contains("run      systemctl restart containerd"),
            "the restart is forgotten: {owed}"
        );
        write_program(&systemctl, &works)?;
        until("the pod's process has restarted containerd", || {
            let probe = node.bindguard(["install", "--restart", "--dry-run"])?;
            Ok(probe.code() == 0)
        })?;
        pod.kill()?;
        pod.wait()?;
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

fn failures(node: &Node) -> Result<usize> {
    let log = fs::read_to_string(node.programs().join("failed.log"))?;
    Ok(log.lines().count())
}
