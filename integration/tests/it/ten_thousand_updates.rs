//! Ten thousand updates within seconds: the agent loses none. Afterwards every subpath is current,
//! with exactly one mount.
//!
//! The kernel drops inotify events beyond `fs.inotify.max_queued_events`. An agent that does not
//! read them meanwhile has to survey the node. A running agent follows nearly every update by
//! itself: that takes half a minute, and is a fifth as long in `make test`.

use bindguard_integration::PollingReader;
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use bindguard_testing::rounds;

const PODS: usize = 10;
const VOLUMES: usize = 10;
const UPDATES: usize = 10_000;
/// A new timestamp directory, `..data_tmp`, and its rename to `..data`.
const EVENTS_OF_AN_UPDATE: usize = 3;

#[test]
fn while_the_agent_runs() {
    Setup::on(Generation::NEWEST).story(|node| {
        let updates = rounds(UPDATES / 5, UPDATES);
        let volumes = fill(node)?;
        let agent = Agent::start(node, "")?;
        let readers = volumes
            .iter()
            .step_by(PODS * VOLUMES / 2)
            .map(|(_, subpath)| PollingReader::start(subpath.target()));
        let readers: Vec<PollingReader> = readers.collect();
        update(&volumes, updates)?;
        are_current(&volumes, updates)?;
        for reader in readers {
            let seen = reader.stop();
            ensure!(
                seen.reads > 100 && seen.empty == 0 && seen.failed == 0,
                "a reader saw the file underneath: {seen:?}"
            );
        }
        has_not_failed(&agent)?;
        end(node)
    });
}

#[test]
fn while_the_agent_is_stopped() {
    Setup::on(Generation::NEWEST).story(|node| {
        let volumes = fill(node)?;
        let agent = Agent::start(node, "")?;
        ensure!(
            agent.figure(INTERRUPTIONS) == 0.0,
            "events were lost before the story began"
        );
        agent.stop()?;
        let updates = UPDATES.max(queued_events()? / EVENTS_OF_AN_UPDATE + 1);
        update(&volumes, updates)?;
        let late = volume(node, "late", 0)?;
        late.0.update(&[("key", "1")])?;
        agent.go_on()?;
        are_current(&volumes, updates)?;
        until("the pod that appeared meanwhile is current", || {
            shows(&late.1, "1")
        })?;
        ensure!(
            agent.figure(INTERRUPTIONS) > 0.0,
            "the queue of events did not overflow"
        );
        late.0.update(&[("key", "2")])?;
        until("the pod that appeared meanwhile is watched", || {
            shows(&late.1, "2")
        })?;
        has_not_failed(&agent)?;
        delete_pod(node, "late")?;
        end(node)
    });
}

const INTERRUPTIONS: &str = "bindguard_agent_watch_interruptions_total";

fn queued_events() -> Result<usize> {
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
        .context("read the limit of events")?;
    limit.trim().parse().context("parse the limit of events")
}

fn fill(node: &Node) -> Result<Vec<(Volume, Subpath)>> {
    let places =
        (0..PODS).flat_map(|pod| (0..VOLUMES).map(move |number| (format!("uid-{pod}"), number)));
    places
        .map(|(uid, number)| volume(node, &uid, number))
        .collect()
}

fn volume(node: &Node, uid: &str, number: usize) -> Result<(Volume, Subpath)> {
    let pod = node.kubelet().pod(uid)?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        &format!("conf-{number}"),
        &[("key", "0")],
    )?;
    let subpath = volume.subpath("app", 0, "key");
    subpath.bind()?;
    Ok((volume, subpath))
}

/// Updates the volumes in turn. The number of an update shows which is a volume's last.
fn update(volumes: &[(Volume, Subpath)], updates: usize) -> Result<()> {
    (0..updates).try_for_each(|number| {
        volumes[number % volumes.len()]
            .0
            .update_during_a_repair(&[("key", &number.to_string())])
    })
}

fn are_current(volumes: &[(Volume, Subpath)], updates: usize) -> Result<()> {
    for (number, (volume, subpath)) in volumes.iter().enumerate() {
        let last = (updates - 1 - number) / volumes.len() * volumes.len() + number;
        until("every subpath is current", || {
            shows(subpath, &last.to_string())
        })?;
        until("no old payload is left", || {
            Ok(volume.timestamp_directories()? == 1)
        })?;
    }
    Ok(())
}

fn shows(subpath: &Subpath, content: &str) -> Result<bool> {
    Ok(fs::read_to_string(subpath.target())? == content && only_a_current_mount(subpath).is_ok())
}

fn has_not_failed(agent: &Agent) -> Result<()> {
    for figure in [
        "bindguard_subpath_rebinds_total{outcome=\"failed\"}",
        "bindguard_agent_watch_errors_total",
        "bindguard_agent_thread_restarts_total",
    ] {
        ensure!(
            agent.figure(figure) == 0.0,
            "{figure} is not 0: {}",
            agent.get("/metrics")
        );
    }
    let rebound = agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}");
    ensure!(
        rebound >= (PODS * VOLUMES) as f64,
        "only {rebound} re-binds are counted"
    );
    println!("{rebound} re-binds");
    Ok(())
}

fn end(node: &Node) -> Result<()> {
    (0..PODS).try_for_each(|pod| delete_pod(node, &format!("uid-{pod}")))
}
