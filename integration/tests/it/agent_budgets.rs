//! The node agent on a full node, 110 pods with 550 volumes: memory, wake-ups, and the time until
//! an update is visible.
//!
//! The limits leave room for a busy machine; the figures are printed with `--nocapture`.

use bindguard_integration::footprint::{Footprint, context_switches};
use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::prelude::*;
use bindguard_integration::waiting::{LIMIT, until_within};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const PODS: usize = 110;
const VOLUMES: usize = 5;

#[test]
#[ignore = "measures the programs of a release: make bench"]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

/// The same memory with a connection to the API server, over which events went.
#[test]
#[ignore = "measures the programs of a release: make bench"]
fn with_an_api_server_on_the_newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        fill(node)?;
        let api = KubeApi::start_with_tls()?;
        let config = "agent.events = { mode = 'all', requests-per-minute = 600 }\n";
        let agent = Agent::start_with_account(node, config, &api)?;
        in_a_running_container(node)?;
        until("events are written", || {
            Ok(agent.figure("bindguard_events_total{result=\"written\"}") >= 3.0)
        })?;
        // an idle connection is closed after 20 s, and no event waits any more
        until_within(Duration::from_secs(90), "all events are written", || {
            let before = api.requests().len();
            thread::sleep(Duration::from_secs(22));
            Ok(api.requests().len() == before)
        })?;
        idle(&agent)
    });
}

fn story(node: &Node) -> Result<()> {
    let volumes = fill(node)?;
    let began = Instant::now();
    let agent = Agent::start(node, "")?;
    println!(
        "start until ready, {} volumes: {:?}",
        volumes.len(),
        began.elapsed()
    );
    idle(&agent)?;
    one_after_the_other(&volumes)?;
    all_at_once(&volumes)?;
    in_a_running_container(node)
}

fn fill(node: &Node) -> Result<Vec<(Volume, Subpath)>> {
    let mut volumes = Vec::new();
    for pod in 0..PODS {
        let pod = node.kubelet().pod(&format!("uid-{pod}"))?;
        for volume in 0..VOLUMES {
            let volume = pod.volume(
                VolumeKind::ConfigMap,
                &format!("conf-{volume}"),
                &[("key", "0")],
            )?;
            let subpath = volume.subpath("app", 0, "key");
            subpath.bind()?;
            volumes.push((volume, subpath));
        }
    }
    Ok(volumes)
}

fn idle(agent: &Agent) -> Result<()> {
    // The checks a moment after the start are over.
    thread::sleep(Duration::from_secs(2));
    let woken = || -> Result<u64> {
        let before = context_switches(agent.pid())?;
        thread::sleep(Duration::from_secs(5));
        Ok(context_switches(agent.pid())? - before)
    };
    // The last event or re-bind may still have a timer.
    until("nothing wakes the agent for 5 s", || Ok(woken()? == 0))?;
    // The agent of a parallel test shares the program's pages, and halves the PSS of this agent. A
    // node has one agent.
    let footprint = Footprint::of(agent.pid())?;
    println!(
        "idle: {} KiB, {} threads, no wake-up in 5 s",
        footprint.rss_kib, footprint.threads
    );
    ensure!(
        footprint.rss_kib <= 8 << 10,
        "more than 8 MiB: {footprint:?}"
    );
    Ok(())
}

fn one_after_the_other(volumes: &[(Volume, Subpath)]) -> Result<()> {
    let mut times = Vec::new();
    for (volume, subpath) in volumes.iter().take(100) {
        let began = Instant::now();
        volume.update(&[("key", "1")])?;
        times.push(visible(subpath, "1", began)?);
    }
    report(
        "host, update until visible",
        &mut times,
        Duration::from_millis(50),
    )
}

fn all_at_once(volumes: &[(Volume, Subpath)]) -> Result<()> {
    let began = Instant::now();
    for (volume, _) in volumes {
        volume.update(&[("key", "2")])?;
    }
    let written = began.elapsed();
    for (_, subpath) in volumes {
        visible(subpath, "2", began)?;
    }
    println!(
        "host, {} updates: written after {written:?}, all visible after {:?}",
        volumes.len(),
        began.elapsed()
    );
    ensure!(
        began.elapsed() < written + Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    Ok(())
}

fn in_a_running_container(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-live")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("key", "0")])?;
    let mounts = [mount(
        volume.subpath("app", 0, "key").bind()?,
        "/etc/key",
        PropagationPrivate,
    )];
    let sandbox = cri.run_annotated_pod(
        "runc",
        "live",
        pod.uid(),
        &[("bindguard.io/refresh", "true")],
    )?;
    let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    let path = format!("/proc/{}/root/etc/key", cri.pid(&app)?);
    let mut times = Vec::new();
    for number in 1..=100 {
        let number = number.to_string();
        let began = Instant::now();
        volume.update(&[("key", &number)])?;
        until("the container reads it", || {
            Ok(fs::read_to_string(&path)? == number)
        })?;
        times.push(began.elapsed());
    }
    report(
        "running container, update until visible",
        &mut times,
        Duration::from_millis(200),
    )?;
    cri.remove_pod(&sandbox)?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-live")?.delete().is_ok())
    })
}

/// The time from `began` until the host's subpath has this content.
fn visible(subpath: &Subpath, content: &str, began: Instant) -> Result<Duration> {
    while fs::read_to_string(subpath.target())? != content {
        ensure!(
            began.elapsed() < LIMIT,
            "{} is not re-bound",
            subpath.target().display()
        );
    }
    Ok(began.elapsed())
}

fn report(what: &str, times: &mut [Duration], limit: Duration) -> Result<()> {
    times.sort();
    let (median, last) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("{what}: median {median:?}, 99th percentile {last:?}");
    ensure!(median < limit, "{what}: the median is {median:?}");
    Ok(())
}
