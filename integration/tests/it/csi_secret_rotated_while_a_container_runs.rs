//! A CSI driver that rotates a secret as the kubelet does (secrets-store, cert-manager): a running
//! container gets the new files of its subPaths, if no container of its pod may write the volume.

use bindguard_integration::journal;
use bindguard_integration::kubelet::{Subpath, Volume};
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use bindguard_integration::waiting::stays;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const OPTED_IN: [(&str, &str); 1] = [("bindguard.io/refresh", "true")];

fn story(generation: Generation) {
    Setup::on(generation).cri().story(rotation);
}

on_newest_and_older!(story);

/// With the stock shim and with bindguard's.
fn rotation(node: &Node) -> Result<()> {
    let _agent = Agent::start(node, "")?;
    for runtime in ["runc", "bindguard"] {
        rotated_files_reach_the_container(node, runtime)?;
        a_volume_that_an_init_container_wrote_stays(node, runtime)?;
    }
    Ok(())
}

fn payload(text: &str) -> [(&str, &str); 2] {
    [("tls.crt", text), ("folder/key", text)]
}

fn read_only(subpath: &Subpath, place: &str) -> Result<Mount> {
    Ok(Mount {
        readonly: true,
        ..mount(subpath.bind()?, place, PropagationPrivate)
    })
}

fn mounts(volume: &Volume) -> Result<[Mount; 2]> {
    Ok([
        read_only(&volume.subpath("app", 0, "tls.crt"), "/etc/tls.crt")?,
        read_only(&volume.subpath("app", 1, "folder"), "/etc/tls")?,
    ])
}

fn rotated_files_reach_the_container(node: &Node, runtime: &str) -> Result<()> {
    let (cri, uid) = (node.cri()?, format!("uid-tls-{runtime}"));
    let pod = node.kubelet().pod(&uid)?;
    let volume = pod.volume(VolumeKind::InlineCsi, "tls", &payload("one"))?;
    let sandbox = cri.run_annotated_pod(runtime, "tls", &uid, &OPTED_IN)?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts(&volume)?)?;
    for text in ["two", "three"] {
        volume.update_during_a_repair(&payload(text))?;
        for path in ["/etc/tls.crt", "/etc/tls/key"] {
            until(&format!("{path} is {text}"), || {
                Ok(cri.read(&app, path).is_ok_and(|read| read == text))
            })?;
        }
    }
    let written = cri.exec(&app, &["sh", "-c", "echo four > /etc/tls.crt"])?;
    ensure!(written.code != 0, "the new mount is writable");
    cri.remove_pod(&sandbox)?;
    delete_pod(node, &uid)
}

/// The init container ended long ago.
fn a_volume_that_an_init_container_wrote_stays(node: &Node, runtime: &str) -> Result<()> {
    let (cri, uid) = (node.cri()?, format!("uid-init-{runtime}"));
    let pod = node.kubelet().pod(&uid)?;
    let volume = pod.volume(VolumeKind::InlineCsi, "tls", &payload("one"))?;
    let sandbox = cri.run_annotated_pod(runtime, "init", &uid, &OPTED_IN)?;
    let whole = mount(volume.path(), "/tls", PropagationPrivate);
    let init = cri.start_container(&sandbox, "init", &["true"], &[whole])?;
    cri.wait_for_exit(&init)?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts(&volume)?)?;
    volume.update_during_a_repair(&payload("two"))?;
    let refused = || -> Result<Vec<Value>> {
        let lines = journal::lines(JOURNAL)?.into_iter();
        let of_app = lines.filter(|line| line["kind"] == "refresh" && line["id"] == app.as_str());
        let mounts = of_app.flat_map(|line| line["mounts"].as_array().cloned().unwrap_or_default());
        let is_refused = |it: &Value| it["outcome"]["reason"] == "writable-volume";
        Ok(mounts.filter(is_refused).collect())
    };
    until("both refusals are journaled", || Ok(refused()?.len() >= 2))?;
    let second = Duration::from_secs(1);
    stays(
        second,
        "the old file stays, and each refusal is one line",
        || Ok(cri.read(&app, "/etc/tls.crt")? == "one" && refused()?.len() == 2),
    )?;
    let seen = node.bindguard(["diagnose", "--pod", "default/init"])?;
    ensure!(
        seen.code() == 1 && seen.stdout.contains("/etc/tls.crt"),
        "{seen:?}"
    );
    let by_hand = node.bindguard(["refresh", "--pod", "default/init"])?;
    let words = "is a CSI volume that a container of the pod may write";
    ensure!(
        by_hand.code() == 1 && by_hand.stdout.matches(words).count() == 2,
        "{by_hand:?}"
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, &uid)
}
