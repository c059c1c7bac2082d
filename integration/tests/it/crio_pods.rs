//! CRI-O: it reads the drop-in that `bindguard install crio` writes, pods that request the runtime
//! `bindguard` survive a configMap's update, and its socket names them. Without CRI-O the drop-in
//! is held against what crio.conf(5) says.

use bindguard_integration::crio::{Crio, missing};
use bindguard_integration::prelude::*;
use bindguard_integration::privilege;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const DROP_IN: &str = "/etc/crio/crio.conf.d/zz-bindguard.conf";
const GUARD: &str = "/usr/local/bin/bindguard-runtime";
const SLEEP: [&str; 2] = ["sleep", "1000000"];

/// The keys of a runtime's table, as crio.conf(5) of CRI-O 1.30 lists them under
/// CRIO.RUNTIME.RUNTIMES, and what both of ours have to be.
#[test]
fn the_drop_in_is_as_the_manual_says() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        for (words, default) in [
            (&["install", "crio"][..], None),
            (&["install", "crio", "--default"], Some("bindguard")),
        ] {
            node.bindguard(words)?.success()?;
            let text = fs::read_to_string(DROP_IN).with_context(|| format!("read {DROP_IN}"))?;
            let tables: Vec<&str> = text.lines().filter(|line| line.starts_with('[')).collect();
            let expected: &[&str] = match default {
                None => &["[crio.runtime.runtimes.bindguard]"],
                Some(_) => &["[crio.runtime]", "[crio.runtime.runtimes.bindguard]"],
            };
            ensure!(
                expected.iter().all(|table| tables.contains(table)),
                "{text}"
            );
            let mut keys: Vec<&str> = text.lines().filter(|line| line.contains(" = ")).collect();
            keys.sort_unstable();
            let ours = [
                "runtime_path = \"/usr/local/bin/bindguard-runtime\"",
                "runtime_type = \"oci\"",
            ];
            let named = default.map(|_| "default_runtime = \"bindguard\"");
            ensure!(
                keys.iter().copied().eq(named.into_iter().chain(ours)),
                "{text}"
            );
        }
        node.bindguard(["uninstall"])?;
        ensure!(fs::metadata(DROP_IN).is_err(), "{DROP_IN} is left");
        Ok(())
    });
}

#[test]
fn pods() {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).bare().story(|node| {
        let mut crio = Crio::on(node)?;
        node.bindguard(["install", "crio"])?.success()?;
        become_runc(node)?;
        let config = crio.effective_config()?;
        for part in [
            "[crio.runtime.runtimes.bindguard]",
            "runtime_path = \"/usr/local/bin/bindguard-runtime\"",
        ] {
            ensure!(
                config.contains(part),
                "CRI-O does not have {part} in force: {config}"
            );
        }
        survives_an_update(node, &mut crio, "bindguard")?;
        node.bindguard(["install", "crio", "--default"])?
            .success()?;
        survives_an_update(node, &mut crio, "")
    });
}

/// CRI-O looks the handler of a pod up at each start of a container. So the handler stays until the
/// last pod of it has gone, and the programs until the last pod under them.
#[test]
fn removed_while_pods_run() {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).bare().story(|node| {
        let mut crio = Crio::on(node)?;
        node.bindguard(["install", "crio", "--default"])?
            .success()?;
        become_runc(node)?;
        let cri = crio.restart()?;
        let by_class = cri.run_pod("bindguard", "by-class", "uid-class")?;
        let first = cri.start_container(&by_class, "app", &SLEEP, &[])?;
        let by_default = cri.run_pod("", "by-default", "uid-default")?;
        cri.start_container(&by_default, "app", &SLEEP, &[])?;

        let removed = node.bindguard(["uninstall"])?;
        ensure!(
            removed.code() == 1
                && removed
                    .stdout
                    .contains("handler bindguard kept for 1 pod (default/by-class)"),
            "{removed:?}"
        );
        let text = fs::read_to_string(DROP_IN)?;
        ensure!(
            !text.contains("default_runtime"),
            "the default stays: {text}"
        );
        let cri = crio.restart()?;
        cri.stop(&first, 0)?;
        cri.remove(&first)?;
        cri.start_container(&by_class, "app", &SLEEP, &[])?;
        kept(node, 1, 2)?;

        cri.remove_pod(&by_class)?;
        let collected = node.bindguard(["uninstall"])?;
        ensure!(
            collected.code() == 1 && !fs::exists(DROP_IN)?,
            "the handler stays without a pod: {collected:?}"
        );
        let cri = crio.restart()?;
        until("the conmon of the removed pod has ended", || {
            Ok(node
                .bindguard(["uninstall"])?
                .stdout
                .contains("programs kept for 1 pod"))
        })?;
        kept(node, 0, 1)?;
        cri.remove_pod(&by_default)?;
        until("nothing needs the programs", || {
            Ok(node.bindguard(["uninstall"])?.code() == 0)
        })?;
        for left in [GUARD, "/var/lib/bindguard"] {
            ensure!(!fs::exists(left)?, "{left} is left");
        }
        Ok(())
    });
}

fn kept(node: &Node, handler: usize, programs: usize) -> Result<()> {
    let status = node.bindguard(["status", "--json"])?.stdout;
    let status: Value = serde_json::from_str(&status)?;
    let wanted = json!({ "handler_kept_for_pods": handler, "programs_kept_for_pods": programs });
    ensure!(status["removal"] == wanted, "{status}");
    Ok(())
}

fn survives_an_update(node: &Node, crio: &mut Crio<'_>, handler: &str) -> Result<()> {
    let cri = crio.restart()?;
    let pod = node.kubelet().pod(&format!("uid-crio-{handler}"))?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let sandbox = cri.run_pod(handler, "web", pod.uid())?;
    let first = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;

    let named = node.bindguard([
        "diagnose",
        "--cri",
        "/run/crio/crio.sock",
        "--pod",
        "default/web",
    ])?;
    ensure!(
        named.code() == 1
            && named
                .stdout
                .contains("of pod default/web, container app (running"),
        "{named:?}"
    );

    cri.stop(&first, 0)?;
    cri.remove(&first)?;
    let second = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    ensure!(
        cri.read(&second, "/etc/app.conf")? == "two",
        "the container reads the old file"
    );
    only_a_current_mount(&subpath)?;
    let journal = node
        .bindguard(["journal", "--pod", "default/web"])?
        .success()?;
    ensure!(
        journal.contains("default/web app") && journal.contains("re-bound"),
        "{journal}"
    );
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

/// CRI-O hands no environment on.
fn become_runc(node: &Node) -> Result<()> {
    let text = format!(
        "[runtime]\npath = {:?}\n[kubelet]\nroots = [{:?}]\n",
        node.programs().join("runc"),
        node.kubelet().root()
    );
    fs::write("/etc/bindguard/config.toml", text).context("write bindguard's config")
}
