//! A container renames a new file over its own file, as editors and `kubectl cp` do. The subpath
//! then shows a deleted file, and every restart fails, whether the volume is an emptyDir or a
//! folder of the host.

use bindguard_integration::kubelet::{Pod, Volume};
use bindguard_integration::mounts;
use bindguard_integration::prelude::*;

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            restarts(node, runtime, |pod| {
                pod.empty_volume(VolumeKind::EmptyDir, "data")
            })?;
            restarts(node, runtime, |pod| {
                pod.empty_volume(VolumeKind::EmptyDirMemory, "data")
            })?;
            restarts(node, runtime, |pod| {
                pod.host_path(&node.disk().join("srv"), "data")
            })?;
        }
        Ok(())
    });
}

on_newest_and_older!(story);

fn restarts(node: &Node, runtime: Runtime, volume: impl Fn(&Pod) -> Result<Volume>) -> Result<()> {
    let before = mounts::table()?.len();
    let pod = node.kubelet().pod("d474")?;
    let volume = volume(&pod)?;
    let file = volume.path().join("state");
    fs::write(&file, "one").context("write the first state")?;
    let subpath = volume.subpath("app", 0, "state");
    subpath.bind()?;

    let ctr = node.ctr();
    let run = |id: &str| {
        ctr.container(id)
            .runtime(runtime)
            .mount(Bind::new(subpath.target(), "/state"))
            .start()?
            .success()
    };
    run("first")?;
    for (previous, id, content) in [("first", "second", "two"), ("second", "third", "three")] {
        fs::remove_file(&file).context("remove the old state")?;
        fs::write(&file, content).context("write a new state")?;
        ctr.remove(previous)?;
        run(id)?;
        let read = ctr.read(id, "/state")?;
        ensure!(
            read == content,
            "{id} in {} reads {read:?}, not {content:?}",
            volume.path().display()
        );
        only_a_current_mount(&subpath)?;
    }
    ctr.remove("third")?;
    pod.delete()?;
    let after = mounts::table()?.len();
    ensure!(before == after, "{before} mounts before, {after} after");
    Ok(())
}
