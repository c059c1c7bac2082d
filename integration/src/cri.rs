//! A blocking CRI client: what a kubelet says to containerd to run a pod.
//!
//! Pods use the host's network, so no CNI is needed. The pods' cgroups are under the node's name,
//! or in the node's slice, so that the node's keeper finds the cgroups. The calling thread drives
//! the connection, and only during a call: no thread outlives the node.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatsRequest, ContainerStatus,
    ContainerStatusRequest, CreateContainerRequest, ExecSyncRequest, ImageSpec, ImageStatusRequest,
    LinuxContainerConfig, LinuxContainerResources, LinuxContainerSecurityContext,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, Mount, MountPropagation, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata, PodSandboxState,
    PodSandboxStatusRequest, RemoveContainerRequest, RemovePodSandboxRequest, RunPodSandboxRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
    UpdateContainerResourcesRequest, VersionRequest,
};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Response, Status};
use tower::service_fn;

use crate::image::BUSYBOX;
use crate::waiting::until;

/// The time limit of a call.
const LIMIT: Duration = Duration::from_secs(120);

/// A connection to the CRI service of a node.
#[derive(Debug)]
pub struct Cri {
    runtime: Runtime,
    channel: Channel,
    cgroup: String,
    attempts: Cell<u32>,
}

#[derive(Clone, Debug)]
pub struct Sandbox {
    id: String,
    config: PodSandboxConfig,
}

impl Sandbox {
    /// The name of its container.
    pub fn id(&self) -> &str {
        &self.id
    }
}

/// The result of a program in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: i32,
    pub stdout: String,
}

/// A volume mount, as the kubelet puts it into a container's CRI config.
pub fn mount(source: &std::path::Path, destination: &str, propagation: MountPropagation) -> Mount {
    Mount {
        container_path: destination.to_owned(),
        host_path: source.display().to_string(),
        propagation: propagation.into(),
        ..Mount::default()
    }
}

impl Cri {
    /// Connects to containerd's socket; pods are made in this cgroup.
    pub(crate) fn connect(socket: &'static str, cgroup: String) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .context("make a runtime for the CRI client")?;
        let connector = service_fn(move |_: Uri| async move {
            Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?))
        });
        let endpoint = Endpoint::from_static("http://containerd").timeout(LIMIT);
        let channel = runtime
            .block_on(endpoint.connect_with_connector(connector))
            .with_context(|| format!("connect to {socket}"))?;
        let cri = Self {
            runtime,
            channel,
            cgroup,
            attempts: Cell::new(0),
        };
        cri.wait_until_it_is_ready()?;
        Ok(cri)
    }

    /// Runs a pod's sandbox through a runtime handler.
    pub fn run_pod(&self, handler: &str, name: &str, uid: &str) -> Result<Sandbox> {
        self.run_pod_in("default", handler, name, uid)
    }

    /// As `run_pod`, in a namespace of the cluster.
    pub fn run_pod_in(
        &self,
        namespace: &str,
        handler: &str,
        name: &str,
        uid: &str,
    ) -> Result<Sandbox> {
        self.run_annotated_pod_in(namespace, handler, name, uid, &[])
    }

    pub fn run_annotated_pod(
        &self,
        handler: &str,
        name: &str,
        uid: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Sandbox> {
        self.run_annotated_pod_in("default", handler, name, uid, annotations)
    }

    /// A privileged pod with the node's processes, as the installer's.
    pub fn run_node_pod(&self, name: &str) -> Result<Sandbox> {
        let mut config = self.pod_config("kube-system", name, name, &[]);
        if let Some(linux) = &mut config.linux {
            linux.security_context = Some(LinuxSandboxSecurityContext {
                namespace_options: Some(NamespaceOption {
                    pid: NamespaceMode::Node.into(),
                    ..host_network()
                }),
                privileged: true,
                ..Default::default()
            });
        }
        self.run_sandbox("", config)
    }

    fn run_annotated_pod_in(
        &self,
        namespace: &str,
        handler: &str,
        name: &str,
        uid: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Sandbox> {
        self.run_sandbox(handler, self.pod_config(namespace, name, uid, annotations))
    }

    fn pod_config(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        annotations: &[(&str, &str)],
    ) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                uid: uid.to_owned(),
                namespace: namespace.to_owned(),
                attempt: 0,
            }),
            log_directory: format!("/run/pods/{uid}"),
            labels: labels(namespace, name, uid).into(),
            annotations: annotations
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("/{}", self.cgroup),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(host_network()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn run_sandbox(&self, handler: &str, config: PodSandboxConfig) -> Result<Sandbox> {
        let request = RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: handler.to_owned(),
        };
        let name = config.metadata.as_ref().map_or("", |pod| &pod.name);
        let mut client = self.runtime_service();
        let response = self.call(
            &format!("run the pod {name} with {handler}"),
            client.run_pod_sandbox(request),
        )?;
        Ok(Sandbox {
            id: response.pod_sandbox_id,
            config,
        })
    }

    /// Creates and starts a container of the busybox image, and returns its id.
    pub fn start_container(
        &self,
        pod: &Sandbox,
        name: &str,
        words: &[&str],
        mounts: &[Mount],
    ) -> Result<String> {
        let id = self.create_container(pod, name, words, mounts)?;
        self.start_created(&id, name)?;
        Ok(id)
    }

    /// Creates a container of the busybox image, and returns its id. The CRI calls the shim only
    /// for the start.
    pub fn create_container(
        &self,
        pod: &Sandbox,
        name: &str,
        words: &[&str],
        mounts: &[Mount],
    ) -> Result<String> {
        let attempt = self.attempts.replace(self.attempts.get() + 1);
        let mut labels = pod.config.labels.clone();
        labels.insert("io.kubernetes.container.name".to_owned(), name.to_owned());
        let of_pod = pod
            .config
            .linux
            .as_ref()
            .and_then(|linux| linux.security_context.as_ref());
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: name.to_owned(),
                attempt,
            }),
            labels,
            image: Some(image(BUSYBOX)),
            command: words.iter().map(|word| (*word).to_owned()).collect(),
            mounts: mounts.to_vec(),
            log_path: format!("{name}_{attempt}.log"),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: of_pod.and_then(|pod| pod.namespace_options.clone()),
                    privileged: of_pod.is_some_and(|pod| pod.privileged),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: Some(config),
            sandbox_config: Some(pod.config.clone()),
        };
        let mut client = self.runtime_service();
        let created = self.call(
            &format!("create the container {name}"),
            client.create_container(request),
        )?;
        Ok(created.container_id)
    }

    /// Starts a container that was created.
    pub fn start_created(&self, id: &str, name: &str) -> Result<()> {
        let request = StartContainerRequest {
            container_id: id.to_owned(),
        };
        let mut client = self.runtime_service();
        self.call(
            &format!("start the container {name}"),
            client.start_container(request),
        )
        .map(drop)
    }

    /// Runs a program in a container.
    pub fn exec(&self, id: &str, words: &[&str]) -> Result<Answer> {
        let cmd = words.iter().map(|word| (*word).to_owned()).collect();
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd,
            timeout: 30,
        };
        let answer = self.call(
            &format!("run {words:?} in {id}"),
            self.runtime_service().exec_sync(request),
        )?;
        Ok(Answer {
            code: answer.exit_code,
            stdout: String::from_utf8_lossy(&answer.stdout).into_owned(),
        })
    }

    /// The content of a file as a container sees it.
    pub fn read(&self, id: &str, path: &str) -> Result<String> {
        let answer = self.exec(id, &["cat", path])?;
        if answer.code != 0 {
            bail!("cat {path} in {id}: exit code {}", answer.code)
        }
        Ok(answer.stdout)
    }

    pub fn status(&self, id: &str) -> Result<ContainerStatus> {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: false,
        };
        let response = self.call(
            &format!("query the status of {id}"),
            self.runtime_service().container_status(request),
        )?;
        response
            .status
            .with_context(|| format!("the answer about {id} has no status"))
    }

    /// The pid of a container's init.
    pub fn pid(&self, id: &str) -> Result<u32> {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: true,
        };
        let answer = self.call(
            &format!("query the pid of {id}"),
            self.runtime_service().container_status(request),
        )?;
        let info: serde_json::Value =
            serde_json::from_str(answer.info.get("info").context("it has no info")?)?;
        let pid = info["pid"].as_u64().context("its info has no pid")?;
        u32::try_from(pid).context("its pid is too large")
    }

    /// Waits until a container has exited, and returns its exit code.
    pub fn wait_for_exit(&self, id: &str) -> Result<i32> {
        let mut status = ContainerStatus::default();
        until(&format!("{id} has exited"), || {
            status = self.status(id)?;
            Ok(status.state() == ContainerState::ContainerExited)
        })?;
        Ok(status.exit_code)
    }

    /// A container's output, from the kubelet's log folder.
    pub fn logs(&self, id: &str) -> Result<String> {
        let path = self.status(id)?.log_path;
        std::fs::read_to_string(&path).with_context(|| format!("read the container's log {path}"))
    }

    /// Sets a container's memory limit while it runs, as an in-place resize of a pod does.
    pub fn limit_memory(&self, id: &str, bytes: i64) -> Result<()> {
        let linux = LinuxContainerResources {
            memory_limit_in_bytes: bytes,
            ..Default::default()
        };
        let request = UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(linux),
            ..Default::default()
        };
        self.call(
            &format!("limit {id}"),
            self.runtime_service().update_container_resources(request),
        )
        .map(drop)
    }

    /// The figures that the kubelet queries all the time: CPU time used so far, in nanoseconds, and
    /// memory in use, in bytes.
    pub fn usage(&self, id: &str) -> Result<(u64, u64)> {
        let request = ContainerStatsRequest {
            container_id: id.to_owned(),
        };
        let answer = self.call(
            &format!("query the figures of {id}"),
            self.runtime_service().container_stats(request),
        )?;
        let stats = answer
            .stats
            .with_context(|| format!("the answer about {id} has no figures"))?;
        let cpu = stats
            .cpu
            .and_then(|cpu| cpu.usage_core_nano_seconds)
            .map_or(0, |value| value.value);
        let memory = stats
            .memory
            .and_then(|memory| memory.working_set_bytes)
            .map_or(0, |value| value.value);
        Ok((cpu, memory))
    }

    /// Stops a container after `grace` seconds.
    pub fn stop(&self, id: &str, grace: i64) -> Result<()> {
        let request = StopContainerRequest {
            container_id: id.to_owned(),
            timeout: grace,
        };
        self.call(
            &format!("stop {id}"),
            self.runtime_service().stop_container(request),
        )
        .map(drop)
    }

    /// Removes a stopped container.
    pub fn remove(&self, id: &str) -> Result<()> {
        let request = RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        self.call(
            &format!("remove {id}"),
            self.runtime_service().remove_container(request),
        )
        .map(drop)
    }

    /// Stops and removes a pod with all its containers.
    pub fn remove_pod(&self, pod: &Sandbox) -> Result<()> {
        let id = &pod.id;
        let mut client = self.runtime_service();
        let stop = StopPodSandboxRequest {
            pod_sandbox_id: id.clone(),
        };
        self.call(&format!("stop the pod {id}"), client.stop_pod_sandbox(stop))?;
        let remove = RemovePodSandboxRequest {
            pod_sandbox_id: id.clone(),
        };
        self.call(
            &format!("remove the pod {id}"),
            client.remove_pod_sandbox(remove),
        )
        .map(drop)
    }

    /// True if a pod's sandbox runs.
    pub fn is_ready(&self, pod: &Sandbox) -> Result<bool> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: pod.id.clone(),
            verbose: false,
        };
        let mut client = self.runtime_service();
        let answer = self.call(
            &format!("query the status of the pod {}", pod.id),
            client.pod_sandbox_status(request),
        )?;
        Ok(answer
            .status
            .is_some_and(|status| status.state() == PodSandboxState::SandboxReady))
    }

    /// The CRI plugin learns of imported images through events, a moment later than `ctr`.
    pub(crate) fn wait_for_image(&self, name: &str) -> Result<()> {
        let mut client = ImageServiceClient::new(self.channel.clone());
        until(&format!("the CRI plugin sees the image {name}"), || {
            let request = ImageStatusRequest {
                image: Some(image(name)),
                verbose: false,
            };
            Ok(self
                .call(
                    &format!("look for the image {name}"),
                    client.image_status(request),
                )?
                .image
                .is_some())
        })
    }

    /// containerd serves its socket before the CRI plugin has read its containers.
    fn wait_until_it_is_ready(&self) -> Result<()> {
        let mut client = self.runtime_service();
        let mut last = Ok(());
        let ready = until("the CRI answers", || {
            last = self
                .call(
                    "query the CRI's version",
                    client.version(VersionRequest::default()),
                )
                .map(drop);
            Ok(last.is_ok())
        });
        last.and(ready)
    }

    fn runtime_service(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone())
    }

    fn call<T>(
        &self,
        what: &str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T> {
        let answer = self
            .runtime
            .block_on(call)
            .with_context(|| what.to_owned())?;
        Ok(answer.into_inner())
    }
}

/// As `pkg/kubelet/types/labels.go` of Kubernetes names them.
fn labels(namespace: &str, name: &str, uid: &str) -> [(String, String); 3] {
    [("namespace", namespace), ("name", name), ("uid", uid)]
        .map(|(key, value)| (format!("io.kubernetes.pod.{key}"), value.to_owned()))
}

fn host_network() -> NamespaceOption {
    NamespaceOption {
        network: NamespaceMode::Node.into(),
        pid: NamespaceMode::Container.into(),
        ..Default::default()
    }
}

fn image(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    }
}
