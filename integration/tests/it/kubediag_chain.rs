//! kubediag's chain for kubernetes#68211, with the stock shim and the agent's processors: collect
//! the pod, collect the mount table, diagnose, recover. Then the container starts.
//!
//! The steps are those of kubediag's executor, which posts all earlier results to each processor
//! and merges the answer.

use bindguard_integration::prelude::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use bindguard_integration::agent::Form;
use bindguard_integration::kube_api::KubeApi;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const OPERATIONS: &str = include_str!("../../../config/kubediag/operations.yaml");

fn story(generation: Generation) {
    Setup::on(generation).cri().story(chain);
}

on_newest_and_older!(story);

/// kubediag's agent calls the loopback address of the node.
#[test]
fn a_pod_serves_on_the_nodes_address() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let address = free_address()?;
        let config = format!("agent.kubediag = {{ enabled = true, listen = '{address}' }}\n");
        let _agent = Agent::start_as(node, &config, Form::Pod)?;
        until("the agent serves on the node", || {
            Ok(http(address, "GET", "/healthz", "").is_ok_and(|(status, _)| status == 200))
        })
    });
}

fn chain(node: &Node) -> Result<()> {
    let (api, address) = (KubeApi::start()?, free_address()?);
    let kubeconfig = node.disk().join("kubeconfig");
    api.write_config(&kubeconfig)?;
    // Without `report` the agent's watcher repairs before the container fails.
    let agent = Agent::start(
        node,
        &format!(
            "checks.stale-subpaths = 'report'\nagent.kubediag = {{ enabled = true, listen = '{address}' }}\n\
             agent.kubernetes = {{ kubeconfig = '{}', node = 'node-1' }}\n",
            kubeconfig.display()
        ),
    )?;
    let (status, health) = http(address, "GET", "/healthz", "")?;
    ensure!((status, health.trim_end()) == (200, "OK"), "{health}");

    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let sandbox = cri.run_pod("runc", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    cri.stop(&app, 0)?;
    cri.remove(&app)?;
    let failed = cri
        .start_container(&sandbox, "app", &SLEEP, &mounts)
        .err()
        .context("the container started")?;
    api.insert(
        "/api/v1/namespaces/default/pods/web",
        pod_with(&format!("{failed:#}"), "node-1"),
    );
    api.insert(
        "/api/v1/namespaces/default/pods/elsewhere",
        pod_with("", "node-2"),
    );

    let parameters = json!({
        "diagnosis.namespace": "default", "diagnosis.name": "web", "diagnosis.uid": "1", "node": "node-1",
        "pod.namespace": "default", "pod.name": "web", "container": "app",
    });
    let mut results = parameters.clone();
    for path in paths_of_operations()? {
        let (status, text) = http(address, "POST", &path, &results.to_string())?;
        ensure!(status == 200, "{path}: {status} {text}");
        let result: Value =
            serde_json::from_str(&text).with_context(|| format!("{path}: {text}"))?;
        for (key, value) in result.as_object().context("an object")? {
            ensure!(value.is_string(), "{path}: {key} is no string");
            results[key] = value.clone();
        }
    }
    let target = subpath.target().display().to_string();
    let done = &results["recover.kubernetes.subpath_remount.result"];
    ensure!(
        *done == format!("Succeesfully umount {target} on host"),
        "{done}"
    );
    ensure!(
        results["diagnoser.kubernetes.subpath_remount.bug_link"]
            .as_str()
            .is_some_and(|it| it.ends_with("/68211"))
    );
    only_a_current_mount(&subpath)?;
    let again = cri.start_container(&sandbox, "app-again", &SLEEP, &mounts)?;
    ensure!(
        cri.read(&again, "/etc/app.conf")? == "two",
        "the container reads the old file"
    );

    other_nodes_pods_are_not_shown(address)?;
    let (status, _) = http(address, "GET", "/metrics", "")?;
    ensure!(status == 404, "figures are on another address");
    let status = node.bindguard(["status", "--json"])?;
    ensure!(status.code() != 2, "{status:?}");
    drop(agent);
    cri.remove_pod(&sandbox)?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
    })?;
    fs::remove_file(kubeconfig).context("remove the kubeconfig")
}

/// The processors need no credentials, and so show only pods of this node.
fn other_nodes_pods_are_not_shown(address: SocketAddr) -> Result<()> {
    let path = "/processor/podDetailCollector";
    for (name, words) in [
        ("elsewhere", "runs on node \"node-2\""),
        ("missing", "read the pod"),
    ] {
        let body = json!({ "pod.namespace": "default", "pod.name": name }).to_string();
        let (status, text) = http(address, "POST", path, &body)?;
        ensure!(
            status == 500 && text.contains(words),
            "{name}: {status} {text}"
        );
    }
    Ok(())
}

/// The Pod as the kubelet reports it after a failed create.
fn pod_with(message: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "uid-1"},
        "spec": {
            "nodeName": node,
            "containers": [{
                "name": "app", "image": "busybox",
                "volumeMounts": [{"name": "conf", "mountPath": "/etc/app.conf", "subPath": "app.conf"}],
            }],
            "volumes": [{"name": "conf", "configMap": {"name": "conf"}}],
        },
        "status": {"containerStatuses": [{
            "name": "app", "image": "busybox", "imageID": "", "ready": false, "restartCount": 1,
            "state": {"waiting": {"reason": "CreateContainerError", "message": message}},
            "lastState": {},
        }]},
    })
}

/// The paths of the operations, in the order of the operation set.
fn paths_of_operations() -> Result<Vec<String>> {
    let paths: Vec<_> = OPERATIONS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("path: "))
        .collect();
    ensure!(paths.len() == 4, "{paths:?}");
    Ok(paths.into_iter().map(str::to_owned).collect())
}

fn free_address() -> Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .context("find a free port")
}

fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    let mut stream =
        TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .context("read the answer")?;
    let (head, text) = answer.split_once("\r\n\r\n").context("an answer")?;
    let status = head.split(' ').nth(1).context("a status")?.parse()?;
    Ok((status, text.to_owned()))
}
