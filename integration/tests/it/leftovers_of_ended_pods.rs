//! "orphaned pod found, but volume paths are still present" (kubernetes#105536): a kubelet forgot a
//! pod and left its mounts. The operator removes the mounts, once the kubelet and the CRI lack the
//! pod for ten minutes. Pods that the kubelet or the CRI has, mounts in use and files stay.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bindguard_integration::cri::Sandbox;
use bindguard_integration::kube_api::{Conduct, KubeApi};
use bindguard_integration::process::Finished;
use bindguard_integration::{Generation, Node, Pod, Setup, VolumeKind, mounts};
use serde_json::{Value, json};

const OBSERVATIONS: &str = "/run/bindguard/absent-pods.json";
const REPAIR: [&str; 2] = ["repair", "--orphaned-pods"];

#[test]
fn are_removed_when_the_api_server_lacks_the_pod() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        let server = Server::start(node, KubeApi::start()?)?;
        server.api.write_config(&server.kubeconfig)?;
        server.has_pods(&["starting"]);
        let pods = Pods::make(node)?;
        nothing_is_done_without_an_answer(node, &server, &pods)?;
        let named = ["--kubeconfig", &server.kubeconfig.display().to_string()].map(str::to_owned);
        the_orphan_is_removed(node, &pods, &named)?;
        pods.end(node)
    });
}

/// The pods are listed by port 10250, with the kubelet's self-signed certificate.
#[test]
fn are_removed_when_the_kubelet_lacks_the_pod() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let server = Server::start(node, KubeApi::start_with_tls()?)?;
        server.write_kubeconfig_with_token()?;
        server.has_pods(&["starting"]);
        let pods = Pods::make(node)?;
        let address = server.api.address();
        let with = |scheme: &str| {
            [
                "--kubelet".to_owned(),
                format!("{scheme}://{address}"),
                "--kubeconfig".to_owned(),
                server.kubeconfig.display().to_string(),
            ]
        };
        // A server that is not the kubelet could say anything.
        refused(&repair(node, &with("https"))?, "certificate")?;
        let pki = node.kubelet().root().join("pki");
        fs::create_dir_all(&pki)?;
        fs::write(pki.join("kubelet.crt"), server.api.certificate())?;
        the_orphan_is_removed(node, &pods, &with("https"))?;
        let requests = server.api.requests();
        ensure!(
            requests
                .iter()
                .all(|request| request.path == "/pods"
                    && request.authorization == "Bearer of-the-node"),
            "{requests:?}"
        );
        pods.end(node)
    });
}

/// The token is for the kubelet alone.
#[test]
fn the_read_only_port_gets_no_token() {
    Setup::on(Generation::V1_7).cri().story(|node| {
        let server = Server::start(node, KubeApi::start()?)?;
        server.write_kubeconfig_with_token()?;
        server.has_pods(&["orphan", "starting", "running"]);
        let pods = Pods::make(node)?;
        let words = [
            "--kubelet".to_owned(),
            format!("http://{}", server.api.address()),
            "--kubeconfig".to_owned(),
            server.kubeconfig.display().to_string(),
        ];
        let ended = repair(node, &words)?;
        ensure!(ended.code() == 0, "{ended:?}");
        let requests = server.api.requests();
        ensure!(
            requests.len() == 1 && requests[0].authorization.is_empty(),
            "{requests:?}"
        );
        pods.end(node)
    });
}

struct Server {
    api: KubeApi,
    kubeconfig: PathBuf,
}

impl Server {
    /// The node's name is its address, which is in the server's certificate.
    fn start(node: &Node, api: KubeApi) -> Result<Self> {
        fs::write(
            node.disk().join("bindguard.toml"),
            format!(
                "kubelet.roots = [{:?}]\nagent.kubernetes.node = \"127.0.0.1\"\n",
                node.kubelet().root()
            ),
        )?;
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let node_object =
            |id: &str| json!({"kind": "Node", "status": {"nodeInfo": {"bootID": id}}});
        api.insert("/api/v1/nodes/127.0.0.1", node_object(boot_id.trim()));
        Ok(Self {
            api,
            kubeconfig: node.disk().join("kubelet.conf"),
        })
    }

    fn has_pods(&self, uids: &[&str]) {
        let pods: Vec<Value> = uids
            .iter()
            .map(|uid| {
                let of_api_server = json!({"kubernetes.io/config.source": "api"});
                json!({"metadata": {"uid": uid, "annotations": of_api_server}})
            })
            .collect();
        let list = json!({"kind": "PodList", "apiVersion": "v1", "items": pods});
        self.api.insert("/pods", list.clone());
        self.api.insert("/api/v1/pods", list);
    }

    fn write_kubeconfig_with_token(&self) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": "https://192.0.2.1:6443"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "node"}}],
            "users": [{"name": "node", "user": {"token": "of-the-node"}}],
        });
        Ok(fs::write(&self.kubeconfig, config.to_string())?)
    }
}

/// Of `orphan` neither the kubelet nor the CRI knows; `starting` has no sandbox yet; `running` is
/// known to the CRI alone, as while the kubelet has just restarted.
struct Pods {
    orphan: Pod,
    starting: Pod,
    running: Pod,
    sandbox: Sandbox,
}

impl Pods {
    fn make(node: &Node) -> Result<Self> {
        let kubelet = node.kubelet();
        let [orphan, starting, running] =
            ["orphan", "starting", "running"].map(|uid| kubelet.pod(uid));
        let (orphan, starting, running) = (orphan?, starting?, running?);
        for pod in [&orphan, &starting, &running] {
            pod.volume(VolumeKind::Secret, "keys", &[("key", "one")])?
                .subpath("app", 0, "key")
                .bind()?;
        }
        Ok(Self {
            orphan,
            starting,
            running,
            sandbox: node.cri()?.run_pod("runc", "running", "running")?,
        })
    }

    fn end(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)?;
        self.starting.delete()?;
        self.running.delete()?;
        if fs::exists(self.orphan.path())? {
            self.orphan.delete()?;
        }
        Ok(())
    }
}

fn nothing_is_done_without_an_answer(node: &Node, server: &Server, pods: &Pods) -> Result<()> {
    let before = mounts::table()?;
    refused(&repair(node, &[])?, "no kubeconfig is known")?;
    let named = [
        "--kubeconfig".to_owned(),
        server.kubeconfig.display().to_string(),
    ];
    let no_cri = ["--cri".to_owned(), "/nowhere.sock".to_owned()];
    refused(
        &repair(node, &[named.clone(), no_cri].concat())?,
        "query /nowhere.sock",
    )?;
    for (conduct, said) in [
        (Conduct::Down, "query the API server"),
        (Conduct::Answer(403), "the story wants it"),
        (Conduct::Hang, "no answer within 5 s"),
    ] {
        server.api.behave(conduct);
        refused(&repair(node, &named)?, said)?;
    }
    server.api.behave(Conduct::Serve);
    let known = server
        .api
        .object("/api/v1/nodes/127.0.0.1")
        .context("the node")?;
    let other = json!({"status": {"nodeInfo": {"bootID": "of another machine"}}});
    server.api.insert("/api/v1/nodes/127.0.0.1", other);
    refused(&repair(node, &named)?, "has another boot id")?;
    server.api.insert("/api/v1/nodes/127.0.0.1", known);
    ensure!(
        !fs::exists(OBSERVATIONS)?,
        "an observation without an answer"
    );
    ensure!(mounts::table()? == before && fs::exists(pods.orphan.path())?);
    Ok(())
}

fn the_orphan_is_removed(node: &Node, pods: &Pods, words: &[String]) -> Result<()> {
    let before = mounts::table()?;
    let first = repair(node, words)?;
    ensure!(
        first.code() == 1
            && first
                .stdout
                .contains("orphan: the kubelet and the CRI lack it for 0 min")
            && first.stdout.contains("run this again"),
        "{first:?}"
    );
    ensure!(!first.stdout.contains("starting") && !first.stdout.contains("running:"));
    make_older(500)?;
    repair(node, words)?;
    ensure!(mounts::table()? == before, "removed before ten minutes");
    make_older(200)?;
    let diagnosed = diagnose(node, words)?;
    ensure!(
        diagnosed.code() == 1
            && diagnosed
                .stdout
                .contains("run: bindguard repair --orphaned-pods")
            && diagnosed
                .stdout
                .contains("volumes/kubernetes.io~secret/keys (tmpfs): mounted"),
        "{diagnosed:?}"
    );
    let dry = repair(node, &[words, &["--dry-run".to_owned()]].concat())?;
    ensure!(dry.code() == 1, "{dry:?}");
    ensure!(mounts::table()? == before, "a dry run changed the mounts");

    // A process in the volume: the umount is not lazy.
    let secret = pods.orphan.path().join("volumes/kubernetes.io~secret/keys");
    let user = File::open(&secret)?;
    let busy = repair(node, words)?;
    ensure!(
        busy.code() == 1
            && busy
                .stdout
                .contains("keys (tmpfs): busy: a process uses it"),
        "{busy:?}"
    );
    ensure!(
        fs::read_to_string(secret.join("key"))? == "one",
        "the volume in use is gone"
    );
    drop(user);
    let file = pods.orphan.path().join("etc-hosts");
    fs::write(&file, "127.0.0.1 localhost\n")?;
    let left = repair(node, words)?;
    ensure!(
        left.code() == 1 && left.stdout.contains(&file.display().to_string()),
        "{left:?}"
    );
    ensure!(!is_mounted_below(pods.orphan.path())? && fs::exists(&file)?);
    ensure!(!fs::exists(pods.orphan.path().join("volumes"))?);
    fs::remove_file(&file)?;
    // The kubelet's empty file below the subpath.
    fs::remove_file(pods.orphan.path().join("volume-subpaths/keys/app/0"))?;
    let done = repair(node, words)?;
    ensure!(done.code() == 0, "{done:?}");
    ensure!(!fs::exists(pods.orphan.path())?);
    for pod in [&pods.starting, &pods.running] {
        let key = pod.path().join("volumes/kubernetes.io~secret/keys/key");
        ensure!(
            fs::read_to_string(key)? == "one",
            "{}",
            pod.path().display()
        );
    }
    Ok(())
}

fn repair(node: &Node, words: &[String]) -> Result<Finished> {
    node.bindguard(REPAIR.map(str::to_owned).iter().chain(words))
}

fn diagnose(node: &Node, words: &[String]) -> Result<Finished> {
    node.bindguard(["diagnose".to_owned()].iter().chain(words))
}

fn refused(ended: &Finished, said: &str) -> Result<()> {
    ensure!(
        ended.code() == 2
            && ended.stdout.is_empty()
            && ended.stderr.lines().count() == 1
            && ended.stderr.starts_with("bindguard: nothing was removed: ")
            && ended.stderr.contains(said),
        "not refused with {said:?}: {ended:?}"
    );
    Ok(())
}

fn is_mounted_below(folder: &Path) -> Result<bool> {
    Ok(mounts::table()?
        .iter()
        .any(|mount| mount.target.starts_with(folder)))
}

/// As if every first observation had been made earlier.
fn make_older(seconds: i64) -> Result<()> {
    let mut recorded: Value = serde_json::from_slice(&fs::read(OBSERVATIONS)?)?;
    let pods = recorded["first_absent"]
        .as_object_mut()
        .context("observations")?;
    for first in pods.values_mut() {
        *first = json!(first.as_i64().context("a time")? - seconds);
    }
    Ok(fs::write(OBSERVATIONS, recorded.to_string())?)
}
