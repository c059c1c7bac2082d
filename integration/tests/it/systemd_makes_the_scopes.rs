//! systemd as cgroup manager: a container is a scope of systemd's with the container's limits, what
//! is executed in it is in the scope, too, and the scope goes with the container, whichever process
//! ends it.

use bindguard_integration::prelude::*;
use bindguard_integration::shim::Shim;
use bindguard_integration::systemd::{property, units};
use bindguard_integration::{on_every_generation, on_every_generation_with_systemd};

const AT_THE_START: u64 = 64 << 20;
const UPDATED: u64 = 96 << 20;

on_every_generation_with_systemd!(|setup: Setup| setup.story(containers_are_scopes));

fn containers_are_scopes(node: &Node) -> Result<()> {
    let before = Leftovers::of(node)?;
    for runtime in [Runtime::Stock, Runtime::Bindguard, Runtime::Wrapper] {
        lives_in_its_scope(node, runtime).with_context(|| format!("{runtime:?}"))?;
    }
    for runtime in [Runtime::Stock, Runtime::Bindguard] {
        systemd_ends_it(node, runtime).with_context(|| format!("{runtime:?}"))?;
        create_fails(node, runtime).with_context(|| format!("{runtime:?}"))?;
    }
    before.are_all(node)
}

mod pods_with_systemd {
    use super::*;

    on_every_generation!(|generation| Setup::on(generation)
        .cri()
        .systemd()
        .story(pods_are_in_their_slices));
}

fn pods_are_in_their_slices(node: &Node) -> Result<()> {
    ["bindguard", "bindguard-path"]
        .iter()
        .try_for_each(|handler| pod_is_in_its_slice(node, handler).context(*handler))
}

/// By containerd's options, and by the path alone where the handler has none.
fn pod_is_in_its_slice(node: &Node, handler: &str) -> Result<()> {
    let cri = node.cri()?;
    let pod = cri.run_pod(handler, "web", &format!("uid-{handler}"))?;
    let app = cri.start_container(&pod, "app", &["sleep", "1000000"], &[])?;
    let pids = node.ctr().in_namespace("k8s.io").pids()?;
    for id in [pod.id(), &app] {
        let scope = format!("cri-containerd-{id}.scope");
        let place = place(node, &scope)?;
        let init = pids.get(id).with_context(|| format!("no pid of {id}"))?;
        let groups =
            fs::read_to_string(format!("/proc/{init}/cgroup")).context("read its cgroup")?;
        ensure!(groups == format!("0::{place}\n"), "it is in {groups}");
        ensure!(property(&scope, "ControlGroup")? == place);
    }
    cri.remove_pod(&pod)?;
    [pod.id(), &app]
        .iter()
        .try_for_each(|id| is_gone(&format!("cri-containerd-{id}.scope")))
}

fn lives_in_its_scope(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let scope = scope(node, "web");
    let place = place(node, &scope)?;
    ctr.container("web")
        .runtime(runtime)
        .argument("--memory-limit")
        .argument(&AT_THE_START.to_string())
        .start()?
        .success()?;
    ensure!(property(&scope, "ControlGroup")? == place);
    ensure!(property(&scope, "MemoryMax")? == AT_THE_START.to_string());
    ensure!(limit(&place)? == AT_THE_START.to_string());

    run(ctr.command(&[
        "task",
        "exec",
        "--detach",
        "--exec-id",
        "more",
        "web",
        "sleep",
        "1000000",
    ]))?
    .success()?;
    let members = members(&place)?;
    ensure!(
        members.len() == 2,
        "an init and an exec are not both in {place}: {members:?}"
    );
    ensure!(members.contains(&ctr.pid("web")?), "{members:?}");

    // the stock shim's own socket is not used
    if runtime == Runtime::Bindguard {
        Shim::of_container(node, "web")?
            .connect()?
            .update("web", &json!({"memory": {"limit": UPDATED}}))?;
        ensure!(property(&scope, "MemoryMax")? == UPDATED.to_string());
        ensure!(limit(&place)? == UPDATED.to_string());
    }
    ctr.remove("web")?;
    is_gone(&scope)
}

/// `systemctl stop` of a scope, or a shutdown: the container's processes get SIGTERM.
fn systemd_ends_it(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let scope = scope(node, "signalled");
    let traps = "trap 'exit 7' TERM; touch /ready; while :; do sleep 0.1; done";
    ctr.container("signalled")
        .runtime(runtime)
        .runs(&["sh", "-c", traps])
        .start()?
        .success()?;
    until("the trap is set", || {
        Ok(ctr.exec("signalled", &["test", "-e", "/ready"])?.code() == 0)
    })?;
    host(["systemctl", "stop", &scope])?;
    ctr.wait_for_status("signalled", "STOPPED")?;
    is_gone(&scope)?;
    // `ctr` warns of it, and exits with 0
    let ended = run(ctr.command(&["task", "delete", "signalled"]))?;
    ensure!(
        ended.stderr.contains("non-zero exit code 7"),
        "its status is lost: {ended:?}"
    );
    ctr.forget("signalled")
}

fn create_fails(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("none")
        .runtime(runtime)
        .runs(&["/no/such/program"])
        .start()?
        .failure()?;
    is_gone(&scope(node, "none"))?;
    ctr.forget("none")
}

fn scope(node: &Node, id: &str) -> String {
    format!("{}-{id}.scope", node.name())
}

/// The cgroup of a scope.
fn place(node: &Node, scope: &str) -> Result<String> {
    Ok(format!(
        "/{}/{scope}",
        node.slice().context("the node's slice")?
    ))
}

/// The processes of a scope. crun makes the cgroup `container` within the scope, for the
/// container's processes.
fn members(place: &str) -> Result<Vec<u32>> {
    let folder = Path::new("/sys/fs/cgroup").join(&place[1..]);
    let of_crun = folder.join("container");
    let file = if of_crun.exists() { of_crun } else { folder }.join("cgroup.procs");
    let pids = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    pids.lines()
        .map(|pid| pid.parse().context("read a pid"))
        .collect()
}

fn limit(place: &str) -> Result<String> {
    let file = format!("/sys/fs/cgroup{place}/memory.max");
    Ok(fs::read_to_string(&file)
        .with_context(|| format!("read {file}"))?
        .trim()
        .to_owned())
}

/// systemd learns of the end from the kernel, a moment later.
fn is_gone(scope: &str) -> Result<()> {
    until("the scope is gone", || Ok(units(scope)?.is_empty()))
}
