//! Every kind of volume that a kubelet writes, with every shape of `subPath`. All but the configMap
//! lie on a tmpfs, where the fix of 1.19 compared the wrong paths (kubernetes#93691).

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};

fn story(oci: Oci) {
    Setup::on(Generation::V1_7).oci(oci).story(|node| {
        for kind in VolumeKind::KUBELET_WRITTEN {
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
fn runc() {
    story(Oci::Runc(Generation::V1_7));
}

#[test]
fn runc_1_4() {
    story(Oci::Runc(Generation::V2_3));
}

#[test]
fn crun() {
    story(Oci::Crun(Generation::V1_7));
}
