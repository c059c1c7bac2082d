//! docs/fleet.md and docs/install.md, command by command, on a node that has nothing of bindguard
//! yet: with a containerd that is restarted where the page says so, a dockerd that is reloaded and
//! builds the image, and a kubectl that applies the manifests.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::cluster::Helm;
use bindguard_integration::doc_commands::{Rehearsal, repository};
use bindguard_integration::engines::{self, Docker};
use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::privilege;
use bindguard_integration::programs::binaries_under_test;

const KUBECONFIG: &str = "/run/kubeconfig";
const MANIFESTS: [&str; 4] = [
    "DaemonSet bindguard",
    "DaemonSet bindguard-agent",
    "Pod web",
    "RuntimeClass bindguard",
];
const IMAGE: &str = concat!("bindguard-node:", env!("CARGO_PKG_VERSION"));

#[test]
fn as_it_says() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        symlink(
            node.disk().join("dist").join(CLI),
            node.programs().join(CLI),
        )
        .context("put bindguard on PATH")?;
        let helm = Helm::program().context("no helm: run `make helm`, set BINDGUARD_HELM")?;
        symlink(helm, node.programs().join("helm")).context("put helm on PATH")?;
        for program in ["docker", "kubectl"] {
            symlink(engines::program(program), node.programs().join(program))
                .with_context(|| program.to_owned())?;
        }
        let image = node.disk().join("image");
        fs::create_dir(&image)?;
        host(["mount", "--rbind", "/", &image.display().to_string()])?;
        let before = fs::read(node.containerd_config())?;
        let docker = Docker::start(node)?;
        let api = KubeApi::start()?;
        api.write_config(KUBECONFIG.as_ref())?;
        lay_out_leases(&api);
        lay_out_class(&api);
        let node_object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}});
        api.insert("/api/v1/nodes/node-1", node_object);
        let config = repository().join("config/config.toml");
        let reports = node.disk().join("report.toml");
        // as the page says
        let text = fs::read_to_string(&config)?
            .replace("# stale-subpaths = \"repair\"", "stale-subpaths = \"report\"")
            .replace("# host-root = \"repair\"", "host-root = \"report\"");
        fs::write(&reports, text)?;
        // the build is what made the programs that every story runs
        let folder = format!(
            "make -o build image-folder BIN={}",
            binaries_under_test()?.display()
        );
        let rehearsal = || {
            Rehearsal::on(node)
            .folder(&repository())
            .env("KUBECONFIG", KUBECONFIG)
            .env("DOCKER_HOST", Docker::HOST)
            .env("DOCKER_BUILDKIT", "0")
            .instead_of("make image-folder", &folder)
            // `chart_on_a_cluster` installs and upgrades the chart on a real cluster
            .instead_of("helm install", "helm template")
            .instead_of(
                "helm upgrade bindguard config/chart --namespace kube-system --reuse-values",
                "helm template bindguard config/chart --set image.registry=here",
            )
            .with("report.toml", &reports.display().to_string())
            .with("repair.toml", &config.display().to_string())
            .systemd("restart containerd", || {
                node.restart_containerd(Signal::SIGTERM)
            })
            .systemd("reload docker", || docker.reload())
            .systemd("restart docker", || docker.restart())
            .systemd("daemon-reload", || Ok(()))
            .systemd("restart bindguard-agent", || Ok(()))
            .with("IMAGE", &image.display().to_string())
        };
        rehearsal()
            .with("NODE", "node-1")
            .prints(
                "kubectl label node NODE bindguard=canary",
                &["node/node-1 labeled"],
            )
            .prints(
                "helm install bindguard config/chart --namespace kube-system --set image.registry=registry.example.com",
                &["bindguard: canary"],
            )
            .prints(
                "kubectl apply -f config/daemonset.yaml",
                &["daemonset.apps/bindguard created"],
            )
            .prints(
                "kubectl apply -f config/agent.yaml",
                &["daemonset.apps/bindguard-agent created"],
            )
            .prints(
                "helm upgrade bindguard config/chart --namespace kube-system --reuse-values --set-file config=report.toml",
                &[" stale-subpaths = \"report\"\n"],
            )
            .prints(
                "helm upgrade bindguard config/chart --namespace kube-system --reuse-values --set-file config=repair.toml",
                &[" # stale-subpaths = \"repair\"\n"],
            )
            .prints(
                "kubectl --namespace kube-system get leases --selector app.kubernetes.io/name=bindguard",
                &["bindguard-restart-0"],
            )
            .prints(
                "kubectl --namespace kube-system annotate lease bindguard-restart-0 bindguard.io/restart-failed-",
                &["bindguard-restart-0 annotated"],
            )
            .prints(
                "kubectl --namespace kube-system patch lease bindguard-restart-0 --type merge --patch '{\"spec\":{\"holderIdentity\":null}}'",
                &["bindguard-restart-0 patched"],
            )
            .prints(
                "kubectl get pods --all-namespaces --output jsonpath='{range .items[?(@.spec.runtimeClassName==\"bindguard\")]}{.metadata.namespace}/{.metadata.name}{\"\\n\"}{end}'",
                &["default/of-the-class\n"],
            )
            .prints(
                "kubectl delete runtimeclass bindguard",
                &["\"bindguard\" deleted"],
            )
            .play("docs/fleet.md")?;
        let class = "RuntimeClass bindguard".to_owned();
        ensure!(!api.taken().contains(&class), "the class is not deleted");
        let said = rehearsal()
            .with("NODE", "node-1")
            .prints("bindguard diagnose --all", &["0 checked, 0 with findings"])
            .prints(
                "bindguard status",
                &[
                    "unguarded  containerd has no runtime of bindguard's",
                    "guarded    containerd runs bindguard, for every new pod",
                ],
            )
            .prints(
                "bindguard install --dry-run",
                &["+++ /etc/containerd/config.toml"],
            )
            .prints("bindguard install", &["change   /etc/containerd/config.toml"])
            .prints("kubectl label node NODE bindguard=canary", &["node/node-1"])
            .prints(
                "kubectl apply -f config/runtimeclass.yaml",
                &["runtimeclass.node.k8s.io/bindguard created"],
            )
            .prints("kubectl apply -f config/pod.yaml", &["pod/web created"])
            .prints(
                "bindguard install --default",
                &["change   /etc/containerd/conf.d/zz-bindguard.toml"],
            )
            .prints(
                "bindguard install --default --agent",
                &["create   /etc/systemd/system/bindguard-agent.service"],
            )
            // the image is the node's own root, which has all of it
            .prints(
                "bindguard install --default --root IMAGE",
                &["nothing  no file has to change"],
            )
            .prints(
                "bindguard install docker",
                &["create   /etc/docker/daemon.json"],
            )
            .prints(
                "bindguard install podman",
                &["create   /etc/containers/containers.conf.d/zz-bindguard.conf"],
            )
            .prints(
                "bindguard install crio",
                &["create   /etc/crio/crio.conf.d/zz-bindguard.conf"],
            )
            .prints(
                "bindguard uninstall",
                &[
                    "change   /etc/containerd/config.toml",
                    "remove   /usr/local/bin/bindguard-runtime",
                ],
            )
            .prints(
                "bindguard uninstall --forget-name",
                &["remove   /etc/containers/containers.conf.d/zz-bindguard.conf"],
            )
            .play("docs/install.md")?;
        let applied = api.taken();
        ensure!(
            MANIFESTS
                .iter()
                .all(|it| applied.iter().any(|kind| kind == it)),
            "{applied:?}"
        );
        let ended = docker.run_image(IMAGE, &[], &[])?;
        if needs_no_libraries(&node.disk().join("dist").join(CLI))? {
            let helps = ended.success()?;
            ensure!(
                helps.contains("Examples:"),
                "the image has no bindguard that runs: {helps}"
            );
        } else {
            privilege::skipped(
                "the programs under test are not static, and the image holds nothing else",
            );
        }
        let last = said.last().context("a last command")?;
        ensure!(
            last.status.success(),
            "the document ends with work that remains: {last:?}"
        );
        drop(docker);
        ensure!(
            fs::read(node.containerd_config())? == before,
            "not the bytes that were there"
        );
        gone("/usr/local/bin/bindguard-runtime")?;
        gone("/etc/containers/containers.conf.d/zz-bindguard.conf")?;
        gone("/etc/crio/crio.conf.d/zz-bindguard.conf")?;
        gone("/var/lib/bindguard")
    });
}

/// The restart slots of an installation. A lost node has a slot.
fn lay_out_leases(api: &KubeApi) {
    let path = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": "bindguard-restart-0",
            "namespace": "kube-system",
            "annotations": {"bindguard.io/restart-failed": "node-1"}
        },
        "spec": {"holderIdentity": "node-1"}
    });
    api.insert(&format!("{path}/bindguard-restart-0"), lease.clone());
    let list = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "LeaseList",
        "metadata": {},
        "items": [lease]
    });
    api.insert(path, list);
}

/// The class, a pod that names the class, and another pod.
fn lay_out_class(api: &KubeApi) {
    let class = json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "bindguard"},
        "handler": "bindguard"
    });
    api.insert("/apis/node.k8s.io/v1/runtimeclasses/bindguard", class);
    let pod = |name: &str, spec| {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "default", "name": name},
            "spec": spec
        })
    };
    let pods = json!({
        "apiVersion": "v1",
        "kind": "PodList",
        "metadata": {},
        "items": [
            pod("of-the-class", json!({"runtimeClassName": "bindguard"})),
            pod("of-no-class", json!({}))
        ]
    });
    api.insert("/api/v1/pods", pods);
}

fn needs_no_libraries(program: &Path) -> Result<bool> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    Ok(!run(ldd)?.status.success())
}

fn gone(path: &str) -> Result<()> {
    ensure!(!Path::new(path).exists(), "{path} is left");
    Ok(())
}
