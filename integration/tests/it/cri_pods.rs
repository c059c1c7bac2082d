//! Pods as a kubelet runs them, through the CRI: two containers in a shim, a configMap that
//! changes, a container that restarts, a containerd that restarts in between.

use bindguard_integration::prelude::*;
use bindguard_integration::scenes::says_no_such_file;
use bindguard_integration::{on_every_generation, on_every_generation_with_systemd};
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

on_every_generation!(|generation| Setup::on(generation).cri().story(story));

on_every_generation_with_systemd!(|setup: Setup| setup.cri().story(story));

fn story(node: &Node) -> Result<()> {
    stock_handler_fails(node)?;
    host_root(node)?;
    HANDLERS
        .iter()
        .try_for_each(|handler| configmap_update_then_restart(node, handler))
}

const HANDLERS: [&str; 3] = ["bindguard", "bindguard-path", "bindguard-wrapper"];

/// The fault as a pod meets it; it also proves the harness.
fn stock_handler_fails(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-stock")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let mounts = [mount(
        volume.subpath("app", 0, "app.conf").bind()?,
        "/etc/app/app.conf",
        PropagationPrivate,
    )];
    let cri = node.cri()?;
    let sandbox = cri.run_pod("runc", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    let error = restart(&cri, &sandbox, &app, &mounts)
        .err()
        .context("the stock shim restarted it")?;
    let error = format!("{error:#}");
    ensure!(says_no_such_file(&error), "another error: {error}");
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

fn configmap_update_then_restart(node: &Node, handler: &str) -> Result<()> {
    let before = Leftovers::of(node)?;
    let pod = node.kubelet().pod(&format!("uid-{handler}"))?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(
        subpath.bind()?,
        "/etc/app/app.conf",
        PropagationPrivate,
    )];
    let cri = node.cri()?;
    let sandbox = cri.run_pod(handler, "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let side = cri.start_container(
        &sandbox,
        "side",
        &["sh", "-c", "echo hello; exec sleep 1000000"],
        &[],
    )?;
    ensure!(cri.read(&app, "/etc/app/app.conf")? == "one");
    ensure!(
        node.shims()?.len() == 1,
        "{handler}: {} shims for one pod",
        node.shims()?.len()
    );

    volume.update(&[("app.conf", "two")])?;
    node.restart_containerd(Signal::SIGTERM)?;
    let cri = node.cri()?;
    ensure!(
        cri.read(&app, "/etc/app/app.conf")? == "one",
        "a running container keeps its file"
    );
    let app = restart(&cri, &sandbox, &app, &mounts)?;
    ensure!(
        cri.read(&app, "/etc/app/app.conf")? == "two",
        "{handler}: the restarted container reads something old"
    );
    ensure!(
        cri.logs(&side)?.contains("hello"),
        "{handler}: the other container's log is lost"
    );
    ensure!(cri.exec(&side, &["sh", "-c", "exit 4"])?.code == 4);
    only_a_current_mount(&subpath)?;

    cri.remove_pod(&sandbox)?;
    pod.delete()?;
    before.are_all(node).with_context(|| handler.to_owned())
}

/// A node exporter's pod: hostPath `/` without mountPropagation.
fn host_root(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let sandbox = cri.run_pod("bindguard", "node-exporter", "uid-exporter")?;
    let id = cri.start_container(
        &sandbox,
        "exporter",
        &SLEEP,
        &[mount("/".as_ref(), "/host", PropagationPrivate)],
    )?;
    let answer = cri.exec(&id, &["grep", " /host ", "/proc/self/mountinfo"])?;
    ensure!(
        answer.stdout.contains(" master:"),
        "the host's umounts do not reach it: {answer:?}"
    );
    cri.remove_pod(&sandbox)
}

fn restart(cri: &Cri, sandbox: &Sandbox, id: &str, mounts: &[Mount]) -> Result<String> {
    cri.stop(id, 0)?;
    ensure!(
        cri.wait_for_exit(id)? == 137,
        "a killed container's exit code is 137"
    );
    cri.remove(id)?;
    cri.start_container(sandbox, "app", &SLEEP, mounts)
}
