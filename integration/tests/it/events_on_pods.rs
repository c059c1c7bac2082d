//! `kubectl describe pod` shows the agent's events on bindguard's work. With an API server that is
//! down, slow or refuses, everything else works as before.

use bindguard_integration::agent::TOKEN;
use bindguard_integration::kube_api::{Conduct, KubeApi};
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use k8s_cri::v1::MountPropagation::{PropagationHostToContainer, PropagationPrivate};

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const FAST: &str = "agent.events = { mode = 'all', requests-per-minute = 600 }\n";

fn story(generation: Generation) {
    let policy = "[checks]\nunmounted-volumes = \"refuse\"\n";
    Setup::on(generation).cri().policy(policy).story(|node| {
        let api = KubeApi::start()?;
        let agent = Agent::start(node, &config(node, &api, FAST)?)?;
        a_rebind_of_the_agent(node, &api)?;
        a_create_that_is_repaired(node, &api, &agent)?;
        a_create_that_is_refused(node, &api)?;
        a_live_refresh(node, &api)?;
        let written = agent.figure("bindguard_events_total{result=\"written\"}");
        ensure!(written >= 4.0, "{}", agent.get("/metrics"));
        let others = api
            .requests()
            .into_iter()
            .find(|seen| !seen.path.contains("/events"));
        ensure!(
            others.is_none(),
            "the agent requested more than events: {others:?}"
        );
        Ok(())
    });
}

on_newest_and_older!(story);

/// Config of an agent that is a service of the node.
fn config(node: &Node, api: &KubeApi, events: &str) -> Result<String> {
    let kubeconfig = node.disk().join("kubeconfig");
    api.write_config(&kubeconfig)?;
    Ok(format!(
        "{events}agent.kubernetes = {{ kubeconfig = '{}', node = 'node-1' }}\n",
        kubeconfig.display()
    ))
}

/// Waits for an event with this reason on a pod.
fn event(api: &KubeApi, pod: &str, reason: &str) -> Result<Value> {
    let mut found = None;
    let is_it = |event: &Value| event["involvedObject"]["name"] == pod && event["reason"] == reason;
    until(&format!("there is an event {reason} on {pod}"), || {
        found = api.events().into_iter().find(is_it);
        Ok(found.is_some())
    })?;
    found.context("the event is gone")
}

fn a_rebind_of_the_agent(node: &Node, api: &KubeApi) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-rebind")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let sandbox = cri.run_pod("runc", "rebind", pod.uid())?;
    cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    let event = event(api, "rebind", "BindMountRepaired")?;
    let subject = &event["involvedObject"];
    ensure!(
        subject["namespace"] == "default"
            && subject["uid"] == "uid-rebind"
            && subject["kind"] == "Pod",
        "{event}"
    );
    ensure!(subject["fieldPath"] == "spec.containers{app}", "{event}");
    ensure!(
        event["type"] == "Normal" && event["source"]["host"] == "node-1" && event["count"] == 1,
        "{event}"
    );
    let message = event["message"].as_str().unwrap_or_default();
    ensure!(
        message.starts_with("a subPath of volume conf in container app was stale; "),
        "{message}"
    );
    for text in ["three", "four"] {
        until("it is re-bound", || {
            Ok(only_a_current_mount(&subpath).is_ok())
        })?;
        volume.update(&[("app.conf", text)])?;
    }
    until("the event is counted", || {
        Ok(api
            .events()
            .iter()
            .any(|event| event["count"].as_u64() >= Some(2)))
    })?;
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-rebind")
}

/// The agent is stopped while the guard repairs, and finds the create in the journal.
fn a_create_that_is_repaired(node: &Node, api: &KubeApi, agent: &Agent) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-create")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let mounts = [mount(
        volume.subpath("app", 0, "app.conf").bind()?,
        "/etc/app.conf",
        PropagationPrivate,
    )];
    let sandbox = cri.run_pod("bindguard", "create", pod.uid())?;
    agent.stop()?;
    volume.update(&[("app.conf", "two")])?;
    let created = cri.start_container(&sandbox, "app", &SLEEP, &mounts);
    agent.go_on()?;
    created?;
    let event = event(api, "create", "BindMountRepaired")?;
    let message = event["message"].as_str().unwrap_or_default();
    ensure!(
        message.contains("/etc/app.conf was stale") && message.contains("re-bound"),
        "{message}"
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-create")
}

fn a_create_that_is_refused(node: &Node, api: &KubeApi) -> Result<()> {
    let cri = node.cri()?;
    let nfs = node
        .kubelet()
        .root()
        .join("pods/uid-refused/volumes/kubernetes.io~nfs/data");
    fs::create_dir_all(&nfs)?;
    let sandbox = cri.run_pod("bindguard", "refused", "uid-refused")?;
    let mounts = [mount(&nfs, "/data", PropagationPrivate)];
    ensure!(
        cri.start_container(&sandbox, "app", &SLEEP, &mounts)
            .is_err(),
        "it was not refused"
    );
    let event = event(api, "refused", "ContainerRefused")?;
    let message = event["message"].as_str().unwrap_or_default();
    ensure!(
        event["type"] == "Warning"
            && message.contains("volume data")
            && message.contains("refused"),
        "{event}"
    );
    cri.remove_pod(&sandbox)?;
    fs::remove_dir_all(node.kubelet().root().join("pods/uid-refused"))
        .context("remove the pod's folder")
}

fn a_live_refresh(node: &Node, api: &KubeApi) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-live")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let mounts = [mount(
        volume.subpath("app", 0, "app.conf").bind()?,
        "/etc/app.conf",
        PropagationPrivate,
    )];
    let sandbox = cri.run_annotated_pod(
        "runc",
        "live",
        pod.uid(),
        &[("bindguard.io/refresh", "true")],
    )?;
    cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    let event = event(api, "live", "BindMountRefreshed")?;
    ensure!(
        event["message"] == "the mount at /etc/app.conf is current",
        "{event}"
    );
    volume.update(&[("other.conf", "three")])?;
    let event = self::event(api, "live", "BindMountNotRefreshed")?;
    ensure!(
        event["message"]
            .as_str()
            .is_some_and(|text| text.contains("has no app.conf any more")),
        "{event}"
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-live")
}

/// A container copies the host's mounts at its start, and nothing is wrong. Later the host unmounts
/// a mount: no create happens then, and the survey finds the container's copy.
#[test]
fn a_mount_that_the_host_unmounts_while_a_container_runs() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let api = KubeApi::start()?;
        let config = config(node, &api, &format!("agent.survey-seconds = 1\n{FAST}"))?;
        let agent = Agent::start(node, &config)?;
        let disks = ["/run/disk-1", "/run/disk-2"];
        for disk in disks {
            fs::create_dir(disk).context("make a mount point")?;
            tmpfs(disk, "mode=755")?;
        }
        let cri = node.cri()?;
        let start = |name: &str, propagation| {
            let sandbox = cri.run_pod("runc", name, &format!("uid-{name}"))?;
            cri.start_container(
                &sandbox,
                "app",
                &SLEEP,
                &[mount(Path::new("/"), "/host", propagation)],
            )?;
            Ok::<_, anyhow::Error>(sandbox)
        };
        let keeper = start("keeper", PropagationPrivate)?;
        let follower = start("follower", PropagationHostToContainer)?;
        let binds = |verdict| {
            agent.figure(&format!(
                "bindguard_sources{{kind=\"host-root\",verdict=\"{verdict}\"}}"
            ))
        };
        until("both binds are counted", || {
            Ok((binds("pinning"), binds("current")) == (1.0, 1.0))
        })?;
        ensure!(
            agent.figure(PINNED) == 0.0 && api.events().is_empty(),
            "{:?}",
            api.events()
        );
        unmount(disks[0])?;
        let found = event(&api, "keeper", "HostMountsPinned")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(
            found["type"] == "Warning" && message.contains(disks[0]),
            "{found}"
        );
        ensure!(
            found["involvedObject"]["fieldPath"] == "spec.containers{app}",
            "{found}"
        );
        unmount(disks[1])?;
        until(
            "both mounts are counted",
            || Ok(agent.figure(PINNED) == 2.0),
        )?;
        let surveys = agent.figure(SURVEYS);
        until("it is surveyed again", || {
            Ok(agent.figure(SURVEYS) >= surveys + 2.0)
        })?;
        let events = api.events();
        ensure!(
            events.len() == 1 && events[0]["count"] == 1,
            "one event is enough: {events:?}"
        );
        agent.kill()?;
        let agent = Agent::start(node, &config)?;
        until("the second agent has written its event", || {
            Ok(agent.figure("bindguard_events_total{result=\"written\"}") > 0.0)
        })?;
        let events = api.events();
        ensure!(events.len() == 1, "one object is enough: {events:?}");
        cri.remove_pod(&keeper)?;
        until("nothing is pinned any more", || {
            Ok(agent.figure(PINNED) == 0.0)
        })?;
        cri.remove_pod(&follower)
    });
}

const PINNED: &str = "bindguard_pinned_mounts";
const SURVEYS: &str = "bindguard_agent_surveys_total";

/// In a pod the agent leaves the mount namespace that has its token, and reads the token again when
/// the kubelet renewed it.
#[test]
fn with_the_service_account_of_a_pod() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let api = KubeApi::start_with_tls()?;
        let _agent = Agent::start_with_account(node, FAST, &api)?;
        a_rebind_of_the_agent(node, &api)?;
        let seen = api.requests();
        let bearer = format!("Bearer {TOKEN}");
        ensure!(
            !seen.is_empty() && seen.iter().all(|request| request.authorization == bearer),
            "{seen:?}"
        );
        let on_host = Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token");
        ensure!(
            !on_host.exists(),
            "the story shows nothing: the host has the token, too"
        );
        Ok(())
    });
}

/// Re-binds and figures are there at once, and the API server gets few requests.
#[test]
fn an_api_server_that_does_not_serve() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let api = KubeApi::start()?;
        let agent = Agent::start(node, &config(node, &api, FAST)?)?;
        for (number, conduct) in [
            Conduct::Down,
            Conduct::Hang,
            Conduct::Answer(500),
            Conduct::Answer(403),
            Conduct::Answer(429),
        ]
        .into_iter()
        .enumerate()
        {
            api.behave(conduct);
            let before = api.requests().len();
            let rebinds = agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}");
            updates_arrive(node, &format!("uid-{number}"))
                .with_context(|| format!("{conduct:?}"))?;
            // A slow agent serves many updates by a re-bind that it repeats and counts once.
            until("a re-bind is counted", || {
                Ok(agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}") > rebinds)
            })
            .with_context(|| format!("{conduct:?}"))?;
            let requests = api.requests().len() - before;
            ensure!(requests <= 6, "{conduct:?}: {requests} requests");
        }
        ensure!(
            agent.figure("bindguard_event_request_failures_total") > 0.0,
            "{}",
            agent.get("/metrics")
        );
        Ok(())
    });
}

fn updates_arrive(node: &Node, uid: &str) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod(uid)?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("key", "0")])?;
    let subpath = volume.subpath("app", 0, "key");
    subpath.bind()?;
    let sandbox = cri.run_pod("runc", uid, uid)?;
    let mut times = Vec::new();
    for number in 1..=20 {
        let began = Instant::now();
        volume.update(&[("key", &number.to_string())])?;
        until("it is re-bound", || {
            Ok(fs::read_to_string(subpath.target())? == number.to_string())
        })?;
        times.push(began.elapsed());
    }
    // A request to the API server waits for ten seconds. A re-bind that waits for a request takes
    // as long; a slow machine delays only some re-binds.
    times.sort();
    ensure!(
        times[10] < Duration::from_secs(5),
        "re-bound after {times:?}"
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, uid)
}
