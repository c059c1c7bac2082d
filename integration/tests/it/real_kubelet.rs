//! `make kubelet`: the main faults and repairs with a real kubelet instead of the fake kubelet.
//!
//! A pod of each kind of volume that needs no server runs, its volume changes, its container is
//! killed, and the kubelet starts it again. Under bindguard's RuntimeClass each pod shows the new
//! content. Under the stock shim, a pod stays stuck (kubernetes#68211) until an operator repairs
//! the subpath. A kubelet with its own fix still loses pods to a race (kubernetes#127602) under the
//! stock shim, and loses no pod under bindguard. With the node agent, running containers read
//! updates.

use bindguard_integration::prelude::*;
use std::ops::Range;

use bindguard_integration::cluster::{Cluster, Network, PodManifest, RealKubelet};
use bindguard_integration::mounts;

pub(crate) const FILE: &str = "/etc/app/app.conf";
const RACES: usize = 8;

/// Limit of rounds of races: on a quiet machine the kubelet seldom loses.
const MAX_ROUNDS: usize = 4;

/// The handler with the stock runtime's type and the path of the shim, as `bindguard install`
/// writes it.
pub(crate) const BY_PATH: &str = "bindguard-path";

#[test]
#[ignore = "builds a kubelet, ten minutes: make kubelet"]
fn containerd_1_7() {
    Setup::on(Generation::V1_7)
        .cri()
        .story(every_volume_is_current_after_a_restart);
}

#[test]
#[ignore = "builds a newer kubelet: make kubelet KUBERNETES=DIR"]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(every_volume_is_current_after_a_restart);
}

#[test]
#[ignore = "builds a newer kubelet: make kubelet KUBERNETES=DIR"]
fn a_race_that_the_kubelet_has_on_the_newest_containerd() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(no_pod_is_lost_to_the_race);
}

#[test]
#[ignore = "builds a kubelet, ten minutes: make kubelet"]
fn a_race_that_the_kubelet_has() {
    Setup::on(Generation::V1_7)
        .cri()
        .story(no_pod_is_lost_to_the_race);
}

#[test]
#[ignore = "builds a kubelet, ten minutes: make kubelet"]
fn live_refresh() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        let cluster = Cluster::start(node, RealKubelet::AsReleased, 5)?;
        running_containers_read_the_update(node, &cluster, &["config-map", "secret"])
    });
}

#[test]
#[ignore = "builds a newer kubelet: make kubelet KUBERNETES=DIR"]
fn live_refresh_on_the_newest_containerd() {
    let network = Network::enter().expect("a network namespace");
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cluster = Cluster::start_whole(node, &network)?;
        // containerd queries the features of a runtime of this type alone. Without them the kubelet
        // starts no pod with a user namespace.
        let by_path = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": BY_PATH}, "handler": BY_PATH});
        cluster.apply(&by_path)?;
        // Kubernetes 1.33 and newer.
        let in_namespaces = ["userns", "guarded-userns"];
        running_containers_read_the_update(node, &cluster, &[&["config-map", "secret"], &in_namespaces[..]].concat())
    });
}

/// A pod, and the writer of its volume.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    volume: Value,
    mounts: Vec<Value>,
    pub(crate) change: Change,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The kubelet, as the API's object changes; where it writes the file, below the volume.
    Kubelet(&'static str),
    /// The container, which has the whole volume, too.
    Container(&'static str),
    /// An observer on the host.
    Host,
}

fn sub_path(path: &str) -> Vec<Value> {
    vec![json!({"mountPath": FILE, "subPath": path})]
}

pub(crate) fn cases(host_path: &Path) -> Vec<Case> {
    let case = |name, volume, mounts, change| Case {
        name,
        volume,
        mounts,
        change,
    };
    let config_map = json!({"configMap": {"name": "conf"}});
    let nested = json!([{"key": "app.conf", "path": "folder/app.conf"}]);
    let projected = json!({"projected": {"sources": [
        {"configMap": {"name": "conf", "items": nested}},
        {"secret": {"name": "conf", "items": [{"key": "app.conf", "path": "secret.conf"}]}},
    ]}});
    let item =
        json!({"path": "app.conf", "fieldRef": {"fieldPath": "metadata.annotations['content']"}});
    let file = Change::Kubelet("app.conf");
    let replaced = Change::Container("echo -n two > /volume/new; mv /volume/new /volume/app.conf");
    let folder = Change::Container(
        "rm -r /volume/folder; mkdir /volume/folder; echo -n two > /volume/folder/app.conf",
    );
    let (empty_dir, memory) = (
        json!({"emptyDir": {}}),
        json!({"emptyDir": {"medium": "Memory"}}),
    );
    vec![
        case(
            "whole",
            config_map.clone(),
            vec![json!({"mountPath": "/etc/app"})],
            file,
        ),
        case("config-map", config_map.clone(), sub_path("app.conf"), file),
        case(
            "expression",
            config_map.clone(),
            vec![json!({"mountPath": FILE, "subPathExpr": "$(KEY)"})],
            file,
        ),
        case(
            "two-files",
            config_map,
            vec![
                json!({"mountPath": FILE, "subPath": "app.conf"}),
                json!({"mountPath": "/etc/app/other.conf", "subPath": "other.conf", "readOnly": true}),
            ],
            file,
        ),
        case(
            "folder",
            json!({"configMap": {"name": "conf", "items": nested}}),
            vec![json!({"mountPath": "/etc/app", "subPath": "folder"})],
            Change::Kubelet("folder/app.conf"),
        ),
        case(
            "secret",
            json!({"secret": {"secretName": "conf"}}),
            sub_path("app.conf"),
            file,
        ),
        case(
            "projected",
            projected,
            sub_path("folder/app.conf"),
            Change::Kubelet("folder/app.conf"),
        ),
        case(
            "downward-api",
            json!({"downwardAPI": {"items": [item]}}),
            sub_path("app.conf"),
            file,
        ),
        case(
            "empty-dir",
            empty_dir.clone(),
            sub_path("app.conf"),
            replaced,
        ),
        case("memory", memory, sub_path("app.conf"), replaced),
        case(
            "empty-dir-folder",
            empty_dir,
            vec![json!({"mountPath": "/etc/app", "subPath": "folder"})],
            folder,
        ),
        case(
            "host-path",
            json!({"hostPath": {"path": host_path}}),
            sub_path("app.conf"),
            Change::Host,
        ),
    ]
}

impl Case {
    pub(crate) fn manifest(&self) -> PodManifest {
        let mut mounts = self.mounts.clone();
        let Change::Container(_) = self.change else {
            return PodManifest::new(self.name, &self.volume, &mounts);
        };
        mounts.push(json!({"mountPath": "/volume"}));
        let seed = "echo -n one > /volume/app.conf; mkdir /volume/folder; echo -n one > /volume/folder/app.conf";
        PodManifest::new(self.name, &self.volume, &mounts).first(seed)
    }
}

/// A container of a pod, as it was first started.
pub(crate) struct Started {
    pub(crate) name: String,
    uid: String,
    pub(crate) id: String,
    change: Change,
}

impl Started {
    pub(crate) fn of(cluster: &Cluster<'_>, name: &str, change: Change) -> Result<Self> {
        cluster.until(&format!("{name} runs"), |cluster| {
            Ok(!cluster.app_of(name)?["state"]["running"].is_null())
        })?;
        let pod = cluster.get(&format!("pods/{name}"))?;
        let uid = pod["metadata"]["uid"]
            .as_str()
            .context("a pod has a uid")?
            .to_owned();
        Ok(Self {
            name: name.to_owned(),
            uid,
            id: id_of(&cluster.app_of(name)?)?,
            change,
        })
    }

    /// True if the kubelet has written the expected content.
    pub(crate) fn is_written(&self, node: &Node) -> Result<bool> {
        let Change::Kubelet(file) = self.change else {
            return Ok(true);
        };
        let plugins = node
            .kubelet()
            .root()
            .join("pods")
            .join(&self.uid)
            .join("volumes");
        let mut plugins = fs::read_dir(&plugins)
            .with_context(|| format!("list {}", plugins.display()))?
            .flatten();
        let volume = plugins
            .next()
            .context("a pod has a volume")?
            .path()
            .join("volume");
        Ok(fs::read_to_string(volume.join(file)).is_ok_and(|content| content == "two"))
    }
}

fn id_of(app: &Value) -> Result<String> {
    let id = app["containerID"]
        .as_str()
        .and_then(|id| id.strip_prefix("containerd://"));
    id.map(str::to_owned)
        .with_context(|| format!("find the container's id in {app}"))
}

fn every_volume_is_current_after_a_restart(node: &Node) -> Result<()> {
    let cluster = Cluster::start(node, RealKubelet::Unfixed, 5)?;
    ["daemonset.yaml", "pod.yaml"]
        .into_iter()
        .try_for_each(|manifest| cluster.would_take(manifest))?;
    let host_path: PathBuf = node.disk().join("host-path");
    fs::create_dir(&host_path)?;
    fs::write(host_path.join("app.conf"), "one")?;
    cluster.apply_payload("conf", &["app.conf", "other.conf"], "one")?;
    let cases = cases(&host_path);
    cases
        .iter()
        .try_for_each(|case| cluster.apply(&case.manifest().guarded().object()))?;
    let host_root = PodManifest::new(
        "host-root",
        &json!({"hostPath": {"path": "/"}}),
        &[json!({"mountPath": "/host"})],
    );
    cluster.apply(&host_root.guarded().object())?;
    let unguarded = PodManifest::new(
        "unguarded",
        &json!({"configMap": {"name": "conf"}}),
        &sub_path("app.conf"),
    );
    cluster.apply(&unguarded.object())?;
    let started: Vec<Started> = cases
        .iter()
        .map(|case| Started::of(&cluster, case.name, case.change))
        .collect::<Result<_>>()?;
    let unguarded = Started::of(&cluster, "unguarded", Change::Kubelet("app.conf"))?;
    Started::of(&cluster, "host-root", Change::Host)?;

    cluster.apply_payload("conf", &["app.conf", "other.conf"], "two")?;
    cluster
        .kubectl(
            &["annotate", "--overwrite", "pods", "--all", "content=two"],
            "",
        )?
        .success()?;
    fs::write(host_path.join("new"), "two")?;
    fs::rename(host_path.join("new"), host_path.join("app.conf"))?;
    let ctr = node.ctr().in_namespace("k8s.io");
    for pod in &started {
        if let Change::Container(command) = pod.change {
            ctr.exec(&pod.id, &["sh", "-ec", command])?.success()?;
        }
    }
    cluster.until("the kubelet has written every volume", |_| {
        let all = started.iter().chain([&unguarded]);
        Ok(all
            .map(|pod| pod.is_written(node))
            .collect::<Result<Vec<_>>>()?
            .iter()
            .all(|written| *written))
    })?;
    started
        .iter()
        .chain([&unguarded])
        .try_for_each(|pod| ctr.kill(&pod.id, "SIGKILL"))?;

    for pod in &started {
        let content = content_after_a_restart(&cluster, node, &pod.name)?;
        ensure!(content == "two", "{} sees {content:?}", pod.name);
    }
    cluster.until("the unguarded pod is stuck", |cluster| {
        let waiting = cluster.app_of("unguarded")?["state"]["waiting"]["reason"].clone();
        Ok(["RunContainerError", "CrashLoopBackOff"]
            .iter()
            .any(|reason| waiting == *reason))
    })?;
    let found = node.bindguard(["diagnose", "--pod", &unguarded.uid])?;
    ensure!(
        found.code() == 1 && found.stdout.contains("stale"),
        "{}",
        found.stdout
    );
    node.bindguard(["repair", "--pod", &unguarded.uid])?
        .success()?;
    let content = content_after_a_restart(&cluster, node, "unguarded")?;
    ensure!(content == "two", "after the repair it sees {content:?}");
    let journal = node.bindguard(["journal"])?.stdout;
    ensure!(
        journal.contains("made rslave"),
        "the host's root is no slave: {journal}"
    );
    all_pods_go(&cluster, node)
}

/// The content that the restarted container of a pod reads.
pub(crate) fn content_after_a_restart(
    cluster: &Cluster<'_>,
    node: &Node,
    pod: &str,
) -> Result<String> {
    let mut app = Value::Null;
    cluster.until(&format!("{pod} runs again"), |cluster| {
        app = cluster.app_of(pod)?;
        Ok(!app["state"]["running"].is_null() && app["restartCount"].as_u64() > Some(0))
    })?;
    node.ctr().in_namespace("k8s.io").read(&id_of(&app)?, FILE)
}

pub(crate) fn all_pods_go(cluster: &Cluster<'_>, node: &Node) -> Result<()> {
    cluster
        .kubectl(&["delete", "pods", "--all", "--wait=false"], "")?
        .success()?;
    let pods = node.kubelet().root().join("pods");
    cluster.until("every pod's folder is gone", |_| {
        Ok(fs::read_dir(&pods)?.count() == 0)
    })?;
    let left = mounts::table()?
        .into_iter()
        .find(|mount| mount.target.starts_with(&pods));
    ensure!(left.is_none(), "a mount stays: {left:?}");
    Ok(())
}

/// The kubelet binds a subpath, and then writes the volume that changed while the pod's first
/// container ran.
fn no_pod_is_lost_to_the_race(node: &Node) -> Result<()> {
    let cluster = Cluster::start(node, RealKubelet::AsReleased, 60)?;
    let mut lost = 0;
    for round in 0..MAX_ROUNDS {
        lost += lost_under_the_stock_shim(&cluster, round * RACES..(round + 1) * RACES)?;
        if lost > 0 {
            return all_pods_go(&cluster, node);
        }
    }
    bail!("the race never came: nothing is shown")
}

fn lost_under_the_stock_shim(cluster: &Cluster<'_>, numbers: Range<usize>) -> Result<usize> {
    for number in numbers.clone() {
        let payload = format!("race-{number}");
        cluster.apply_payload(&payload, &["app.conf"], "one")?;
        let racing = |name: &str| {
            let volume = json!({"configMap": {"name": payload}});
            let pod = PodManifest::new(name, &volume, &sub_path("app.conf"));
            pod.first("sleep 8").once(&["cat", FILE])
        };
        let [stock, guarded] = racers(number);
        cluster.apply(&racing(&stock).object())?;
        cluster.apply(&racing(&guarded).guarded().object())?;
        for name in [stock, guarded] {
            cluster.until(&format!("the first container of {name} runs"), |cluster| {
                let first =
                    &cluster.get(&format!("pods/{name}"))?["status"]["initContainerStatuses"][0];
                Ok(!first["state"]["running"].is_null())
            })?;
        }
        cluster.apply_payload(&payload, &["app.conf"], "two")?;
    }
    let mut lost = 0;
    for [stock, guarded] in numbers.map(racers) {
        lost += usize::from(!has_succeeded(cluster, &stock)?);
        ensure!(
            has_succeeded(cluster, &guarded)?,
            "{guarded} is lost: {}",
            cluster.get(&format!("pods/{guarded}"))?
        );
    }
    eprintln!(
        "lost to the race: {lost} of {RACES} pods under the stock shim, none under bindguard"
    );
    Ok(lost)
}

/// With the agent, pods that opted in read the update without a restart (kubernetes#50345); a pod
/// that did not opt in reads it after a restart. The kubelet cleans up all pods.
fn running_containers_read_the_update(
    node: &Node,
    cluster: &Cluster<'_>,
    names: &[&str],
) -> Result<()> {
    let kubeconfig = cluster.kubeconfig().display();
    let events = "agent.events = { mode = 'all', requests-per-minute = 600 }";
    let _agent = Agent::start(
        node,
        &format!("{events}\nagent.kubernetes.kubeconfig = '{kubeconfig}'\n"),
    )?;
    cluster.apply_payload("conf", &["app.conf"], "one")?;
    names
        .iter()
        .try_for_each(|name| cluster.apply(&refreshed_pod(name).object()))?;
    cluster.apply(&PodManifest::new("other", &config_map(), &sub_path("app.conf")).object())?;
    let start = |name| Started::of(cluster, name, Change::Kubelet("app.conf"));
    let started: Vec<Started> = names.iter().copied().map(start).collect::<Result<_>>()?;
    let other = start("other")?;

    cluster.apply_payload("conf", &["app.conf"], "two")?;
    let ctr = node.ctr().in_namespace("k8s.io");
    for pod in &started {
        cluster.until(&format!("{} reads the update", pod.name), |_| {
            Ok(ctr.read(&pod.id, FILE)? == "two")
        })?;
        ensure!(
            cluster.app_of(&pod.name)?["restartCount"] == 0,
            "{} was restarted",
            pod.name
        );
        // "0 0 4294967295" in the machine's user namespace.
        let uid_map = ctr.read(&pod.id, "/proc/self/uid_map")?;
        let is_mapped = uid_map.split_whitespace().nth(1) != Some("0");
        ensure!(
            is_mapped == pod.name.ends_with("userns"),
            "the uid_map of {}: {uid_map}",
            pod.name
        );
    }
    for (name, reason) in [
        ("config-map", "BindMountRefreshed"),
        ("other", "BindMountRepaired"),
    ] {
        cluster.until(&format!("kubectl shows {reason} on {name}"), |cluster| {
            let of_pod = format!("--field-selector=involvedObject.name={name},reason={reason}");
            let events = cluster
                .kubectl(&["get", "events", &of_pod, "--output=name"], "")?
                .success()?;
            Ok(!events.is_empty())
        })?;
    }
    cluster.until("the kubelet has written the other pod's volume", |_| {
        other.is_written(node)
    })?;
    ensure!(
        ctr.read(&other.id, FILE)? == "one",
        "a container that did not opt in was refreshed"
    );
    let all = || started.iter().chain([&other]);
    all().try_for_each(|pod| ctr.kill(&pod.id, "SIGKILL"))?;
    for pod in all() {
        let content = content_after_a_restart(cluster, node, &pod.name)?;
        ensure!(
            content == "two",
            "{} sees {content:?} after a restart",
            pod.name
        );
    }
    all_pods_go(cluster, node)
}

/// A pod that opted in. By its name it has a secret, a user namespace, or the guard.
fn refreshed_pod(name: &str) -> PodManifest {
    let volume = if name == "secret" {
        json!({"secret": {"secretName": "conf"}})
    } else {
        config_map()
    };
    let mut pod = PodManifest::new(name, &volume, &sub_path("app.conf"))
        .annotated("bindguard.io/refresh", "true");
    if name.ends_with("userns") {
        pod = pod.with_user_namespace();
    }
    if name.starts_with("guarded") {
        pod = pod.of_class(BY_PATH);
    }
    pod
}

fn config_map() -> Value {
    json!({"configMap": {"name": "conf"}})
}

fn racers(number: usize) -> [String; 2] {
    [format!("stock-{number}"), format!("guarded-{number}")]
}

/// The end state of a pod that is never restarted.
fn has_succeeded(cluster: &Cluster<'_>, name: &str) -> Result<bool> {
    let mut phase = Value::Null;
    cluster.until(&format!("{name} has ended"), |cluster| {
        phase = cluster.get(&format!("pods/{name}"))?["status"]["phase"].clone();
        Ok(["Succeeded", "Failed"].iter().any(|end| phase == *end))
    })?;
    Ok(phase == "Succeeded")
}
