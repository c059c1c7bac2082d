//! A process hangs in execve(2), or holds its mmap_lock: readers of most of its files in `/proc`
//! would wait without end. The commands of an operator do not wait, and a neighbour is refreshed.

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use bindguard_testing::held_memory::{Executing, Holder, blocks_readers};
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::sched::{CloneFlags, unshare};

/// In seconds: every limit of a command is shorter.
const HANG_TIMEOUT: &str = "60";

/// The exit status of timeout(1) for a command that it ended.
const ENDED: [i32; 2] = [124, 137];

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "0")])?;
    let bind = mount(
        volume.subpath("app", 0, "app.conf").bind()?,
        "/etc/app.conf",
        PropagationPrivate,
    );
    let sandbox = cri.run_pod("runc", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &[bind])?;
    // A mount namespace of its own, as a container has.
    let enter_own = || unshare(CloneFlags::CLONE_NEWNS).unwrap();
    if let Some(_executing) = Executing::start_after(enter_own) {
        volume.update(&[("app.conf", "1")])?;
        commands_end(node)?;
        ensure!(cri.read(&app, "/etc/app.conf")? == "1", "not refreshed");
    }
    if let Some(holder) = Holder::start(c"conmon", enter_own) {
        ensure!(blocks_readers(holder.pid()), "it does not hold its memory");
        volume.update(&[("app.conf", "2")])?;
        commands_end(node)?;
        ensure!(cri.read(&app, "/etc/app.conf")? == "2", "not refreshed");
    }
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-1")
}

fn commands_end(node: &Node) -> Result<()> {
    let verbs: [&[&str]; 5] = [
        &["doctor"],
        &["status"],
        &["diagnose"],
        &["holders", "/"],
        &["refresh", "--pod", "default/web"],
    ];
    for verb in verbs {
        let mut command = node.command("timeout")?;
        command.args(["--kill-after", "5", HANG_TIMEOUT]);
        command.arg(node.under_test().join(CLI)).args(verb);
        let done = run(command)?;
        ensure!(!ENDED.contains(&done.code()), "it hangs: {done:?}");
        ensure!(!done.stdout.is_empty(), "{done:?}");
    }
    Ok(())
}
