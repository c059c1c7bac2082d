//! A newcomer's first minutes: each of the README's four ways in, on a fresh node, from the unpacked
//! programs to a container that starts again with the new file. The times are printed, and depend on
//! the machine: no test limits them.

use bindguard_integration::agent::Form;
use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

struct Way {
    name: &'static str,
    handler: &'static str,
    repairs_before_the_start: bool,
}

const THE_AGENT: Way = Way {
    name: "the agent",
    handler: "runc",
    repairs_before_the_start: true,
};
const THE_NRI_PLUGIN: Way = Way {
    name: "the NRI plugin",
    repairs_before_the_start: false,
    ..THE_AGENT
};
const A_RUNTIME_CLASS: Way = Way {
    name: "a RuntimeClass",
    handler: "bindguard",
    ..THE_NRI_PLUGIN
};
const THE_DEFAULT: Way = Way {
    name: "the default of the node",
    handler: "",
    ..THE_NRI_PLUGIN
};

#[test]
fn the_agent() {
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        let start = Instant::now();
        let _agent = Agent::start_as(node, "", Form::Pod)?;
        guarded_pod(node, &THE_AGENT, start)
    });
}

#[test]
fn the_nri_plugin() {
    Setup::on(Generation::NEWEST).bare().nri().story(|node| {
        let start = Instant::now();
        let agent = Agent::start_as(node, "agent.nri.enabled = true\n", Form::Pod)?;
        until("the runtime calls the plugin", || {
            Ok(agent.figure("bindguard_nri_connected") > 0.0)
        })?;
        guarded_pod(node, &THE_NRI_PLUGIN, start)?;
        let creates = ["adjusted", "unchanged"].map(|answer| {
            agent.figure(&format!(
                "bindguard_nri_creates_total{{answer=\"{answer}\"}}"
            ))
        });
        ensure!(creates.iter().sum::<f64>() > 1.0, "it checked {creates:?}");
        Ok(())
    });
}

#[test]
fn a_runtime_class() {
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        let start = Instant::now();
        node.bindguard(["install"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        guarded_pod(node, &A_RUNTIME_CLASS, start)
    });
}

#[test]
fn the_default_of_the_node() {
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        let start = Instant::now();
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        guarded_pod(node, &THE_DEFAULT, start)
    });
}

/// Starts a pod, prints the time until then, and starts its container again after an update. The
/// agent repairs before the start, all others during the start.
fn guarded_pod(node: &Node, way: &Way, start: Instant) -> Result<()> {
    let Way { name, handler, .. } = way;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let cri = node.cri()?;
    let installed = start.elapsed();
    let sandbox = cri.run_pod(handler, "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    print_time(name, installed, start.elapsed());

    volume.update(&[("app.conf", "two")])?;
    if way.repairs_before_the_start {
        until("the agent re-binds", || {
            Ok(only_a_current_mount(&subpath).is_ok())
        })?;
    }
    cri.stop(&app, 0)?;
    cri.remove(&app)?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let read = cri.read(&app, "/etc/app.conf")?;
    ensure!(read == "two", "{name}: the container reads {read:?}");
    cri.remove_pod(&sandbox)?;
    let mut last = Ok(());
    until("the kubelet deletes the pod", || {
        last = node.kubelet().pod("uid-1")?.delete();
        Ok(last.is_ok())
    })?;
    last
}

fn print_time(way: &str, installed: Duration, guarded: Duration) {
    println!(
        "by {way}: ready after {:.1} s, a guarded pod runs after {:.1} s",
        installed.as_secs_f64(),
        guarded.as_secs_f64()
    );
}
