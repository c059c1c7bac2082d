//! `make kubelet`: the volume of a CSI driver that is restarted, under a real kubelet. The running
//! container reads the new volume; it restarts and its pod is deleted as if nothing had happened.

use bindguard_integration::cluster::{CSI_FILE, Cluster, CsiDriver, PodManifest, RealKubelet};
use bindguard_integration::prelude::*;

use crate::real_kubelet::{Change, FILE, Started, all_pods_go, content_after_a_restart};

/// The file as a subPath, beside the whole volume in which [`FILE`] lies.
const SUB_PATH: &str = "/etc/sub.conf";

#[test]
#[ignore = "builds a kubelet, ten minutes: make kubelet"]
fn a_driver_that_restarts() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        let cluster = Cluster::start(node, RealKubelet::AsReleased, 5)?;
        running_containers_read_the_new_volume(node, &cluster)
    });
}

#[test]
#[ignore = "builds a newer kubelet: make kubelet KUBERNETES=DIR"]
fn a_driver_that_restarts_on_the_newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cluster = Cluster::start(node, RealKubelet::AsReleased, 5)?;
        running_containers_read_the_new_volume(node, &cluster)
    });
}

fn running_containers_read_the_new_volume(node: &Node, cluster: &Cluster<'_>) -> Result<()> {
    let driver = CsiDriver::start(cluster, "one")?;
    let _agent = Agent::start(node, "")?;
    let names = ["stock", "guarded", "other"];
    for name in names {
        cluster.apply(&pod(name).object())?;
    }
    let started = names.map(|name| Started::of(cluster, name, Change::Host));
    let started = started.into_iter().collect::<Result<Vec<_>>>()?;
    let ctr = node.ctr().in_namespace("k8s.io");

    for content in ["two", "three"] {
        driver.mount_anew(content)?;
        for pod in started.iter().filter(|pod| pod.name != "other") {
            for file in [FILE, SUB_PATH] {
                let what = format!("{} reads {content} in {file}", pod.name);
                cluster.until(&what, |_| Ok(ctr.read(&pod.id, file)? == content))?;
            }
            let restarts = &cluster.app_of(&pod.name)?["restartCount"];
            ensure!(*restarts == 0, "{} was restarted", pod.name);
        }
        for pod in started.iter().filter(|pod| pod.name == "other") {
            let read = ctr.read(&pod.id, FILE)?;
            ensure!(read == "one", "a pod that did not opt in reads {read:?}");
        }
    }
    started
        .iter()
        .try_for_each(|pod| ctr.kill(&pod.id, "SIGKILL"))?;
    for pod in &started {
        let content = content_after_a_restart(cluster, node, &pod.name)?;
        ensure!(content == "three", "{} reads {content:?}", pod.name);
    }
    all_pods_go(cluster, node)
}

/// A pod with the volume and a subPath of it. By its name it has the guard, or did not opt in.
fn pod(name: &str) -> PodManifest {
    let mounts = [
        json!({"mountPath": "/etc/app"}),
        json!({"mountPath": SUB_PATH, "subPath": CSI_FILE}),
    ];
    let pod = PodManifest::new(name, &CsiDriver::volume(), &mounts);
    match name {
        "other" => pod,
        "guarded" => opted_in(pod).guarded(),
        _ => opted_in(pod),
    }
}

fn opted_in(pod: PodManifest) -> PodManifest {
    pod.annotated("bindguard.io/refresh-binds", "volumes")
}
