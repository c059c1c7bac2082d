//! kubernetes#68211 with the stock shim and the node agent: the container starts again and reads
//! the new file, without any shim of bindguard.

use bindguard_integration::agent::Form;
use bindguard_integration::prelude::*;

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        [Form::Service, Form::Pod].into_iter().try_for_each(|form| {
            let _agent = Agent::start_as(node, "", form)?;
            VolumeKind::KUBELET_WRITTEN
                .into_iter()
                .try_for_each(|kind| update_then_restart(node, kind))
        })
    });
}

on_newest_and_older!(story);

fn update_then_restart(node: &Node, kind: VolumeKind) -> Result<()> {
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(kind, "conf", &[("app.conf", "one"), ("folder/key", "one")])?;
    let file = volume.subpath("app", 0, "app.conf");
    let folder = volume.subpath("app", 1, "folder");
    let (file_source, folder_source) = (file.bind()?.to_owned(), folder.bind()?.to_owned());
    let ctr = node.ctr();
    let start = |id: &str| {
        let binds = ctr
            .container(id)
            .runtime(Runtime::Stock)
            .mount(Bind::new(&file_source, "/etc/app.conf"));
        binds
            .mount(Bind::new(&folder_source, "/etc/folder"))
            .start()?
            .success()
            .map(drop)
    };
    start("first")?;
    for content in ["two", "three"] {
        volume.update(&[("app.conf", content), ("folder/key", content)])?;
        until("the agent re-binds", || {
            Ok(only_a_current_mount(&file)
                .and(only_a_current_mount(&folder))
                .is_ok())
        })?;
        ctr.remove("first")?;
        start("first")?;
        ensure!(
            ctr.read("first", "/etc/app.conf")? == content,
            "{kind:?}: the file is old"
        );
        ensure!(
            ctr.read("first", "/etc/folder/key")? == content,
            "{kind:?}: the folder is old"
        );
    }
    ctr.remove("first")?;
    // The kubelet tries again when a check of the agent has a mount open.
    let mut last = Ok(());
    until("the kubelet deletes the pod", || {
        last = node.kubelet().pod("uid-1")?.delete();
        Ok(last.is_ok())
    })?;
    last
}
