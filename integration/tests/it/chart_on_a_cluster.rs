//! `make kubelet`: helm installs the chart on a real cluster with a single node, upgrades the
//! release to the removal, and uninstalls the release.
//!
//! The DaemonSet's pods run from an image like that of `config/Dockerfile`, under a kubelet, with
//! the node's root mounted. The story plays systemd: it restarts containerd whenever a pod has
//! requested that.

use bindguard_integration::prelude::*;
use std::cell::Cell;
use std::os::unix::fs::symlink;

use bindguard_integration::cluster::{Cluster, Helm, Network, PodManifest};
use bindguard_integration::doc_commands::repository;
use bindguard_integration::programs::{AGENT, SHIM, binaries_under_test};

const NAMESPACE: &str = "kube-system";
const RELEASE: &str = "bindguard";
const IMAGE: &str = concat!("bindguard.test/bindguard-node:", env!("CARGO_PKG_VERSION"));
const KUBECTL: &str = "bindguard.test/kubectl:1";
const PROGRAM: &str = "/usr/local/bin/bindguard-runtime";
const FILE: &str = "/etc/app/app.conf";
const VALUES: [&str; 6] = [
    "restart=true",
    "image.registry=bindguard.test",
    "image.pullPolicy=Never",
    "removal.enabled=true",
    "removal.kubectlImage=bindguard.test/kubectl:1",
    "agent.refresh=annotated",
];

#[test]
#[ignore = "builds a kubelet, ten minutes: make kubelet"]
fn containerd_1_7() {
    let network = Network::enter().expect("a network namespace");
    Setup::on(Generation::V1_7)
        .bare()
        .cri()
        .story(|node| comes_and_goes(node, &network));
}

#[test]
#[ignore = "needs Kubernetes 1.30 or newer: make kubelet KUBERNETES=DIR"]
fn newest_containerd() {
    let network = Network::enter().expect("a network namespace");
    Setup::on(Generation::NEWEST)
        .bare()
        .cri()
        .story(|node| comes_and_goes(node, &network));
}

fn comes_and_goes(node: &Node, network: &Network) -> Result<()> {
    let before = fs::read(node.containerd_config())?;
    let cluster = Cluster::start_whole(node, network)?;
    let fleet = Fleet::on(node, &cluster)?;
    fleet.helm(&["install", RELEASE, &Helm::chart()])?;
    fleet.is_ready(RELEASE)?;
    fleet.is_ready("bindguard-agent")?;
    ensure!(
        fleet.restarts.get() == 1,
        "containerd was restarted {} times",
        fleet.restarts.get()
    );
    fleet.guarded_pod_runs()?;
    fleet.running_container_reads_an_update()?;
    fleet.plugin_prints_the_state()?;

    let installed = fs::read(node.containerd_config())?;
    let words = [
        "delete",
        "pods",
        "--namespace",
        NAMESPACE,
        "--selector",
        "app.kubernetes.io/name=bindguard",
    ];
    cluster.kubectl(&words, "")?.success()?;
    fleet.is_ready(RELEASE)?;
    ensure!(
        fs::read(node.containerd_config())? == installed,
        "the end of a pod changed the node"
    );
    ensure!(
        fleet.restarts.get() == 1,
        "a replaced pod had containerd restarted again"
    );

    fleet.helm(&["upgrade", RELEASE, &Helm::chart(), "--set", "mode=remove"])?;
    fleet.is_ready(RELEASE)?;
    fleet.goes(&before)?;
    fleet.nothing_runs_of("bindguard-agent")?;
    fleet.class_is_there("after mode=remove")?;
    ensure!(
        !fleet.is_labelled()?,
        "the node still gets pods of the class"
    );

    fleet.helm(&["rollback", RELEASE])?;
    fleet.is_ready(RELEASE)?;
    ensure!(Path::new(PROGRAM).exists(), "it was not installed again");
    fleet.pods_outlive_the_removal(&before)?;
    fleet.helm(&["upgrade", RELEASE, &Helm::chart()])?;
    fleet.is_ready(RELEASE)?;
    fleet.pod_outlives_the_hook(&before)?;
    fleet.helm(&["install", RELEASE, &Helm::chart()])?;
    fleet.is_ready(RELEASE)?;
    fleet.helm(&["uninstall", RELEASE, "--wait"])?;
    is_clean(node, &before)?;
    [RELEASE, "bindguard-agent", "bindguard-removal"]
        .into_iter()
        .try_for_each(|name| fleet.nothing_runs_of(name))?;
    fleet.class_is_there("after helm uninstall")?;
    // the object that stays is the release's own again
    fleet.helm(&["install", RELEASE, &Helm::chart()])?;
    fleet.is_ready(RELEASE)
}

fn is_clean(node: &Node, before: &[u8]) -> Result<()> {
    ensure!(
        fs::read(node.containerd_config())? == before,
        "not the bytes that were there"
    );
    ensure!(!Path::new(PROGRAM).exists(), "a program is left");
    Ok(())
}

/// The release, and the node's systemd.
struct Fleet<'n> {
    node: &'n Node,
    cluster: &'n Cluster<'n>,
    helm: Helm,
    restarts: Cell<usize>,
}

impl<'n> Fleet<'n> {
    fn on(node: &'n Node, cluster: &'n Cluster<'n>) -> Result<Self> {
        let built = binaries_under_test()?;
        let place = |name: &str| (built.join(name), Path::new("/usr/local/bin").join(name));
        cluster.add_image(
            IMAGE,
            "/usr/local/bin",
            &[SHIM, GUARD, CLI, AGENT].map(place),
        )?;
        cluster.add_image(KUBECTL, "/usr/bin", &cluster.kubectl_files()?)?;
        // in a folder of the node's own PATH, not of the image's
        symlink(
            node.programs().join("systemctl"),
            "/usr/local/sbin/systemctl",
        )
        .context("link systemctl")?;
        fs::create_dir_all("/etc/bindguard")?;
        let roots = format!("kubelet.roots = [{:?}]\n", node.kubelet().root());
        fs::write("/etc/bindguard/config.toml", roots).context("write the node's config")?;
        Ok(Self {
            node,
            cluster,
            helm: Helm::on(cluster, NAMESPACE)?,
            restarts: Cell::new(0),
        })
    }

    /// bindguard is the default, and its removal ends while pods of both kinds run. Their
    /// containers restart afterwards.
    fn pods_outlive_the_removal(&self, before: &[u8]) -> Result<()> {
        let chart = Helm::chart();
        self.helm(&["upgrade", RELEASE, &chart, "--set", "default=true"])?;
        self.is_ready(RELEASE)?;
        let pod = |name: &str| {
            PodManifest::new(
                name,
                &json!({"emptyDir": {}}),
                &[json!({"mountPath": "/data"})],
            )
        };
        self.apply_guarded(pod("by-class"))?;
        self.cluster.apply(&pod("by-default").object())?;
        let names = ["by-class", "by-default"];
        names.iter().try_for_each(|name| self.runs_after(name, 0))?;

        // the pod of the removal is created while bindguard is the default
        let remove = ["--set", "default=true", "--set", "mode=remove"];
        self.helm(&[&["upgrade", RELEASE, &chart][..], &remove].concat())?;
        self.is_ready(RELEASE)?;
        let file = self.node.containerd_files()?;
        ensure!(
            !file.contains("default_runtime_name = \"bindguard\""),
            "the default stays: {file}"
        );
        names.iter().try_for_each(|name| self.restarts(name))?;
        self.cluster
            .kubectl(&["delete", "pod", "by-class", "by-default"], "")?
            .success()?;
        self.goes(before)
    }

    /// The removal ends on the node; a pod of the class keeps the handler until the kubelet has
    /// removed the pod's containers.
    fn goes(&self, before: &[u8]) -> Result<()> {
        self.until("the handler goes after its pods", |_| {
            Ok(fs::read(self.node.containerd_config())? == before)
        })?;
        self.until("the programs go after the handler", |_| {
            Ok(!Path::new(PROGRAM).exists())
        })?;
        is_clean(self.node, before)
    }

    /// A pod needs the handler for longer than the hook of `helm uninstall` waits.
    fn pod_outlives_the_hook(&self, before: &[u8]) -> Result<()> {
        let chart = Helm::chart();
        self.helm(&["upgrade", RELEASE, &chart, "--set", "removal.timeout=30s"])?;
        self.is_ready(RELEASE)?;
        let pod = PodManifest::new(
            "outlives",
            &json!({"emptyDir": {}}),
            &[json!({"mountPath": "/data"})],
        );
        self.apply_guarded(pod)?;
        self.runs_after("outlives", 0)?;
        ensure!(
            !self.helm_ends(&["uninstall", RELEASE])?,
            "helm says that a node with parts of bindguard is clean"
        );
        ensure!(
            !self.helm_ends(&["install", RELEASE, &chart])?,
            "an installation begins while the removal goes on"
        );
        self.cluster
            .kubectl(&["delete", "pod", "outlives"], "")?
            .success()?;
        self.is_ready("bindguard-removal")?;
        is_clean(self.node, before)?;
        let kinds = "daemonset,job,serviceaccount,role,rolebinding,clusterrole,clusterrolebinding";
        let words = [
            "delete",
            kinds,
            "bindguard-removal",
            "--namespace",
            NAMESPACE,
        ];
        self.cluster.kubectl(&words, "")?.success()?;
        self.nothing_runs_of("bindguard-removal")
    }

    /// A kubelet refuses a pod of the class for ever while the node has no label.
    fn apply_guarded(&self, pod: PodManifest) -> Result<()> {
        self.until("the node gets pods of the class", |_| self.is_labelled())?;
        self.cluster.apply(&pod.guarded().object())
    }

    fn runs_after(&self, pod: &str, restarts: u64) -> Result<()> {
        let mut status = Value::Null;
        let runs = self.until(&format!("the container of {pod} runs"), |cluster| {
            status = cluster.get(&format!("pods/{pod}"))?["status"].take();
            let app = &status["containerStatuses"][0];
            Ok(!app["state"]["running"].is_null() && app["restartCount"] == restarts)
        });
        runs.with_context(|| format!("the pod's status: {status}"))
    }

    fn restarts(&self, pod: &str) -> Result<()> {
        let app = self.cluster.app_of(pod)?;
        let id = app["containerID"].as_str().unwrap_or_default();
        let id = id.trim_start_matches("containerd://");
        let ctr = self.node.ctr().in_namespace("k8s.io");
        ctr.kill(id, "SIGKILL")?;
        self.runs_after(pod, 1)
    }

    /// The kubelet looks a pod's class up at every sync.
    fn class_is_there(&self, when: &str) -> Result<()> {
        let found = self
            .cluster
            .kubectl(&["get", "runtimeclass", "bindguard"], "")?;
        ensure!(found.status.success(), "no class {when}: {found:?}");
        Ok(())
    }

    /// True if the node has the label that the class selects.
    fn is_labelled(&self) -> Result<bool> {
        let words = [
            "get",
            "nodes",
            "--selector",
            "bindguard.io/active=true",
            "--output",
            "name",
        ];
        Ok(!self.cluster.kubectl(&words, "")?.success()?.is_empty())
    }

    /// Runs helm to its success.
    fn helm(&self, words: &[&str]) -> Result<()> {
        ensure!(self.helm_ends(words)?, "helm {words:?} fails");
        Ok(())
    }

    /// Runs helm to its end, and returns true if helm succeeds.
    fn helm_ends(&self, words: &[&str]) -> Result<bool> {
        let values: Vec<&str> = VALUES.iter().flat_map(|value| ["--set", value]).collect();
        let mut helm = match words[0] {
            "uninstall" | "rollback" => self.helm.start(words)?,
            _ => self.helm.apply_chart(&[words, &values].concat())?,
        };
        let mut ended = None;
        self.until(&format!("helm {} has ended", words[0]), |_| {
            ended = helm.try_wait()?;
            Ok(ended.is_some())
        })?;
        Ok(ended.is_some_and(|status| status.success()))
    }

    /// Waits, and restarts containerd whenever a pod requests it.
    fn until(&self, what: &str, mut is_so: impl FnMut(&Cluster<'_>) -> Result<bool>) -> Result<()> {
        self.cluster.until(what, |cluster| {
            let log =
                fs::read_to_string(self.node.programs().join("systemctl.log")).unwrap_or_default();
            ensure!(
                log.lines().all(|line| line == "restart containerd"),
                "unexpected calls of systemctl: {log}"
            );
            if log.lines().count() > self.restarts.get() {
                self.restarts.set(log.lines().count());
                self.node.restart_containerd(Signal::SIGTERM)?;
            }
            is_so(cluster)
        })
    }

    /// Waits until every pod of the DaemonSet's current template is ready.
    fn is_ready(&self, daemon_set: &str) -> Result<()> {
        self.until(&format!("the pods of {daemon_set} are ready"), |cluster| {
            let object = self.daemon_set(cluster, daemon_set)?;
            let (status, current) = (&object["status"], &object["metadata"]["generation"]);
            let all = ["numberReady", "updatedNumberScheduled"]
                .iter()
                .all(|key| status[key] == 1);
            // the old pod may be ready until the new pod is made
            let old = self.pods_of(cluster, daemon_set)?.len() > 1;
            Ok(status["observedGeneration"] == *current && all && !old)
        })
    }

    fn daemon_set(&self, cluster: &Cluster<'_>, name: &str) -> Result<Value> {
        let words = [
            "get",
            "daemonset",
            name,
            "--namespace",
            NAMESPACE,
            "--output",
            "json",
        ];
        Ok(serde_json::from_str(
            &cluster.kubectl(&words, "")?.success()?,
        )?)
    }

    fn pods_of(&self, cluster: &Cluster<'_>, name: &str) -> Result<Vec<Value>> {
        let label = format!("app.kubernetes.io/name={name}");
        let words = [
            "get",
            "pods",
            "--namespace",
            NAMESPACE,
            "--selector",
            &label,
            "--output",
            "json",
        ];
        let mut list: Value = serde_json::from_str(&cluster.kubectl(&words, "")?.success()?)?;
        Ok(list["items"]
            .as_array_mut()
            .map(std::mem::take)
            .unwrap_or_default())
    }

    fn nothing_runs_of(&self, name: &str) -> Result<()> {
        self.until(&format!("no pod of {name} is left"), |cluster| {
            Ok(self.pods_of(cluster, name)?.is_empty())
        })
    }

    /// `kubectl bindguard`, of docs/agent.md: the plugin of the real kubectl reads the node by the
    /// installer's pod. Its findings need a node with a first process of its own: kubectl_plugin.rs
    /// has them. The agent's pod, with fewer privileges, has the same answers.
    fn plugin_prints_the_state(&self) -> Result<()> {
        let folder = self.node.disk().join("plugins");
        fs::create_dir_all(&folder)?;
        let plugin = folder.join("kubectl-bindguard");
        fs::copy(
            repository().join("config/kubectl/kubectl-bindguard"),
            &plugin,
        )
        .context("copy the plugin")?;
        let programs = Cluster::programs().context("the cluster's programs")?;
        let path = std::env::var("PATH").unwrap_or_default();
        let run_plugin = |words: &[&str]| -> Result<Finished> {
            let mut kubectl = Command::new(programs.join("kubectl"));
            kubectl.arg("bindguard").args(words);
            kubectl.env("KUBECONFIG", self.cluster.kubeconfig()).env(
                "PATH",
                format!("{}:{}:{path}", folder.display(), programs.display()),
            );
            run(kubectl)
        };
        let table = run_plugin(&[])?;
        let lines: Vec<&str> = table.stdout.lines().collect();
        ensure!(
            table.code() == 2
                && lines.len() > 1
                && lines[1].contains("findings: pod bindguard-")
                && lines[1].contains(env!("CARGO_PKG_VERSION"))
                && lines[1].contains("containerd=bindguard"),
            "{table:?}"
        );
        let json = run_plugin(&["-o", "json", "--namespace", NAMESPACE])?;
        let nodes: Value = serde_json::from_str(&json.stdout)
            .with_context(|| format!("read the plugin's JSON: {json:?}"))?;
        ensure!(
            nodes[0]["pod"].to_string().contains("bindguard-")
                && nodes[0]["status"]["version"] == env!("CARGO_PKG_VERSION"),
            "{nodes}"
        );
        // an exec in the agent's pod lands in the mount namespace of the node
        let agent = &self.pods_of(self.cluster, "bindguard-agent")?[0];
        let id = agent["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id.unwrap_or_default().trim_start_matches("containerd://");
        let program = format!(
            "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}/rootfs/usr/local/bin/bindguard"
        );
        for verb in ["status", "diagnose"] {
            let words = [
                "exec",
                "daemonset/bindguard-agent",
                "--namespace",
                NAMESPACE,
                "--",
                &program,
                verb,
                "--json",
            ];
            // the exit status is 1 if the node has findings
            let answer = self.cluster.kubectl(&words, "")?;
            let report: Value = serde_json::from_str(&answer.stdout)
                .with_context(|| format!("read the agent's {verb}: {answer:?}"))?;
            let status = &nodes[0]["status"];
            ensure!(
                report["checked"].is_u64() || report["daemons"] == status["daemons"],
                "{report} and {nodes}"
            );
        }
        let nowhere = run_plugin(&["-n", "default"])?;
        ensure!(
            nowhere.code() == 2 && nowhere.stderr.contains("namespace default"),
            "{nowhere:?}"
        );
        Ok(())
    }

    /// A pod of the RuntimeClass runs under the installed shim, and goes.
    fn guarded_pod_runs(&self) -> Result<()> {
        let guarded = PodManifest::new(
            "guarded",
            &json!({"emptyDir": {}}),
            &[json!({"mountPath": "/data"})],
        );
        self.apply_guarded(guarded)?;
        self.runs_after("guarded", 0)?;
        let shim: PathBuf = fs::canonicalize(Path::new("/usr/local/bin").join(SHIM))?;
        ensure!(
            self.node.shims_of(&shim)? == 1,
            "the pod runs under another shim"
        );
        self.cluster
            .kubectl(&["delete", "pod", "guarded"], "")?
            .success()
            .map(drop)
    }

    /// The agent's pod refreshes a container under the stock shim.
    fn running_container_reads_an_update(&self) -> Result<()> {
        self.cluster.apply_payload("conf", &["app.conf"], "one")?;
        let mounts = [json!({"mountPath": FILE, "subPath": "app.conf"})];
        let pod = PodManifest::new(
            "refreshed",
            &json!({"configMap": {"name": "conf"}}),
            &mounts,
        );
        self.cluster
            .apply(&pod.annotated("bindguard.io/refresh", "true").object())?;
        let mut id = String::new();
        self.until("the refreshed pod runs", |cluster| {
            let app = cluster.app_of("refreshed")?;
            id = app["containerID"]
                .as_str()
                .unwrap_or_default()
                .trim_start_matches("containerd://")
                .to_owned();
            Ok(!app["state"]["running"].is_null())
        })?;
        // the agent watches a volume once its subpath is there
        thread::sleep(Duration::from_secs(1));
        self.cluster.apply_payload("conf", &["app.conf"], "two")?;
        let ctr = self.node.ctr().in_namespace("k8s.io");
        self.until("the container reads the update", |_| {
            Ok(ctr.read(&id, FILE)? == "two")
        })?;
        let reasons = "jsonpath={.items[*].reason}";
        let of_pod = [
            "get",
            "events",
            "--field-selector",
            "involvedObject.name=refreshed",
            "--output",
            reasons,
        ];
        self.until("the pod has an event of the agent", |cluster| {
            Ok(cluster
                .kubectl(&of_pod, "")?
                .success()?
                .contains("BindMountRefreshed"))
        })?;
        self.cluster
            .kubectl(&["delete", "pod", "refreshed"], "")?
            .success()
            .map(drop)
    }
}
