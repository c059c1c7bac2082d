//! The kubelet's root on a filesystem of its own, bind-mounted, behind a symlink, or in a node that
//! is a container (kind): the mount table shows the same volume differently each time
//! (kubernetes#93691, #103836).

use bindguard_integration::KubeletRoot;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};

fn story(root: KubeletRoot) {
    Setup::on(Generation::NEWEST)
        .kubelet_root(root)
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
fn own_filesystem() {
    story(KubeletRoot::OwnFilesystem);
}

#[test]
fn bind_mounted() {
    story(KubeletRoot::BindMounted);
}

#[test]
fn symlinked() {
    story(KubeletRoot::Symlinked);
}

#[test]
fn in_a_container() {
    story(KubeletRoot::InAContainer);
}
