//! criu dumps a refreshed container, restores the container, and the agent refreshes again: the
//! mount after a refresh looks to criu like the mount of the container's start.
//!
//! The containers are those of `ctr`, with the annotations of a pod.

use bindguard_integration::criu::{COUNTER, wait_for_count};
use bindguard_integration::prelude::*;

const ID: &str = "app-of-web";
const FILE: &str = "/etc/app.conf";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story_with_criu(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| story(node, runtime))
    });
}

fn story(node: &Node, runtime: Runtime) -> Result<()> {
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let ctr = node.ctr();
    let words = |words: &[&str]| run(ctr.command(words))?.success();
    let refresh = |text: &str| -> Result<()> {
        volume.update(&[("app.conf", text)])?;
        let done = node.bindguard(["refresh", "--pod", "default/web"])?;
        ensure!(
            done.code() == 0 && done.stdout.contains("replaced"),
            "{done:?}"
        );
        let read = ctr.read(ID, FILE)?;
        ensure!(read == text, "it reads {read:?}, not {text:?}");
        Ok(())
    };

    let bind = Bind::new(volume.subpath("app", 0, "app.conf").bind()?, FILE);
    let first = ctr
        .container(ID)
        .runtime(runtime)
        .mount(bind)
        .argument("--net-host")
        .in_pod("app", "web", pod.uid());
    first.runs(&COUNTER).start()?.success()?;
    refresh("two")?;
    let before = wait_for_count(node, ID, 30)?;
    words(&[
        "containers",
        "checkpoint",
        "--task",
        "--rw",
        "--image",
        ID,
        "saved",
    ])
    .context("of a refreshed one")?;
    refresh("three").context("after the checkpoint")?;
    ctr.remove(ID)?;

    // By its former id: the cgroup, by which a refresh finds the process, is in the checkpoint.
    words(&["containers", "restore", "--live", "--rw", ID, "saved"])?;
    let after = wait_for_count(node, ID, 1)?;
    ensure!(
        after >= before,
        "{runtime:?}: {before} before, {after} after"
    );
    let read = ctr.read(ID, FILE)?;
    ensure!(read == "three", "the restored container reads {read:?}");
    refresh("four").context("after the restore")?;
    wait_for_count(node, ID, after + 1)?;
    ctr.remove(ID)?;
    words(&["image", "rm", "saved"])?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
    })
}
