//! A pod crash-loops under a runtime without bindguard: the operator mends its subpath by hand, and it starts.

use std::ffi::OsStr;

use anyhow::{Result, ensure};
use bindguard_integration::scenes::only_a_current_mount;
use bindguard_integration::{Bind, Generation, Node, Runtime, Setup, VolumeKind};

#[test]
fn stock_shim_starts_it_again() {
    Setup::on(Generation::V1_6).story(tell);
}

fn tell(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("looping")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    volume.update(&[("app.conf", "two")])?;
    let stock =
        |id: &str| node.ctr().container(id).runtime(Runtime::Stock).mount(Bind::new(source, "/etc/app.conf")).start();
    let words = stock("loops")?.failure()?;
    ensure!(words.contains("no such file or directory"), "not the fault: {words}");
    node.ctr().forget("loops")?;

    let before = subpath.mounts()?;
    let looked = node.bindguard(["repair", "--pod", "looping", "--dry-run"])?;
    ensure!(looked.code() == 1 && looked.stdout.contains("would be re-bound"), "a dry run: {looked:?}");
    ensure!(subpath.mounts()? == before, "a dry run changed the mounts");

    let mended = node.bindguard([OsStr::new("repair"), source.as_os_str()])?;
    ensure!(mended.code() == 0 && mended.stdout.contains("re-bound to the current target"), "not mended: {mended:?}");
    only_a_current_mount(&subpath)?;
    stock("starts")?.success()?;
    ensure!(node.ctr().read("starts", "/etc/app.conf")? == "two");
    node.ctr().remove("starts")?;

    for (words, said) in [
        (["repair", "/etc/passwd"], "is not a volume-subpath"),
        (["repair", "--pod=nobody"], "nothing to mend"),
        (["config", "check"], "is good"),
    ] {
        let told = node.bindguard(words)?;
        let (code, text) = (told.code(), format!("{}{}", told.stdout, told.stderr));
        ensure!(text.contains(said) && (code == 2 || said == "is good"), "{words:?} says {text} and exits {code}");
    }
    pod.delete()
}
