//! The key that a container mounts was removed from its configMap: no repair is possible.
//!
//! A real kubelet fails once and then mounts an empty *directory* where the file was. bindguard
//! lets the create fail with the runtime's own error, says beside it and in the log why, and never
//! makes a directory appear.

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::says_no_such_file;

const REASON: &str = "bindguard: the subPath of volume conf at /etc/app.conf is orphaned: the file it was bound from is \
                      deleted, and app.conf is no longer in its volume: put it back, or remove the subPath from the pod";

on_newest_and_older!(|generation| Setup::on(generation).story(story));

/// crun 1.28 and newer spread an error over several lines of the log.
#[test]
fn crun() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Crun(Generation::NEWEST))
        .story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("keyless")?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        "conf",
        &[("app.conf", "one"), ("other", "")],
    )?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    volume.update(&[("other", "")])?;

    for attempt in ["first", "second"] {
        let words = node
            .ctr()
            .container(attempt)
            .mount(Bind::new(source, "/etc/app.conf"))
            .start()?
            .failure()?;
        ensure!(
            says_no_such_file(&words) && words.contains("volume-subpaths"),
            "not the runtime's error: {words}"
        );
        // issue 14, item 23: the pod's owner sees this error alone, in the pod's events
        ensure!(
            words.contains(REASON),
            "neither bindguard's reason nor the next step: {words}"
        );
        node.ctr().forget(attempt)?;
        let kind = fs::symlink_metadata(source).context("look at the subpath")?;
        ensure!(
            kind.is_file(),
            "something else than a file is at the subpath: {kind:?}"
        );
        ensure!(
            subpath.mounts()?.len() == 1,
            "the stale mount was touched: {:?}",
            subpath.mounts()?
        );
    }
    let target = source.display().to_string();
    node.wait_for_log("that the subpath is orphaned", |line| {
        line.contains("bindguard: ") && line.contains(&target) && line.contains("orphaned")
    })?;
    pod.delete()
}
