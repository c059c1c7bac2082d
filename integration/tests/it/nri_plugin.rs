//! The node agent as an NRI plugin, with the stock shim: what a node gets whose containerd cannot
//! be configured.
//!
//! The agent's watcher would re-bind the same subpaths. So the node's policy only reports them
//! here, and the pods request a repair by annotation: the watcher follows the node's policy, the
//! plugin the pod's.

use bindguard_integration::prelude::*;
use std::io::{BufRead, BufReader};

use bindguard_integration::agent::Form;
use bindguard_integration::doc_commands::repository;
use bindguard_integration::memory_limit::MemoryLimit;
use bindguard_integration::node::HostRoot;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::{PropagationHostToContainer, PropagationPrivate};

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const STOCK: &str = "runc";
const ADJUSTED: &str = "bindguard_nri_creates_total{answer=\"adjusted\"}";
const PLUGIN: &str = "agent.nri.enabled = true\n";
const REPAIRS_BY_ANNOTATION: &str =
    "agent.nri.enabled = true\nchecks.stale-subpaths = 'report'\nannotations.mode = true\n";

/// Makes a test for each generation with NRI: off by default in 1.7, on by default in 2.1.
macro_rules! on_generations_with_nri {
    ($name:ident, $host_root:expr, $story:path) => {
        mod $name {
            use super::*;

            #[test]
            fn containerd_1_7() {
                Setup::on(Generation::V1_7)
                    .nri()
                    .host_root($host_root)
                    .story($story);
            }
            #[test]
            fn newest_containerd() {
                Setup::on(Generation::NEWEST)
                    .nri()
                    .host_root($host_root)
                    .story($story);
            }
        }
    };
}

on_generations_with_nri!(
    a_container_restarts_with_the_new_file,
    HostRoot::Shared,
    configmap_update_then_restart
);
on_generations_with_nri!(host_root_becomes_rslave, HostRoot::Shared, host_root);
on_generations_with_nri!(
    a_private_host_root_is_left_as_it_is,
    HostRoot::Private,
    private_host_root
);
on_generations_with_nri!(policy_refuses, HostRoot::Shared, refused);
on_generations_with_nri!(
    with_the_shim_everything_happens_once,
    HostRoot::Shared,
    shim_and_plugin
);
on_generations_with_nri!(two_plugins_during_a_rollout, HostRoot::Shared, two_plugins);
on_generations_with_nri!(creates_outlive_the_plugin, HostRoot::Shared, broken_plugin);
on_generations_with_nri!(
    policy_refuses_unchecked_mounts,
    HostRoot::Shared,
    many_mounts
);

/// Also a check of the mounts that a later plugin adds: containerd 2.3 and newer.
#[test]
fn policy_refuses_a_later_plugins_mount() {
    Setup::on(Generation::NEWEST).nri().story(later_plugin);
}

#[test]
fn pods_that_require_the_plugin() {
    Setup::on(Generation::NEWEST).nri().story(required_plugin);
}

fn configmap_update_then_restart(node: &Node) -> Result<()> {
    let _agent = Agent::start_as(node, REPAIRS_BY_ANNOTATION, Form::Pod)?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(
        subpath.bind()?,
        "/etc/app/app.conf",
        PropagationPrivate,
    )];
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let sandbox =
        cri.run_annotated_pod(STOCK, "web", pod.uid(), &[("bindguard.io/mode", "repair")])?;
    let mut app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    for content in ["two", "three"] {
        volume.update(&[("app.conf", content)])?;
        cri.stop(&app, 0)?;
        cri.remove(&app)?;
        app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        ensure!(
            cri.read(&app, "/etc/app/app.conf")? == content,
            "the restarted container reads something old"
        );
        only_a_current_mount(&subpath)?;
    }
    until("the repair is journaled", || {
        Ok(journaled(&app, "rebound") == 1)
    })?;
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

fn host_root(node: &Node) -> Result<()> {
    let _agent = Agent::start(node, PLUGIN)?;
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let sandbox = cri.run_pod(STOCK, "exporter", "uid-2")?;
    // Three binds at once: a read-only bind, a private bind, and a bind that is already rslave.
    let read_only = Mount {
        readonly: true,
        ..mount("/".as_ref(), "/ro", PropagationPrivate)
    };
    let mounts = [
        read_only,
        mount("/".as_ref(), "/host", PropagationPrivate),
        mount("/var/lib".as_ref(), "/slave", PropagationHostToContainer),
    ];
    let id = cri.start_container(&sandbox, "exporter", &SLEEP, &mounts)?;
    for place in ["/host", "/ro", "/slave"] {
        ensure!(
            mount_line(&cri, &id, place)?.contains(" master:"),
            "the host's umounts do not reach {place}"
        );
    }
    ensure!(
        mount_line(&cri, &id, "/ro")?.contains(" ro,"),
        "the read-only bind became writable"
    );
    cri.remove_pod(&sandbox)
}

/// An adjustment would make containerd fail the create.
fn private_host_root(node: &Node) -> Result<()> {
    let _agent = Agent::start(node, PLUGIN)?;
    let cri = node.cri()?;
    node.wait_for_log("that the plugin is registered", is_synchronized)?;
    let sandbox = cri.run_pod(STOCK, "exporter", "uid-3")?;
    for attempt in 0..5 {
        let host = [mount("/".as_ref(), "/host", PropagationPrivate)];
        let id = cri.start_container(&sandbox, &format!("exporter-{attempt}"), &SLEEP, &host)?;
        ensure!(
            !mount_line(&cri, &id, "/host")?.contains(" master:"),
            "a slave of a private mount"
        );
    }
    cri.remove_pod(&sandbox)
}

fn refused(node: &Node) -> Result<()> {
    let _agent = Agent::start(
        node,
        &format!("{PLUGIN}checks.unmounted-volumes = 'refuse'\n"),
    )?;
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let volume = node
        .kubelet()
        .root()
        .join("pods/uid-4/volumes/kubernetes.io~nfs/data");
    fs::create_dir_all(&volume).context("make a volume that is not mounted")?;
    let sandbox = cri.run_pod(STOCK, "writer", "uid-4")?;
    let created = cri.start_container(
        &sandbox,
        "writer",
        &SLEEP,
        &[mount(&volume, "/data", PropagationPrivate)],
    );
    let error = format!("{:#}", created.err().context("the container was created")?);
    for words in [
        "bindguard refuses the container",
        "volume data (kubernetes.io~nfs) of pod uid-4",
    ] {
        ensure!(
            error.contains(words),
            "the error does not say {words:?}: {error}"
        );
    }
    cri.start_container(&sandbox, "other", &SLEEP, &[])?;
    cri.remove_pod(&sandbox)
}

/// Requests below and above 4 MiB, the limit of NRI, to a plugin with the memory of the unit and of
/// the chart. If the kernel killed it, or if it did not answer, the runtime would create the
/// container. containerd 2.1 sends no request above the limit, and fails.
fn many_mounts(node: &Node) -> Result<()> {
    let config = format!("{PLUGIN}checks.unmounted-volumes = 'refuse'\n");
    let agent = Agent::start(node, &config)?;
    let limit = MemoryLimit::of(agent.pid(), 64 << 20)?;
    // The agent ends first: the cgroup must be empty.
    let limited = (agent, limit);
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let pod = node.kubelet().root().join("pods/uid-8");
    let volume = pod.join("volumes/kubernetes.io~empty-dir/v");
    fs::create_dir_all(&volume).context("make a volume")?;
    let sandbox = cri.run_pod(STOCK, "many", "uid-8")?;
    // The source, the place, the type and three options.
    let bytes_of_mount = volume.as_os_str().len() + 52;
    for (size, reasons) in [
        (3_600_000, ["were not checked", "were not checked"]),
        (
            4_600_000,
            ["could not check", "exceed maximum message size"],
        ),
    ] {
        let mounts: Vec<Mount> = (0..size / bytes_of_mount)
            .map(|place| mount(&volume, &format!("/mounts/{place}"), PropagationPrivate))
            .collect();
        let created = cri.create_container(&sandbox, "many", &SLEEP, &mounts);
        ensure!(limited.1.killed()? == 0, "the kernel killed the agent");
        let error = format!("{:#}", created.err().context("the container was created")?);
        ensure!(
            reasons.iter().any(|reason| error.contains(reason)),
            "{error}"
        );
    }
    cri.start_container(&sandbox, "other", &SLEEP, &[])?;
    drop(limited);
    cri.remove_pod(&sandbox)
}

/// A plugin that was registered later adds a bind of a volume that is not mounted.
fn later_plugin(node: &Node) -> Result<()> {
    let agent = Agent::start(
        node,
        &format!("{PLUGIN}checks.unmounted-volumes = 'refuse'\n"),
    )?;
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let volumes = node.kubelet().root().join("pods/uid-9/volumes");
    let [mounted, unmounted] = ["kubernetes.io~empty-dir/data", "kubernetes.io~nfs/data"];
    let sandbox = cri.run_pod(STOCK, "web", "uid-9")?;
    for (volume, is_refused) in [(mounted, false), (unmounted, true)] {
        let source = volumes.join(volume);
        fs::create_dir_all(&source).context("make a volume")?;
        let later = LaterPlugin::start(node, &source)?;
        let host = [mount("/".as_ref(), "/host", PropagationPrivate)];
        let created = cri.start_container(&sandbox, "app", &SLEEP, &host);
        drop(later);
        if is_refused {
            let error = format!("{:#}", created.err().context("the container was created")?);
            for words in [
                "bindguard refuses the container",
                "volume data (kubernetes.io~nfs)",
            ] {
                ensure!(error.contains(words), "no {words:?} in: {error}");
            }
            continue;
        }
        let id = created?;
        for place in ["/host", LATER] {
            mount_line(&cri, &id, place)?;
        }
        ensure!(
            journaled(&id, "made-rslave") == 1,
            "the create is journaled twice"
        );
        cri.stop(&id, 0)?;
        cri.remove(&id)?;
    }
    let figures = agent.get("/metrics");
    let refused = "bindguard_nri_creates_total{answer=\"refused\"} 1\n";
    ensure!(figures.contains(refused), "{figures}");
    let proven = "bindguard_unproven_binds_total 0\n";
    ensure!(
        figures.contains(proven),
        "the later bind is not proven: {figures}"
    );
    cri.remove_pod(&sandbox)
}

/// containerd's own validator refuses the pod's containers while the plugin is absent. A create
/// during which the plugin ends fails too, where policy refuses unchecked mounts.
fn required_plugin(node: &Node) -> Result<()> {
    let mut config = fs::read_to_string(node.containerd_config())?;
    config.push_str("[plugins.\"io.containerd.nri.v1.nri\".default_validator]\nenable = true\n");
    fs::write(node.containerd_config(), config).context("turn the validator on")?;
    node.restart_containerd(Signal::SIGTERM)?;
    let cri = node.cri()?;
    let required = [("required-plugins.noderesource.dev", "[\"bindguard\"]")];
    let sandbox = cri.run_annotated_pod(STOCK, "web", "uid-10", &required)?;
    let other = cri.run_pod(STOCK, "other", "uid-11")?;
    let error = cri
        .start_container(&sandbox, "app", &SLEEP, &[])
        .err()
        .context("the container was created without the plugin")?;
    ensure!(
        format!("{error:#}").contains("required plugin"),
        "{error:#}"
    );
    cri.start_container(&other, "app", &SLEEP, &[])?;
    let refuses = format!("{PLUGIN}checks.unmounted-volumes = 'refuse'\n");
    let agent = Agent::start(node, &refuses)?;
    wait_for_plugin(&cri)?;
    let id = cri.start_container(&sandbox, "app", &SLEEP, &[])?;
    cri.stop(&id, 0)?;
    cri.remove(&id)?;
    drop(agent);

    let pods = node.kubelet().root().join("pods");
    let volume = pods.join("uid-10/volumes/kubernetes.io~nfs/data");
    fs::create_dir_all(&volume).context("make a volume that is not mounted")?;
    let unmounted = [mount(&volume, "/data", PropagationPrivate)];
    for delay in (0..16).map(|step| Duration::from_millis(step * 3)) {
        let agent = Agent::start(node, &refuses)?;
        wait_for_plugin(&cri)?;
        let pid = pid(&agent)?;
        let killer = thread::spawn(move || {
            thread::sleep(delay);
            kill(pid, Signal::SIGKILL)
        });
        let created = cri.create_container(&sandbox, "unchecked", &SLEEP, &unmounted);
        ensure!(
            matches!(killer.join(), Ok(Ok(()))),
            "the plugin ended before it was killed"
        );
        ensure!(
            created.is_err(),
            "created while the plugin was killed after {delay:?}"
        );
    }
    cri.remove_pod(&other)?;
    cri.remove_pod(&sandbox)
}

/// The place of the bind that the later plugin adds.
const LATER: &str = "/later";

/// A plugin that the runtime calls after the agent.
struct LaterPlugin(Child);

impl LaterPlugin {
    fn start(node: &Node, source: &Path) -> Result<Self> {
        let script = repository().join("integration/nri/adds_a_mount.py");
        let mut command = node.command("/usr/bin/python3")?;
        command
            .arg(script)
            .arg("/var/run/nri/nri.sock")
            .arg(source)
            .arg(LATER);
        let mut plugin = command
            .stdout(Stdio::piped())
            .spawn()
            .context("start a plugin")?;
        let output = plugin.stdout.take().context("a plugin has an output")?;
        let plugin = Self(plugin);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "registered\n", "the runtime refuses the plugin");
        Ok(plugin)
    }
}

impl Drop for LaterPlugin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Both judge the create; the second finds nothing to do. Each finding is counted once.
fn shim_and_plugin(node: &Node) -> Result<()> {
    let agent = Agent::start(node, REPAIRS_BY_ANNOTATION)?;
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let pod = node.kubelet().pod("uid-6")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [
        mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate),
        mount("/".as_ref(), "/host", PropagationPrivate),
    ];
    volume.update(&[("app.conf", "two")])?;
    let sandbox = cri.run_annotated_pod(
        "bindguard",
        "web",
        pod.uid(),
        &[("bindguard.io/mode", "repair")],
    )?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "two",
        "the container reads something old"
    );
    ensure!(
        mount_line(&cri, &app, "/host")?.contains(" master:"),
        "the host's umounts do not reach it"
    );
    only_a_current_mount(&subpath)?;
    until("both journaled the create", || {
        Ok(journaled(&app, "\"id\"") == 2)
    })?;
    for once in ["rebound", "made-rslave"] {
        ensure!(
            journaled(&app, once) == 1,
            "{once} happened {} times",
            journaled(&app, once)
        );
    }
    ensure!(
        journaled(&app, "\"kind\":\"nri-create\"") == 1,
        "the plugin's line is not of its own kind"
    );
    let counted = |family: &str| {
        agent.figure(&format!(
            "{family}{{verdict=\"stale\",outcome=\"rebound\"}}"
        ))
    };
    let (by_shim, by_plugin) = (
        counted("bindguard_admission_binds_total"),
        counted("bindguard_nri_binds_total"),
    );
    ensure!(
        (by_shim, by_plugin) == (0.0, 1.0),
        "the repair is counted {by_shim} and {by_plugin} times"
    );
    ensure!(
        agent.figure("bindguard_admission_seconds_count") >= 1.0,
        "the shim's create is not counted"
    );
    ensure!(
        agent.figure("bindguard_nri_connected") == 1.0 && agent.figure(ADJUSTED) >= 1.0,
        "{}",
        agent.get("/metrics")
    );
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

fn two_plugins(node: &Node) -> Result<()> {
    let _old = Agent::start(node, PLUGIN)?;
    let cri = node.cri()?;
    wait_for_plugin(&cri)?;
    let _new = Agent::start(node, PLUGIN)?;
    until("both are registered", || {
        Ok(node
            .log()?
            .lines()
            .filter(|line| is_synchronized(line))
            .count()
            == 2)
    })?;
    let sandbox = cri.run_pod(STOCK, "exporter", "uid-7")?;
    let mut ids = Vec::new();
    for attempt in 0..5 {
        let host = [mount("/".as_ref(), "/host", PropagationPrivate)];
        let id = cri.start_container(&sandbox, &format!("exporter-{attempt}"), &SLEEP, &host)?;
        ensure!(
            mount_line(&cri, &id, "/host")?.contains(" master:"),
            "the host's umounts do not reach it"
        );
        ids.push(id);
    }
    until("every create is journaled", || {
        Ok(ids.iter().all(|id| journaled(id, "made-rslave") > 0))
    })?;
    ensure!(
        ids.iter().all(|id| journaled(id, "made-rslave") == 1),
        "a mount was adjusted twice"
    );
    cri.remove_pod(&sandbox)
}

/// The plugin is killed a little later in each create, then stopped, then containerd restarts.
fn broken_plugin(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let sandbox = cri.run_pod(STOCK, "web", "uid-5")?;
    let host = [mount("/".as_ref(), "/host", PropagationPrivate)];
    for delay in (0..16).map(|step| Duration::from_millis(step * 3)) {
        let agent = Agent::start(node, PLUGIN)?;
        wait_for_plugin(&cri)?;
        let pid = pid(&agent)?;
        let killer = thread::spawn(move || {
            thread::sleep(delay);
            kill(pid, Signal::SIGKILL)
        });
        let created = cri.start_container(&sandbox, "killed", &SLEEP, &host);
        ensure!(
            matches!(killer.join(), Ok(Ok(()))),
            "the plugin ended before it was killed"
        );
        created.with_context(|| format!("killed after {delay:?}"))?;
    }
    let agent = Agent::start(node, PLUGIN)?;
    wait_for_plugin(&cri)?;
    agent.stop()?;
    for attempt in ["stopped", "closed"] {
        cri.start_container(&sandbox, attempt, &SLEEP, &host)
            .with_context(|| format!("the plugin is {attempt}"))?;
    }
    agent.go_on()?;
    wait_for_plugin(&cri).context("after it was stopped")?;
    cri.remove_pod(&sandbox)?;
    drop(cri);
    node.restart_containerd(Signal::SIGTERM)?;
    wait_for_plugin(&node.cri()?).context("after containerd restarted")
}

/// The number of journal lines about a container that contain these words.
fn journaled(id: &str, words: &str) -> usize {
    let journal = fs::read_to_string(JOURNAL).unwrap_or_default();
    journal
        .lines()
        .filter(|line| line.contains(id) && line.contains(words))
        .count()
}

fn pid(agent: &Agent) -> Result<Pid> {
    Ok(Pid::from_raw(agent.pid().try_into()?))
}

fn is_synchronized(line: &str) -> bool {
    line.contains("synchronizing plugin 99-bindguard")
}

/// Waits until the runtime calls the plugin: a new container's bind of `/` is rslave.
fn wait_for_plugin(cri: &Cri) -> Result<()> {
    let sandbox = cri.run_pod(STOCK, "probe", "uid-probe")?;
    until("containers are adjusted", || is_adjusted(cri, &sandbox))?;
    cri.remove_pod(&sandbox)
}

fn is_adjusted(cri: &Cri, sandbox: &Sandbox) -> Result<bool> {
    let id = cri.start_container(
        sandbox,
        "probe",
        &SLEEP,
        &[mount("/".as_ref(), "/host", PropagationPrivate)],
    )?;
    let is_slave = mount_line(cri, &id, "/host")?.contains(" master:");
    cri.stop(&id, 0)?;
    cri.remove(&id)?;
    Ok(is_slave)
}

fn mount_line(cri: &Cri, id: &str, place: &str) -> Result<String> {
    Ok(cri
        .exec(id, &["grep", &format!(" {place} "), "/proc/self/mountinfo"])?
        .stdout)
}
