//! bindguard's own config lies on a server that does not answer: the pod's shim answers anyway, and
//! its next container is made without a repair.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::SilentServer;
use bindguard_integration::privilege::skipped;

#[test]
fn newest_containerd() {
    if !SilentServer::is_possible() {
        return skipped("no /dev/fuse here");
    }
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    let container = |id: &str| {
        ctr.container(id)
            .annotation("io.containerd.runc.v2.group", "pod")
    };
    container("first").start()?.success()?;
    let mut server = SilentServer::mounted(&node.disk().join("silent"))?;
    server.take_request()?;
    let config = node.disk().join("bindguard.toml");
    fs::remove_file(&config)?;
    symlink(server.path().join("config.toml"), &config)?;

    thread::scope(|scope| {
        let second = scope.spawn(|| container("second").start()?.success());
        while !second.is_finished() {
            ensure!(
                ctr.exec("first", &["true"])?.code() == 0,
                "the pod's shim does not answer"
            );
        }
        second
            .join()
            .map_err(|_| anyhow::anyhow!("the create panicked"))?
            .map(drop)
    })?;
    let words = "it did not answer within 700ms";
    node.wait_for_log(words, |line| line.contains(words))?;
    ensure!(node.shims()?.len() == 1, "not one shim for the pod");
    drop(server);
    until("the readers go away with the server", || {
        Ok(threads(node)? == 1)
    })?;
    ["second", "first"]
        .into_iter()
        .try_for_each(|id| ctr.remove(id))
}

/// Of the pod's shim.
fn threads(node: &Node) -> Result<usize> {
    let shims = node.shims()?;
    let count = |pid: &u32| Ok(fs::read_dir(format!("/proc/{pid}/task"))?.count());
    shims.iter().map(count).sum()
}
