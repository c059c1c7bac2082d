//! Issue 16: automation calls `uninstall` until it exits with 0. As long as the running containerd
//! names the programs, they stay and a pod can start, whatever its files say.

use bindguard_integration::prelude::*;

const PROGRAM: &str = "/usr/local/bin/bindguard-runtime";

fn story(generation: Generation) {
    Setup::on(generation).cri().bare().story(|node| {
        node.bindguard(["install", "--default"])?.success()?;
        restart_containerd(node)?;
        for call in ["first", "second", "third"] {
            stays(node, call)?;
        }
        restart_containerd(node)?;
        goes(node)?;

        // a configuration tool puts the former file back: bindguard changed nothing, and knows of
        // no restart
        let former = fs::read(node.containerd_config())?;
        node.bindguard(["install"])?.success()?;
        restart_containerd(node)?;
        fs::write(node.containerd_config(), former)?;
        if generation >= Generation::V2_1 {
            fs::remove_file(node.containerd_drop_in())?;
        }
        let kept = node.bindguard(["uninstall"])?;
        ensure!(
            kept.code() == 1
                && kept
                    .stdout
                    .contains("the active configuration of containerd names"),
            "{kept:?}"
        );
        stays(node, "without a change")?;
        restart_containerd(node)?;
        goes(node)?;

        // a containerd that does not answer may still name the programs
        node.bindguard(["install"])?.success()?;
        restart_containerd(node)?;
        let hidden = Path::new("/run/containerd/hidden.sock");
        fs::rename(bindguard_integration::node::SOCKET, hidden)?;
        node.bindguard(["uninstall", "--restart"])?;
        let kept = node.bindguard(["uninstall"])?;
        ensure!(
            kept.code() == 1
                && kept
                    .stdout
                    .contains("read the active configuration of containerd"),
            "{kept:?}"
        );
        ensure!(Path::new(PROGRAM).exists());
        ensure!(
            kept.stdout.contains("the handler bindguard stays"),
            "pods may need the handler: {kept:?}"
        );
        fs::rename(hidden, bindguard_integration::node::SOCKET)?;
        restart_containerd(node)?;
        node.bindguard(["uninstall"])?;
        restart_containerd(node)?;
        goes(node)
    });
}

on_newest_and_older!(story);

/// containerd answers no call of the CRI for a moment after its start.
fn restart_containerd(node: &Node) -> Result<()> {
    node.restart_containerd(Signal::SIGTERM)?;
    node.cri().map(drop)
}

fn stays(node: &Node, call: &str) -> Result<()> {
    let done = node.bindguard(["uninstall"])?;
    ensure!(
        done.code() == 1 && done.stdout.contains("the programs stay"),
        "the {call} call: {done:?}"
    );
    ensure!(
        Path::new(PROGRAM).exists(),
        "the {call} call removed a program"
    );
    let sandbox = node.cri()?.run_pod("", call, call)?;
    node.cri()?
        .start_container(&sandbox, "app", &["sleep", "1000000"], &[])?;
    node.cri()?.remove_pod(&sandbox)
}

/// A shim ends a moment after its last container.
fn goes(node: &Node) -> Result<()> {
    until("nothing needs the programs", || {
        Ok(node.bindguard(["uninstall"])?.code() == 0)
    })?;
    ensure!(!Path::new(PROGRAM).exists(), "a program is left");
    Ok(())
}
