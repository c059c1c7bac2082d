//! kubernetes#68211 with bindguard: the container starts again and reads the new configMap, through
//! every door.

use bindguard_integration::node::HostRoot;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};
use bindguard_integration::{on_every_generation, on_every_generation_with_systemd};

fn story(generation: Generation) {
    let runtimes = [
        Runtime::Bindguard,
        Runtime::BindguardByPath,
        Runtime::Wrapper,
    ];
    Setup::on(generation).story(|node| through(node, &runtimes));
}

on_every_generation!(story);

on_every_generation_with_systemd!(
    |setup: Setup| setup.story(|node| through(node, &[Runtime::Bindguard, Runtime::Wrapper]))
);

fn through(node: &Node, runtimes: &[Runtime]) -> Result<()> {
    for runtime in runtimes.iter().copied() {
        UpdateThenRestart {
            kind: VolumeKind::ConfigMap,
            shape: Shape::File,
            runtime,
        }
        .play(node)?;
    }
    Ok(())
}

/// A host without systemd: nothing propagates, and the new kernel's way needs no propagation.
#[test]
fn private_host_root() {
    Setup::on(Generation::NEWEST)
        .host_root(HostRoot::Private)
        .story(|node| {
            for kind in [VolumeKind::ConfigMap, VolumeKind::Secret] {
                UpdateThenRestart {
                    kind,
                    shape: Shape::File,
                    runtime: Runtime::Bindguard,
                }
                .play(node)?;
            }
            Ok(())
        });
}
