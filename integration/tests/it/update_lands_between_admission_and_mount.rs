//! kubernetes#127602, open in every kubelet: the configMap changes after all checks, just before
//! runc mounts.
//!
//! A slow runc makes the race certain. The stock shim fails; bindguard's shim repairs and creates
//! again.

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{create_with_an_update_in_between, says_no_such_file};

fn story(generation: Generation) {
    race(Setup::on(generation));
}

#[test]
fn runc_1_4() {
    race(Setup::on(Generation::NEWEST).oci(Oci::Runc(Generation::V2_3)));
}

fn race(setup: Setup) {
    setup.obedient_runtime().story(|node| {
        let words = create_with_an_update_in_between(node, Runtime::Stock)?.failure()?;
        ensure!(
            says_no_such_file(&words),
            "another error than the race's: {words}"
        );
        node.ctr().forget("racer")?;
        for runtime in [Runtime::Bindguard, Runtime::BindguardByPath] {
            create_with_an_update_in_between(node, runtime)?.success()?;
            let content = node.ctr().read("racer", "/etc/app.conf")?;
            ensure!(content == "two", "{runtime:?} reads {content:?}");
            node.ctr().remove("racer")?;
        }
        Ok(())
    });
}

on_newest_and_older!(story);
