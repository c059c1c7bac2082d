//! The guard is killed at the worst moment: the new mount is attached, the stale mount still on
//! top.
//!
//! The next create finishes the work: a single current mount, nothing underneath.

use bindguard_integration::prelude::*;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::PollingReader;
use bindguard_integration::bundle::Bundle;

#[test]
fn next_create_finishes_the_work() {
    Setup::on(Generation::V1_7).fault_points().story(story);
}

#[test]
fn the_kubelets_next_try_starts() {
    Setup::on(Generation::NEWEST)
        .fault("after-attach")
        .story(|node| {
            let pod = node.kubelet().pod("killed")?;
            let volume = pod.volume(VolumeKind::Secret, "token", &[("key", "one")])?;
            let subpath = volume.subpath("app", 0, "key");
            let bind = Bind::new(subpath.bind()?, "/etc/key");
            volume.update(&[("key", "two")])?;
            let ctr = node.ctr();
            ctr.container("first")
                .mount(bind.clone())
                .start()?
                .failure()?;
            ctr.forget("first")?;
            // it has to detach the stale mount only: the fault's place is not reached
            ctr.container("second").mount(bind).start()?.success()?;
            ensure!(ctr.read("second", "/etc/key")? == "two");
            only_a_current_mount(&subpath)?;
            ctr.remove("second")?;
            pod.delete()
        });
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("killed")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    volume.update(&[("app.conf", "two")])?;
    let reader = PollingReader::start(source);

    let spec = Bundle::spec(&[Bundle::bind(source, "/etc/app.conf")]);
    let bundle = Bundle::create(node, "killed", spec.to_string().as_bytes())?;
    let mut guard = bundle.admit(node)?;
    guard.env("BINDGUARD_FAULT", "after-attach");
    let ended = run(guard)?;
    ensure!(
        ended.status.signal() == Some(9),
        "the guard was not killed: {ended:?}"
    );
    let mounts = subpath.mounts()?;
    ensure!(
        mounts.len() == 2,
        "not one mount under the other: {mounts:?}"
    );

    let ctr = node.ctr();
    ctr.container("next")
        .mount(Bind::new(source, "/etc/app.conf"))
        .start()?
        .success()?;
    ensure!(ctr.read("next", "/etc/app.conf")? == "two");
    only_a_current_mount(&subpath)?;
    ctr.remove("next")?;
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0,
        "a reader saw the file underneath: {seen:?}"
    );
    pod.delete()
}
