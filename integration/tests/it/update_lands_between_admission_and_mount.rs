//! kubernetes#127602, open in every kubelet: the configMap changes after all checks, just before
//! runc mounts.
//!
//! A slow runc makes the race certain. The stock shim fails; bindguard's shim repairs and creates
//! again.

use std::thread;

use anyhow::{Result, anyhow, ensure};
use bindguard_integration::process::Finished;
use bindguard_integration::runtime::Gate;
use bindguard_integration::scenes::{only_a_current_mount, says_no_such_file};
use bindguard_integration::{
    Bind, Generation, Node, Oci, Runtime, Setup, VolumeKind, on_newest_and_older,
};

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

fn create_with_an_update_in_between(node: &Node, runtime: Runtime) -> Result<Finished> {
    let pod = node.kubelet().pod(&format!("{runtime:?}"))?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
    let container = ctr
        .container("racer")
        .runtime(runtime)
        .mount(Bind::new(subpath.bind()?, "/etc/app.conf"));

    gate.close()?;
    let created = thread::scope(|scope| {
        let create = scope.spawn(|| container.start());
        let update = gate
            .wait_for_call()
            .and_then(|()| volume.update(&[("app.conf", "two")]));
        gate.open()?;
        let created = create
            .join()
            .map_err(|_| anyhow!("the creating thread panicked"))?;
        update.and(created)
    })?;
    if created.status.success() {
        only_a_current_mount(&subpath)?;
    }
    Ok(created)
}
