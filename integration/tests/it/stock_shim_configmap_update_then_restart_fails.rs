//! The fault itself, without bindguard: kubernetes#68211. It also proves the harness, on every
//! generation.
//!
//! An operator sees `CreateContainerError` and a container that never starts again, because the
//! subpath's bind mount still shows the file of an older configMap, and the kernel mounts no
//! deleted file.

use bindguard_integration::on_every_generation;
use bindguard_integration::prelude::*;

on_every_generation!(|generation| Setup::on(generation).stock().story(story));

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    let ctr = node.ctr();
    let container = |id| {
        ctr.container(id)
            .runtime(Runtime::Stock)
            .mount(Bind::new(source, "/etc/app.conf"))
    };

    container("first").start()?.success()?;
    ensure!(ctr.read("first", "/etc/app.conf")? == "one");

    volume.update(&[("app.conf", "two")])?;
    ctr.remove("first")?;
    let words = container("second").start()?.failure()?;
    ensure!(
        words.contains("no such file or directory") && words.contains("volume-subpaths"),
        "another error: {words}"
    );

    let mounts = subpath.mounts()?;
    ensure!(
        mounts.len() == 1 && mounts[0].is_deleted(),
        "the subpath should still show the deleted file: {mounts:?}"
    );
    pod.delete()
}
