//! The pause container of a pod ends before the pod's application container, for example because
//! the kernel killed the pause process. No shim is left once the pod is removed.
//!
//! containerd 2.1 to 2.3 requests the end of a sandbox's shim after the delete of the pause
//! container alone.

use bindguard_integration::prelude::*;

#[test]
fn its_shim_ends_with_the_pod() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let sandbox = cri.run_pod("bindguard", "web", "uid-web")?;
        let container = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &[])?;
        let shims = node.shims()?;
        ensure!(shims.len() == 1, "not one shim for the pod: {shims:?}");
        let pause = node.ctr().in_namespace("k8s.io").pid(sandbox.id())?;
        kill(Pid::from_raw(pause.try_into()?), Signal::SIGKILL)?;
        until("the pod has lost its sandbox", || {
            Ok(!cri.is_ready(&sandbox)?)
        })?;
        cri.remove(&container)?;
        cri.remove_pod(&sandbox)?;
        until("the shim has ended", || Ok(node.shims()?.is_empty()))
    });
}
