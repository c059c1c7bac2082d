//! `make kubelet`: a node that restarts, and three hundred creates of many kinds with `proof =
//! "refuse"`, under a real kubelet.

use bindguard_integration::cluster::{Cluster, Network, PodManifest, RealKubelet};
use bindguard_integration::prelude::*;

use crate::real_kubelet::{
    BY_PATH, Case, Change, Started, all_pods_go, cases, content_after_a_restart,
};

const SYNC_SECONDS: u32 = 5;
const BY_WRAPPER: &str = "bindguard-wrapper";

const PODS: usize = 30;
const CONTAINERS: usize = 10;
/// A kubelet of a small machine runs so many pods at once.
const PODS_OF_ROUND: usize = 6;

#[test]
#[ignore = "builds a newer kubelet: make kubelet"]
fn a_node_that_restarts_on_the_newest_containerd() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(pods_outlive_the_node);
}

#[test]
#[ignore = "builds a newer kubelet: make kubelet"]
fn three_hundred_creates_on_the_newest_containerd() {
    let network = Network::enter().expect("a network namespace");
    Setup::on(Generation::NEWEST)
        .cri()
        .policy("checks.proof = 'refuse'\n")
        .story(|node| no_create_is_refused(node, &network));
}

/// The volumes change while the node is off. The kubelet starts every pod again, and a later update
/// is repaired as before.
fn pods_outlive_the_node(node: &Node) -> Result<()> {
    let cluster = Cluster::start(node, RealKubelet::Unfixed, SYNC_SECONDS)?;
    let mut cases = cases(node.disk());
    cases.retain(|case| matches!(case.change, Change::Kubelet(_)));
    ensure!(cases.len() >= 8, "only {} kinds of volumes", cases.len());
    let write = |cluster: &Cluster<'_>, content: &str| {
        cluster.apply_payload("conf", &["app.conf", "other.conf"], content)?;
        let annotation = format!("content={content}");
        let words = ["annotate", "--overwrite", "pods", "--all", &annotation];
        cluster.kubectl(&words, "")?.success()
    };
    write(&cluster, "one")?;
    for case in &cases {
        cluster.apply(&case.manifest().guarded().object())?;
    }
    let start = |case: &Case| Started::of(&cluster, case.name, case.change);
    cases.iter().try_for_each(|case| start(case).map(drop))?;

    cluster.restart_node(RealKubelet::Unfixed, SYNC_SECONDS, |cluster| {
        write(cluster, "off").map(drop)
    })?;
    for case in &cases {
        let content = content_after_a_restart(&cluster, node, case.name)?;
        ensure!(content == "off", "{} sees {content:?}", case.name);
    }

    let started: Vec<Started> = cases.iter().map(start).collect::<Result<_>>()?;
    write(&cluster, "two")?;
    for pod in &started {
        let what = format!("the kubelet has written the volume of {}", pod.name);
        cluster.until(&what, |_| pod.is_written(node))?;
    }
    let ctr = node.ctr().in_namespace("k8s.io");
    started
        .iter()
        .try_for_each(|pod| ctr.kill(&pod.id, "SIGKILL"))?;
    for pod in &started {
        cluster.until(&format!("{} runs again", pod.name), |cluster| {
            let app = cluster.app_of(&pod.name)?;
            let is_other = app["containerID"] != format!("containerd://{}", pod.id);
            Ok(is_other && !app["state"]["running"].is_null())
        })?;
        let content = content_after_a_restart(&cluster, node, &pod.name)?;
        ensure!(content == "two", "{} sees {content:?}", pod.name);
    }
    all_pods_go(&cluster, node)
}

/// Pods under the shim by its own name, under the stock name, by the wrapper, and in user
/// namespaces, whose containers mount each kind of volume in each way.
fn no_create_is_refused(node: &Node, network: &Network) -> Result<()> {
    let cluster = Cluster::start_whole(node, network)?;
    for class in ["bindguard", BY_PATH, BY_WRAPPER] {
        cluster.apply(&json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": class}, "handler": class,
        }))?;
    }
    let folder = node.disk().join("host-path");
    fs::create_dir_all(folder.join("folder")).context("make a folder of the host")?;
    fs::write(folder.join("app.conf"), "one")?;
    cluster.apply_payload("conf", &["app.conf", "other.conf"], "one")?;
    let mut running = 0;
    for round in 0..PODS / PODS_OF_ROUND {
        let names = (0..PODS_OF_ROUND).map(|number| format!("many-{round}-{number}"));
        let names: Vec<String> = names.collect();
        for (number, name) in names.iter().enumerate() {
            let pod = PodManifest::new(name, &json!({}), &[]);
            let pod = match number % 4 {
                0 => pod.of_class("bindguard"),
                1 => pod.of_class(BY_PATH),
                2 => pod.of_class(BY_WRAPPER),
                _ => pod.of_class(BY_PATH).with_user_namespace(),
            };
            let mut object = pod.object();
            let app = object["spec"]["containers"][0].take();
            object["spec"]["volumes"] = volumes(&folder);
            let containers = (0..CONTAINERS).map(|container| {
                let mut app = app.clone();
                app["name"] = json!(format!("app-{container}"));
                app["volumeMounts"] = mounts(container);
                app
            });
            object["spec"]["containers"] = containers.collect();
            cluster.apply(&object)?;
        }
        for name in &names {
            let mut statuses = Value::Null;
            let what = format!("all containers of {name} run");
            let all_run = cluster.until(&what, |cluster| {
                statuses =
                    cluster.get(&format!("pods/{name}"))?["status"]["containerStatuses"].take();
                let all = statuses.as_array().map(Vec::as_slice).unwrap_or_default();
                let is_running = |status: &&Value| !status["state"]["running"].is_null();
                Ok(all.iter().filter(is_running).count() == CONTAINERS)
            });
            all_run.with_context(|| format!("the containers: {statuses}"))?;
            for status in statuses.as_array().into_iter().flatten() {
                ensure!(status["restartCount"] == 0, "a second start: {status}");
                running += 1;
            }
        }
        all_pods_go(&cluster, node)?;
    }
    let words = [
        "get",
        "events",
        "--field-selector=reason=Failed",
        "--output=name",
    ];
    let failed = cluster.kubectl(&words, "")?.success()?;
    ensure!(failed.is_empty(), "creates failed: {failed}");
    ensure!(running == PODS * CONTAINERS, "{running} containers ran");
    Ok(())
}

fn volumes(folder: &Path) -> Value {
    let nested = json!([{"key": "app.conf", "path": "folder/app.conf"}]);
    json!([
        {"name": "config-map", "configMap": {"name": "conf"}},
        {"name": "secret", "secret": {"secretName": "conf"}},
        {"name": "projected", "projected": {"sources": [
            {"configMap": {"name": "conf", "items": nested}},
            {"secret": {"name": "conf", "items": [{"key": "app.conf", "path": "secret.conf"}]}},
        ]}},
        {"name": "downward", "downwardAPI": {"items": [
            {"path": "app.conf", "fieldRef": {"fieldPath": "metadata.annotations['content']"}},
        ]}},
        {"name": "empty-dir", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "folder", "hostPath": {"path": folder}},
        {"name": "file", "hostPath": {"path": folder.join("app.conf"), "type": "File"}},
        {"name": "root", "hostPath": {"path": "/"}},
    ])
}

/// The mounts of the container with this number; the last has the mounts of all others.
fn mounts(container: usize) -> Value {
    let of_containers = [
        json!([{"name": "config-map", "mountPath": "/a"}, {"name": "secret", "mountPath": "/a/b", "readOnly": true}]),
        json!([{"name": "config-map", "mountPath": "/c/app.conf", "subPath": "app.conf"},
               {"name": "secret", "mountPath": "/d/app.conf", "subPath": "app.conf", "readOnly": true}]),
        json!([{"name": "projected", "mountPath": "/e"}, {"name": "projected", "mountPath": "/f", "subPath": "folder"}]),
        json!([{"name": "downward", "mountPath": "/g"}, {"name": "downward", "mountPath": "/h/app.conf", "subPathExpr": "$(KEY)"}]),
        json!([{"name": "empty-dir", "mountPath": "/i"}, {"name": "empty-dir", "mountPath": "/j", "subPath": "deep/folder"}]),
        json!([{"name": "memory", "mountPath": "/k"}, {"name": "memory", "mountPath": "/l", "subPath": "folder", "readOnly": true}]),
        json!([{"name": "root", "mountPath": "/host", "readOnly": true, "mountPropagation": "HostToContainer"}]),
        json!([{"name": "file", "mountPath": "/m/file"}, {"name": "folder", "mountPath": "/n", "readOnly": true},
               {"name": "folder", "mountPath": "/n/folder", "subPath": "folder"}]),
        json!([{"name": "folder", "mountPath": "/o", "readOnly": true, "recursiveReadOnly": "IfPossible"},
               {"name": "folder", "mountPath": "/p/file", "subPath": "app.conf"}]),
    ];
    match of_containers.get(container) {
        Some(mounts) => mounts.clone(),
        None => of_containers
            .iter()
            .flat_map(|mounts| mounts.as_array().cloned().unwrap_or_default())
            .collect(),
    }
}
