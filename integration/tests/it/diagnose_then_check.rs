//! An operator's commands on a node with a stale subpath: `diagnose` and `check` find it, `check`
//! changes nothing, and after a restart of the container there are no problems.

use bindguard_integration::bundle::Bundle;
use bindguard_integration::prelude::*;

#[test]
fn finds_and_repairs_the_same_binds() {
    Setup::on(Generation::V1_7).story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("operator")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    let target = source.display().to_string();
    let calm = node.bindguard(["diagnose"])?;
    ensure!(calm.code() == 0, "all is well, but: {calm:?}");

    volume.update(&[("app.conf", "two")])?;
    let spec = Bundle::spec(&[Bundle::bind(source, "/etc/app.conf")]);
    let bundle = Bundle::create(node, "checked", spec.to_string().as_bytes())?;
    let before = subpath.mounts()?;
    for found in [
        node.bindguard(["diagnose"])?,
        node.bindguard(["check".as_ref(), bundle.path().as_os_str()])?,
    ] {
        ensure!(
            found.code() == 1 && found.stdout.contains(&target),
            "did not find {target}: {found:?}"
        );
    }
    ensure!(subpath.mounts()? == before, "looking changed the mounts");

    node.ctr()
        .container("app")
        .mount(Bind::new(source, "/etc/app.conf"))
        .start()?
        .success()?;
    let calm = node.bindguard(["diagnose"])?;
    ensure!(calm.code() == 0, "all is well again, but: {calm:?}");
    node.ctr().remove("app")?;
    pod.delete()
}
