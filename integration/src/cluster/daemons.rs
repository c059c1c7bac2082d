//! Starts etcd, kube-apiserver and kubelet, with their configuration.

use std::fs;
use std::net::TcpListener;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use super::network::API_SERVER;
use super::pods::NODE;
use super::{Cluster, RealKubelet};
use crate::node::SOCKET;
use crate::process::host;

/// Its owner may do everything.
const TOKEN: &str = "the-story";

/// The kernel settings that a kubelet writes or requires: the machine is not the story's to change.
const SYSCTLS: [(&str, &str); 3] = [
    ("vm/overcommit_memory", "1"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
];

/// The extent of a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlPlane {
    /// etcd and an API server that allows every request.
    ApiOnly,
    /// Controllers, scheduler, service accounts and RBAC, too.
    Whole,
}

impl Cluster<'_> {
    pub(super) fn start_control_plane(&self) -> Result<()> {
        let folder = self.folder();
        fs::create_dir(&folder).context("make a folder for the cluster")?;
        let [clients, peers, api] = free_ports()?.map(|port| format!("127.0.0.1:{port}"));
        let api = match self.control_plane {
            ControlPlane::ApiOnly => api,
            ControlPlane::Whole => format!("{API_SERVER}:443"),
        };
        let file = |name: &str| folder.join(name).display().to_string();
        let etcd = [
            format!("--data-dir={}", file("etcd")),
            format!("--listen-client-urls=http://{clients}"),
            format!("--advertise-client-urls=http://{clients}"),
            format!("--listen-peer-urls=http://{peers}"),
            format!("--initial-advertise-peer-urls=http://{peers}"),
            format!("--initial-cluster=default=http://{peers}"),
        ];
        self.start_daemon("etcd", &etcd)?;
        fs::write(
            folder.join("tokens"),
            format!("{TOKEN},story,1,system:masters\n"),
        )
        .context("write the tokens")?;
        host(["openssl", "genrsa", "-out", &file("accounts.key"), "2048"])?;
        let (address, port) = api.split_once(':').context("an address has a port")?;
        let mut apiserver = vec![
            format!("--etcd-servers=http://{clients}"),
            format!("--bind-address={address}"),
            format!("--secure-port={port}"),
            format!("--cert-dir={}", file("certificates")),
            format!("--token-auth-file={}", file("tokens")),
            "--allow-privileged".to_owned(),
            "--service-account-issuer=https://bindguard.test".to_owned(),
            format!("--service-account-key-file={}", file("accounts.key")),
            format!(
                "--service-account-signing-key-file={}",
                file("accounts.key")
            ),
            "--service-cluster-ip-range=192.0.2.0/24".to_owned(),
        ];
        apiserver.extend(match self.control_plane {
            ControlPlane::ApiOnly => [
                "--authorization-mode=AlwaysAllow",
                "--disable-admission-plugins=ServiceAccount",
            ]
            .map(str::to_owned)
            .to_vec(),
            ControlPlane::Whole => [
                "--authorization-mode=RBAC".to_owned(),
                format!("--advertise-address={API_SERVER}"),
                // by default the node's name, which no server of names knows
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
            ]
            .to_vec(),
        });
        self.start_daemon("kube-apiserver", &apiserver)?;
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "story", "cluster": {"server": format!("https://{api}"), "certificate-authority": file("certificates/apiserver.crt")}}],
            "users": [{"name": "story", "user": {"token": TOKEN}}],
            "contexts": [{"name": "story", "context": {"cluster": "story", "user": "story"}}],
            "current-context": "story",
        });
        fs::write(&self.kubeconfig, kubeconfig.to_string()).context("write the kubeconfig")
    }

    pub(super) fn start_controllers(&self) -> Result<()> {
        let file = |name: &str| self.folder().join(name).display().to_string();
        let mut common = vec![
            format!("--kubeconfig={}", self.kubeconfig.display()),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ];
        if !self.is_own_build {
            // the insecure port of older versions
            common.push("--port=0".to_owned());
        }
        self.start_daemon("kube-scheduler", &common)?;
        let own = [
            format!(
                "--service-account-private-key-file={}",
                file("accounts.key")
            ),
            format!("--root-ca-file={}", file("certificates/apiserver.crt")),
        ];
        self.start_daemon("kube-controller-manager", &[&common[..], &own].concat())
    }

    pub(super) fn start_kubelet(&self, kubelet: RealKubelet, sync_seconds: u32) -> Result<()> {
        let folder = self.folder();
        self.make_cgroup_root()?;
        let [port] = free_ports()?;
        let address = match self.control_plane {
            ControlPlane::ApiOnly => "127.0.0.1",
            ControlPlane::Whole => API_SERVER,
        };
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": address,
            "port": port,
            "readOnlyPort": 0,
            "healthzPort": 0,
            // below the node's own, where its keeper finds them
            "cgroupRoot": format!("/{}", self.node.name()),
            "cgroupDriver": "cgroupfs",
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            "makeIPTablesUtilChains": false,
            "oomScoreAdj": 0,
            // no pod is evicted because the machine's disk is full
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": format!("{sync_seconds}s"),
        });
        let endpoint = format!("unix://{SOCKET}");
        let mut runtime_flags = Vec::new();
        if self.is_own_build {
            config["containerRuntimeEndpoint"] = json!(endpoint);
            // since 1.35 a kubelet refuses cgroup v1 by default
            config["failCgroupV1"] = json!(false);
        } else {
            runtime_flags = vec![
                "--container-runtime=remote".to_owned(),
                format!("--container-runtime-endpoint={endpoint}"),
            ];
        }
        fs::write(folder.join("kubelet.json"), config.to_string())
            .context("write the kubelet's configuration")?;
        let arguments = [
            format!("--config={}", folder.join("kubelet.json").display()),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!(
                "--cert-dir={}",
                folder.join("kubelet-certificates").display()
            ),
            format!("--root-dir={}", self.node.kubelet().root().display()),
            format!("--hostname-override={NODE}"),
        ];
        runtime_flags.push(match self.control_plane {
            // the RuntimeClass that bindguard ships selects this label
            ControlPlane::ApiOnly => "--node-labels=bindguard=canary".to_owned(),
            // a network of the story's own has no route that shows the address
            ControlPlane::Whole => format!("--node-ip={API_SERVER}"),
        });
        let arguments = [&arguments[..], &runtime_flags].concat();
        let program = match kubelet {
            RealKubelet::AsReleased => "kubelet",
            RealKubelet::Unfixed => "kubelet-unfixed",
        };
        let mut command = self.with_settings()?;
        command.arg(self.programs.join(program)).args(&arguments);
        self.spawn(program, command)
    }

    /// A command that runs its arguments with the [`SYSCTLS`]. The settings are mounts in a private
    /// `/proc`: while `/proc` has mounts, the kernel lets no user namespace mount its own `/proc`.
    /// All mounts outside `/proc` are shared with the node.
    fn with_settings(&self) -> Result<Command> {
        let mut script = "mount --make-private /proc\n".to_owned();
        for (number, (name, wanted)) in SYSCTLS.iter().enumerate() {
            let file = self.folder().join(format!("sysctl-{number}"));
            fs::write(&file, wanted).with_context(|| format!("write {name}"))?;
            script.push_str(&format!(
                "mount --bind {} /proc/sys/{name}\n",
                file.display()
            ));
        }
        script.push_str("exec \"$@\"");
        let mut command = self.node.command("unshare")?;
        command.args([
            "--mount",
            "--propagation",
            "unchanged",
            "sh",
            "-ec",
            &script,
            "sh",
        ]);
        Ok(command)
    }

    /// A kubelet makes the cgroups of its pods, but not the parent cgroup.
    fn make_cgroup_root(&self) -> Result<()> {
        for hierarchy in fs::read_dir("/sys/fs/cgroup")
            .context("list the cgroup hierarchies")?
            .flatten()
        {
            let group = hierarchy.path().join(self.node.name());
            fs::create_dir_all(&group)
                .with_context(|| format!("create the cgroup {}", group.display()))?;
        }
        Ok(())
    }
}

/// Different free ports: all listeners are open at the same time.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let taken: Vec<TcpListener> = (0..N)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<Result<_, _>>()
        .context("find a free port")?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&taken) {
        *port = listener.local_addr().context("look at a port")?.port();
    }
    Ok(ports)
}
