//! A volume that has to be mounted is not (kubernetes#109955): without bindguard, the container
//! starts and writes to the node's own disk, without any error.
//!
//! By default the log says it; where policy wants it, the container is refused, with the reason.

use bindguard_integration::on_every_generation;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege::has_program;

fn refused(generation: Generation) {
    let policy = "[checks]\nunmounted-volumes = \"refuse\"\n";
    Setup::on(generation).policy(policy).story(|node| {
        let nfs = volume(node, "kubernetes.io~nfs/data")?;
        for (container, runtime) in [("shim", Runtime::Bindguard), ("wrapper", Runtime::Wrapper)] {
            let words = start(node, container, runtime, &nfs)?.failure()?;
            // what the usual cause is depends on the machine
            let cause = if has_program("mount.nfs") {
                "not mounted"
            } else {
                "mount.nfs is missing"
            };
            for said in [
                "refused",
                "volume data (kubernetes.io~nfs) of pod uid-1",
                cause,
            ] {
                ensure!(
                    words.contains(said),
                    "{container}: the error does not say {said:?}: {words}"
                );
            }
            node.ctr().forget(container)?;
        }
        let tasks = node.ctr().tasks()?;
        ensure!(
            !tasks.contains("shim") && !tasks.contains("wrapper"),
            "a refused container is still there: {tasks}"
        );

        tmpfs(&nfs, "mode=755")?;
        let words = start(node, "other", Runtime::Bindguard, &nfs)?.failure()?;
        ensure!(
            words.contains("shows a tmpfs filesystem"),
            "the other filesystem is not reported: {words}"
        );
        node.ctr().forget("other")?;

        let csi = volume(node, "kubernetes.io~csi/pvc-1/mount")?;
        tmpfs(&csi, "mode=755")?;
        start(node, "mounted", Runtime::Bindguard, &csi)?.success()?;
        node.ctr().remove("mounted")
    });
}

on_every_generation!(refused);

#[test]
fn reported_by_default() {
    Setup::on(Generation::NEWEST).story(|node| {
        let nfs = volume(node, "kubernetes.io~nfs/data")?;
        start(node, "app", Runtime::Bindguard, &nfs)?.success()?;
        node.wait_for_log("that the volume is not mounted", |line| {
            line.contains("is unmounted") && line.contains("kubernetes.io~nfs")
        })?;
        node.ctr().remove("app")
    });
}

fn volume(node: &Node, name: &str) -> Result<PathBuf> {
    let path = node.kubelet().root().join("pods/uid-1/volumes").join(name);
    fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    Ok(path)
}

fn start(node: &Node, id: &str, runtime: Runtime, source: &Path) -> Result<Finished> {
    node.ctr()
        .container(id)
        .runtime(runtime)
        .mount(Bind::new(source, "/data").options(&["rbind", "rw"]))
        .start()
}
