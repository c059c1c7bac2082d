//! A real kubelet on a node, with the etcd and the kube-apiserver that it uses.
//!
//! Pods are bound to the node by name and use its network, so neither a scheduler nor a CNI is
//! needed. Without the controllers only the story writes objects. `cluster/fetch.sh` builds the
//! programs.
//!
//! A [whole](Cluster::start_whole) cluster has the controllers and the scheduler as well, and pods
//! with a [`Network`].

mod csi_driver;
mod daemons;
mod helm;
mod network;
mod pods;

use std::cell::RefCell;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

pub use self::csi_driver::{CSI_FILE, CsiDriver};
pub use self::helm::Helm;
pub use self::network::Network;
pub use self::pods::{NODE, PodManifest};

use self::daemons::ControlPlane;

use crate::doc_commands::repository;
use crate::image;
use crate::mount_calls::unmount;
use crate::mounts;
use crate::node::Node;
use crate::process::{Finished, LIMIT, run, run_with_input};
use crate::waiting::until;

/// The kubelet of `fetch.sh` or `build.sh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RealKubelet {
    AsReleased,
    /// The same without kubernetes#89629: a subpath that is mounted stays as it is.
    Unfixed,
}

/// A running cluster with a single node.
#[derive(Debug)]
pub struct Cluster<'n> {
    node: &'n Node,
    programs: PathBuf,
    is_own_build: bool,
    control_plane: ControlPlane,
    kubeconfig: PathBuf,
    daemons: RefCell<Vec<Child>>,
}

impl<'n> Cluster<'n> {
    /// The folder that `cluster/fetch.sh` or `cluster/build.sh` filled: `$BINDGUARD_CLUSTER/bin`.
    pub fn programs() -> Option<PathBuf> {
        let folder = Path::new(&env::var_os("BINDGUARD_CLUSTER")?).join("bin");
        folder.join("kubelet").is_file().then_some(folder)
    }

    /// Starts the three daemons in sequence, and applies the RuntimeClass that bindguard ships.
    ///
    /// The kubelet syncs each pod and rewrites its volumes every `sync_seconds` and half as many
    /// again.
    pub fn start(node: &'n Node, kubelet: RealKubelet, sync_seconds: u32) -> Result<Self> {
        let cluster = Self::start_as(node, ControlPlane::ApiOnly, kubelet, sync_seconds)?;
        cluster
            .kubectl(
                &[
                    "apply",
                    cluster.validation(),
                    "--filename",
                    &shipped("runtimeclass.yaml"),
                ],
                "",
            )?
            .success()?;
        Ok(cluster)
    }

    /// Starts a cluster with controllers, a scheduler and RBAC in a network of its own. It has
    /// nothing of bindguard.
    pub fn start_whole(node: &'n Node, network: &Network) -> Result<Self> {
        let plugins = Self::folder_of_programs()?.with_file_name("network/bin");
        network.give_pods_addresses(node, &plugins)?;
        let cluster = Self::start_as(node, ControlPlane::Whole, RealKubelet::AsReleased, 5)?;
        cluster.start_controllers()?;
        cluster.until("the node is ready", |cluster| {
            let node = cluster.get(&format!("nodes/{NODE}"))?;
            let is_ready =
                |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
            Ok(node["status"]["conditions"]
                .as_array()
                .is_some_and(|all| all.iter().any(is_ready)))
        })?;
        Ok(cluster)
    }

    fn start_as(
        node: &'n Node,
        control_plane: ControlPlane,
        kubelet: RealKubelet,
        sync_seconds: u32,
    ) -> Result<Self> {
        let programs = Self::folder_of_programs()?;
        let kubeconfig = node.disk().join("cluster/kubeconfig");
        let is_own_build = programs.with_file_name("version").exists();
        let cluster = Self {
            node,
            programs,
            is_own_build,
            control_plane,
            kubeconfig,
            daemons: RefCell::default(),
        };
        cluster.start_control_plane()?;
        cluster.until("kube-apiserver answers", |cluster| {
            Ok(cluster.get("namespaces/default").is_ok())
        })?;
        cluster.start_kubelet(kubelet, sync_seconds)?;
        cluster.until("the node is registered", |cluster| {
            Ok(cluster.get(&format!("nodes/{NODE}")).is_ok())
        })?;
        Ok(cluster)
    }

    fn folder_of_programs() -> Result<PathBuf> {
        Self::programs()
            .context("no kubelet: run integration/cluster/fetch.sh, set BINDGUARD_CLUSTER")
    }

    /// Gives the node an image with these programs, each at its path there.
    pub fn add_image(&self, name: &str, path: &str, programs: &[(PathBuf, PathBuf)]) -> Result<()> {
        let archive = self.node.disk().join("image.tar");
        image::write_programs(&archive, name, path, programs)?;
        self.node.ctr().in_namespace("k8s.io").import(&archive)?;
        self.node.cri()?.wait_for_image(name)
    }

    /// The kubectl of the cluster, with the libraries that it needs, as [`Cluster::add_image`]
    /// takes them.
    pub fn kubectl_files(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let kubectl = self.programs.join("kubectl");
        let real =
            fs::canonicalize(&kubectl).with_context(|| format!("find {}", kubectl.display()))?;
        let mut ldd = Command::new("ldd");
        ldd.arg(&real);
        // lines are `libc.so.6 => /lib/libc.so.6 (0x...)` and `/lib64/ld-linux-x86-64.so.2 (0x...)`
        let libraries = run(ldd)?.stdout;
        let libraries = libraries
            .split_whitespace()
            .filter(|word| word.starts_with('/'));
        let files = libraries.map(|library| (PathBuf::from(library), PathBuf::from(library)));
        Ok(files
            .chain([(real, PathBuf::from("/usr/bin/kubectl"))])
            .collect())
    }

    /// Runs `kubectl` with these words.
    pub fn kubectl(&self, words: &[&str], input: &str) -> Result<Finished> {
        let mut command = Command::new(self.programs.join("kubectl"));
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(words);
        run_with_input(command, input, LIMIT)
    }

    /// A kubeconfig of its administrator.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Makes an object, or changes it.
    pub fn apply(&self, object: &Value) -> Result<()> {
        self.kubectl(
            &["apply", self.validation(), "--filename", "-"],
            &object.to_string(),
        )?
        .success()
        .map(drop)
    }

    /// Makes a configMap and a secret of this name, or changes them: every key has this content.
    pub fn apply_payload(&self, name: &str, keys: &[&str], content: &str) -> Result<()> {
        let data: Value = keys
            .iter()
            .map(|key| ((*key).to_owned(), Value::from(content)))
            .collect();
        self.apply(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}))?;
        self.apply(&json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}))
    }

    /// Has the API server say whether it would take a manifest that bindguard ships.
    pub fn would_take(&self, manifest: &str) -> Result<()> {
        self.kubectl(
            &[
                "apply",
                self.validation(),
                "--dry-run=server",
                "--filename",
                &shipped(manifest),
            ],
            "",
        )?
        .success()
        .map(drop)
    }

    /// Vendors' API servers, which a source tree may be of, do not publish the schemas that kubectl
    /// validates with.
    fn validation(&self) -> &'static str {
        if self.is_own_build {
            "--validate=false"
        } else {
            "--validate=true"
        }
    }

    /// An object, `KIND/NAME`.
    pub fn get(&self, object: &str) -> Result<Value> {
        let text = self
            .kubectl(&["get", object, "--output", "json"], "")?
            .success()?;
        serde_json::from_str(&text).with_context(|| format!("parse {object}"))
    }

    /// Waits, two minutes at most.
    pub fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        while !is_so(self).with_context(|| format!("see whether {what}"))? {
            if begin.elapsed() > Duration::from_secs(120) {
                bail!("not so after two minutes: {what}");
            }
            thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    /// The kubelet's status of a pod's container `app`; `null` while there is none.
    pub fn app_of(&self, pod: &str) -> Result<Value> {
        Ok(self.get(&format!("pods/{pod}"))?["status"]["containerStatuses"][0].clone())
    }

    /// The node loses its power and boots: every process but those of the control plane is killed, and the
    /// mounts, `/run` and the cgroups of pods are gone. `meanwhile` happens while the node is off.
    pub fn restart_node(
        &self,
        kubelet: RealKubelet,
        sync_seconds: u32,
        meanwhile: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let has_name = |daemon: &Child, name: &str| {
            fs::read_to_string(format!("/proc/{}/comm", daemon.id()))
                .is_ok_and(|comm| comm.starts_with(name))
        };
        for daemon in self.daemons.borrow_mut().iter_mut() {
            if has_name(daemon, "kubelet") {
                daemon.kill().context("kill the kubelet")?;
                daemon.wait().context("wait for the kubelet")?;
            }
        }
        self.node.without_containerd(Signal::SIGKILL, || {
            let of_pods = || {
                let pids = self.node.all_processes().into_iter().filter(|pid| {
                    fs::read_to_string(format!("/proc/{pid}/cgroup"))
                        .is_ok_and(|cgroups| cgroups.contains("/kubepods"))
                });
                Ok::<_, anyhow::Error>(
                    self.node
                        .shims()?
                        .into_iter()
                        .chain(pids)
                        .collect::<Vec<_>>(),
                )
            };
            until("the node's processes have ended", || {
                let pids = of_pods()?;
                for pid in &pids {
                    // it may have ended meanwhile
                    let _ = kill(Pid::from_raw((*pid).try_into()?), Signal::SIGKILL);
                }
                Ok(pids.is_empty())
            })?;
            let lost = [
                self.node.kubelet().root().join("pods"),
                "/run/containerd".into(),
            ];
            let mut table = mounts::table()?;
            table.retain(|mount| lost.iter().any(|folder| mount.target.starts_with(folder)));
            for mount in table.iter().rev() {
                unmount(&mount.target)?;
            }
            for folder in ["/run/containerd", "/run/bindguard", "/run/netns"] {
                if Path::new(folder).exists() {
                    fs::remove_dir_all(folder).with_context(|| format!("remove {folder}"))?;
                }
            }
            meanwhile(self)
        })?;
        self.start_kubelet(kubelet, sync_seconds)
    }

    /// Starts a program of the cluster in the node; it ends with the node, or when the cluster is
    /// dropped.
    fn start_daemon(&self, name: &str, arguments: &[String]) -> Result<()> {
        let mut command = self.node.command(self.programs.join(name))?;
        command.args(arguments);
        self.spawn(name, command)
    }

    fn spawn(&self, name: &str, mut command: Command) -> Result<()> {
        let folder = self.folder();
        let log = fs::File::create(folder.join(format!("{name}.log")))
            .with_context(|| format!("make a log for {name}"))?;
        command.current_dir(&folder).stdin(Stdio::null());
        command
            .stdout(log.try_clone().context("duplicate a log")?)
            .stderr(log);
        self.daemons
            .borrow_mut()
            .push(command.spawn().with_context(|| format!("start {name}"))?);
        Ok(())
    }

    fn folder(&self) -> PathBuf {
        self.node.disk().join("cluster")
    }
}

fn shipped(manifest: &str) -> String {
    repository()
        .join("config")
        .join(manifest)
        .display()
        .to_string()
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // the kubelet first: its messages about the end of the other daemons are noise
        for daemon in self.daemons.get_mut().iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
