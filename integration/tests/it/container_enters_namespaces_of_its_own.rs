//! A container's first process enters user and mount namespaces of its own, and binds its read-only
//! file to a second path there. bindguard refuses a refresh: the container could make a new mount
//! writable there, and then write the pod's volume.

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;

const UID: &str = "uid-1";

/// A program that needs no privilege.
const PROGRAM: &str = "touch /copy && exec unshare -U -r -m sh -c 'mount --bind /etc/app.conf /copy && sleep 1000000'";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let volume =
        node.kubelet()
            .pod(UID)?
            .volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let id = format!("{}-app", node.name());
    let bind = Bind::new(
        volume.subpath("app", 0, "app.conf").bind()?,
        "/etc/app.conf",
    );
    let ctr = node.ctr();
    let container = ctr
        .container(&id)
        .mount(bind.options(&["rbind", "rprivate", "ro"]));
    container
        .in_pod("app", "web", UID)
        .runs(&["sh", "-c", PROGRAM])
        .start()?
        .success()?;
    let pid = node.ctr().pid(&id)?;
    let mounts = || fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    until("the container binds its file", || {
        Ok(mounts().contains(" /copy "))
    })?;
    let before = remount_writable(pid)?;
    ensure!(
        before.stderr.contains("ermission denied") || before.stderr.contains("not permitted"),
        "{before:?}"
    );

    volume.update(&[("app.conf", "two")])?;
    let done = node.bindguard(["refresh", "--pod", "default/web"])?;
    let after = remount_writable(pid)?;
    ensure!(after.code() == before.code(), "after {done:?}: {after:?}");
    ensure!(done.code() != 0, "it is refused: {done:?}");
    let text = format!("{}{}", done.stdout, done.stderr);
    ensure!(
        text.contains("a mount namespace that its runtime did not make"),
        "{done:?}"
    );
    node.ctr().remove(&id)?;
    delete_pod(node, UID)
}

/// In the namespaces of the container's first process, as that process.
fn remount_writable(pid: u32) -> Result<Finished> {
    let mut command = Command::new("nsenter");
    let pid = pid.to_string();
    command.args(["-t", &pid, "-U", "-m", "--preserve-credentials", "--"]);
    command.args(["mount", "-o", "remount,bind,rw", "none", "/copy"]);
    run(command)
}
