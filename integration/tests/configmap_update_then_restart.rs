//! kubernetes#68211 with bindguard: the container starts again and reads the new configMap, through every door.

use bindguard_integration::node::HostRoot;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};
use bindguard_integration::{Generation, Runtime, Setup, VolumeKind, on_every_generation};

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        for runtime in [Runtime::Bindguard, Runtime::BindguardByPath, Runtime::Wrapper] {
            UpdateThenRestart { kind: VolumeKind::ConfigMap, shape: Shape::File, runtime }.play(node)?;
        }
        Ok(())
    });
}

on_every_generation!(story);

/// A host without systemd: nothing propagates, and the new kernel's way needs no propagation.
#[test]
fn private_host_root() {
    Setup::on(Generation::V2_1).host_root(HostRoot::Private).story(|node| {
        for kind in [VolumeKind::ConfigMap, VolumeKind::Secret] {
            UpdateThenRestart { kind, shape: Shape::File, runtime: Runtime::Bindguard }.play(node)?;
        }
        Ok(())
    });
}
