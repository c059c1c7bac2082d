//! `make pictures`: the terminal picture of the README, from the output of the real programs on a
//! node with a stale subPath.

use bindguard_integration::prelude::*;
use std::env;
use std::ffi::OsString;

use bindguard_integration::doc_commands::repository;
use bindguard_integration::kubelet::KubeletRoot;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// As an operator uses them: the fault, the repair, and the running container.
const COMMANDS: [&str; 3] = [
    "bindguard diagnose",
    "bindguard repair --pod default/web",
    "bindguard refresh --pod default/web",
];

#[test]
#[ignore = "draws the picture of the README: make pictures"]
fn commands() {
    Setup::on(Generation::NEWEST)
        .cri()
        .kubelet_root(KubeletRoot::VarLib)
        .story(story);
}

fn story(node: &Node) -> Result<()> {
    let picture = PathBuf::from(env::var_os("BINDGUARD_PICTURE").context("BINDGUARD_PICTURE")?);
    let pod = node.kubelet().pod("9a957d3f-ed3f-4a32-9a31-b4ee9d0e2a3c")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let cri = node.cri()?;
    let sandbox = cri.run_pod("bindguard", "web", pod.uid())?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;

    // the mount table of this node shows the folder behind the kubelet's root
    let shown = format!("{}=/var/lib/kubelet", node.disk().join("kubelet").display());
    let mut draw = node.command("python3")?;
    draw.arg(repository().join("integration/pictures/draw.py"))
        .args(["terminal", "--columns", "120", "--replace", &shown])
        .arg(&picture)
        .args(COMMANDS)
        .env("PATH", search_path(node.under_test())?);
    run(draw)?.success()?;
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

fn search_path(programs: &Path) -> Result<OsString> {
    let inherited = env::var_os("PATH").context("PATH")?;
    let folders = env::split_paths(&inherited);
    Ok(env::join_paths(
        [programs.to_owned()].into_iter().chain(folders),
    )?)
}
