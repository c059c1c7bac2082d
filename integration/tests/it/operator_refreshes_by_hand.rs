//! `bindguard refresh`: an operator shows a running container the current files, without the agent
//! and without an annotation.

use anyhow::{Result, ensure};
use bindguard_integration::cri::mount;
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup, VolumeKind};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        "conf",
        &[("app.conf", "one"), ("gone.conf", "one")],
    )?;
    let mounts = [
        mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        ),
        mount(
            volume.subpath("app", 1, "gone.conf").bind()?,
            "/etc/gone.conf",
            PropagationPrivate,
        ),
    ];
    let sandbox = cri.run_pod("runc", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let refresh =
        |words: &[&str]| node.bindguard(["refresh", "--pod", "default/web"].iter().chain(words));

    let nothing = refresh(&[])?;
    ensure!(
        nothing.code() == 0 && nothing.stdout.contains("2 files"),
        "{nothing:?}"
    );

    volume.update(&[("app.conf", "two"), ("gone.conf", "two")])?;
    let dry_run = refresh(&["--dry-run"])?;
    ensure!(
        dry_run.code() == 1 && dry_run.stdout.contains("/etc/app.conf of default/web/app"),
        "{dry_run:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "one",
        "a dry run changed something"
    );

    let done = refresh(&[])?;
    ensure!(
        done.code() == 0 && done.stdout.matches("replaced").count() == 2,
        "{done:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "two",
        "the container reads the old file"
    );

    volume.update(&[("app.conf", "three")])?;
    let json = refresh(&["--json"])?;
    let report: serde_json::Value = serde_json::from_str(&json.stdout)?;
    let outcomes: Vec<_> = report["files"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|file| file["outcome"]["result"].as_str())
        .collect();
    ensure!(
        json.code() == 1 && outcomes.contains(&Some("key-gone")),
        "{json:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "three" && cri.read(&app, "/etc/gone.conf")? == "two"
    );

    let journal = node.bindguard(["journal", "--pod", "default/web"])?;
    let found = [
        "refreshed while it runs, by an operator",
        "volume conf on the host, by an operator",
        "key-gone",
    ];
    ensure!(
        journal.code() == 1 && found.iter().all(|words| journal.stdout.contains(words)),
        "{journal:?}"
    );

    let by_id = node.bindguard(["refresh", "--container", &app[..12]])?;
    ensure!(by_id.code() == 1, "{by_id:?}");
    let unknown = node.bindguard(["refresh", "--pod", "default/no-such-pod"])?;
    ensure!(
        unknown.code() == 2 && unknown.stderr.contains("nothing to refresh"),
        "{unknown:?}"
    );
    cri.remove_pod(&sandbox)?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
    })
}
