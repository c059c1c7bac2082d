//! A pod by the name that `kubectl` knows it by: `diagnose` and `repair` take it, and report the
//! container's state, with the CRI's help, and without it from the bundles.

use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

on_newest_and_older!(|generation| Setup::on(generation).cri().story(story));

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-named")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let cri = node.cri()?;
    let sandbox = cri.run_pod("bindguard", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;

    for pod in ["uid-named", "web", "default/web"] {
        let ended = node.bindguard(["diagnose", "--pod", pod, "--json"])?;
        let report: Value = serde_json::from_str(&ended.stdout)?;
        let bind = &report["binds"][0];
        ensure!(
            ended.code() == 1 && bind["verdict"] == "stale",
            "{pod}: {ended:?}"
        );
        ensure!(
            bind["pod"]["name"] == "web" && bind["pod"]["namespace"] == "default",
            "{bind}"
        );
        ensure!(
            bind["container"]["state"] == "running" && bind["container"]["id"] == app.as_str(),
            "{bind}"
        );
    }
    let without = node.bindguard([
        "diagnose",
        "--pod",
        "web",
        "--verbose",
        "--cri",
        "/nowhere.sock",
    ])?;
    ensure!(
        without.code() == 1 && without.stdout.contains("  default/web  app  "),
        "{without:?}"
    );
    ensure!(
        without
            .stderr
            .contains("without the CRI: query /nowhere.sock"),
        "{without:?}"
    );

    cri.stop(&app, 0)?;
    cri.wait_for_exit(&app)?;
    let ended = node.bindguard(["diagnose", "--pod", "web", "-v"])?;
    ensure!(
        ended.stdout.contains("its container is exited"),
        "{ended:?}"
    );
    let namesake = cri.run_pod_in("other", "bindguard", "web", "uid-namesake")?;
    for verb in ["diagnose", "repair"] {
        let ended = node.bindguard([verb, "--pod", "web"])?;
        ensure!(
            ended.code() == 2 && ended.stderr.contains("say which, default/web or other/web"),
            "{ended:?}"
        );
    }
    let nothing = node.bindguard(["diagnose", "--pod", "other/web"])?;
    ensure!(
        nothing.code() == 0 && nothing.stdout.starts_with("0 checked"),
        "{nothing:?}"
    );
    cri.remove_pod(&namesake)?;
    let other = node.bindguard(["diagnose", "--pod", "other/web"])?;
    ensure!(other.code() == 2, "{other:?}");
    let repaired = node.bindguard(["repair", "--pod", "default/web"])?;
    ensure!(
        repaired.code() == 0 && repaired.stdout.contains("re-bound"),
        "{repaired:?}"
    );
    a_container_that_does_not_run(node, subpath.target())?;
    subpath.bind()?;
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

/// The kubelet unmounts and binds anew before it starts the container: between the two nothing is
/// wrong.
fn a_container_that_does_not_run(node: &Node, target: &Path) -> Result<()> {
    host(["umount".as_ref(), target.as_os_str()])?;
    let ended = node.bindguard(["diagnose", "--pod", "uid-named"])?;
    ensure!(
        ended.code() == 0 && !ended.stdout.contains("unmounted"),
        "{ended:?}"
    );
    let all = node.bindguard(["diagnose", "--pod", "uid-named", "--all"])?;
    ensure!(
        all.code() == 0 && all.stdout.contains("no running container uses it"),
        "{all:?}"
    );
    Ok(())
}
