//! Kernels before 6.5 cannot mount beneath a mount. A fault point in the guard simulates such a
//! kernel.
//!
//! With a shared parent mount, as under systemd, propagation tucks the new mount under the stale
//! mount. With a private parent mount the stale mount stays, and the container's spec names the
//! volume's path.

use bindguard_integration::PollingReader;
use bindguard_integration::node::HostRoot;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};

#[test]
fn shared_parent() {
    Setup::on(Generation::V1_7)
        .fault("no-beneath")
        .story(|node| {
            for kind in [VolumeKind::ConfigMap, VolumeKind::Secret] {
                for shape in Shape::ALL {
                    UpdateThenRestart {
                        kind,
                        shape,
                        runtime: Runtime::Bindguard,
                    }
                    .play(node)?;
                }
            }
            Ok(())
        });
}

#[test]
fn private_parent() {
    Setup::on(Generation::V1_7)
        .host_root(HostRoot::Private)
        .fault("no-beneath")
        .story(|node| {
            for kind in [VolumeKind::ConfigMap, VolumeKind::Secret] {
                points_at_the_volume(node, kind)?;
            }
            Ok(())
        });
}

fn points_at_the_volume(node: &Node, kind: VolumeKind) -> Result<()> {
    let pod = node.kubelet().pod("old")?;
    let volume = pod.volume(kind, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let bind = Bind::new(subpath.bind()?, "/etc/app.conf");
    let reader = PollingReader::start(subpath.target());
    let ctr = node.ctr();
    for content in ["two", "three"] {
        volume.update(&[("app.conf", content)])?;
        ctr.container(content)
            .mount(bind.clone())
            .start()?
            .success()?;
        let read = ctr.read(content, "/etc/app.conf")?;
        ensure!(
            read == content,
            "{kind:?}: the container reads {read:?}, not {content:?}"
        );
        ctr.remove(content)?;
    }
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0,
        "a reader saw the file underneath: {seen:?}"
    );
    ensure!(
        subpath.mounts()?.len() == 1,
        "not one mount: {:?}",
        subpath.mounts()?
    );
    pod.delete()
}
