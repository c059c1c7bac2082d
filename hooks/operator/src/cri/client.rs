//! A connection to the socket of a CRI, and its calls.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    Container, ContainerFilter, ContainerState, ContainerStateValue, ContainerStatusRequest,
    ListContainersRequest, ListPodSandboxRequest, PodSandbox, PodSandboxFilter, PodSandboxState,
    PodSandboxStateValue, PodSandboxStatusRequest, StatusRequest,
};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};
use tower::service_fn;

use super::info::ContainerInfo;
use super::lists;
use crate::pods::Pods;
use crate::unix_http::refuse_server_of_user;

/// The size of the largest answer: the kubelet's own limit (`pkg/kubelet/cri/remote/utils.go`).
const MAX_ANSWER: usize = 16 << 20;

/// The label with which the kubelet marks sandboxes and containers (`pkg/kubelet/types/labels.go`).
pub const POD_UID: &str = "io.kubernetes.pod.uid";

/// The reason why a CRI gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The socket has no server.
    #[error("connect")]
    Connect(#[source] io::Error),
    /// The CRI refused a call, or the connection broke.
    #[error("call {method} of the CRI")]
    Call {
        /// The method.
        method: &'static str,
        /// The status of the call.
        #[source]
        source: Box<Status>,
    },
    /// The answer does not contain what the runtime usually reports.
    #[error("the answer to {method} has no {missing}")]
    Incomplete {
        /// The method.
        method: &'static str,
        /// The name of the missing part.
        missing: &'static str,
    },
    /// No query was possible: the program ends.
    #[error("no answer from the CRI in time")]
    Silent,
}

impl CriError {
    /// True if the server of the socket has no CRI, as Docker's containerd.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Call { source, .. } if source.code() == Code::Unimplemented)
    }

    /// True for the answers of a CRI plugin that is not initialized yet.
    pub fn is_starting(&self) -> bool {
        matches!(self, Self::Call { source, .. }
            if matches!(source.code(), Code::Unknown | Code::Unavailable))
    }
}

fn failed(method: &'static str) -> impl FnOnce(Status) -> CriError {
    move |status| CriError::Call {
        method,
        source: Box::new(status),
    }
}

/// A client. Its clones share a connection, which is made again after a restart of the runtime.
#[derive(Debug, Clone)]
pub struct Cri {
    client: RuntimeServiceClient<Channel>,
}

impl Cri {
    /// A client of this socket with a time limit for each call. The first call connects.
    pub fn of(socket: &Path, timeout: Duration) -> Self {
        Self::of_accepted(socket, timeout, |_| Ok(()))
    }

    /// The same; `accepts` decides about each new connection.
    pub fn of_accepted(
        socket: &Path,
        timeout: Duration,
        accepts: impl Fn(&UnixStream) -> io::Result<()> + Clone + Send + 'static,
    ) -> Self {
        let socket = socket.to_owned();
        let connector = service_fn(move |_: Uri| {
            let (socket, accepts) = (socket.clone(), accepts.clone());
            async move {
                let stream = UnixStream::connect(socket).await?;
                refuse_server_of_user(&stream)?;
                accepts(&stream)?;
                Ok::<_, io::Error>(TokioIo::new(stream))
            }
        });
        let endpoint = Endpoint::from_static("http://cri")
            .timeout(timeout)
            .connect_timeout(timeout);
        let channel = endpoint.connect_with_connector_lazy(connector);
        Self {
            client: RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER),
        }
    }

    /// A client of this socket, if a server listens on it.
    ///
    /// # Errors
    /// If the socket is missing or refuses connections.
    pub async fn connect(socket: &Path, timeout: Duration) -> Result<Self, CriError> {
        let stream = UnixStream::connect(socket).await;
        stream
            .and_then(refuse_server_of_user)
            .map_err(CriError::Connect)?;
        Ok(Self::of(socket, timeout))
    }

    /// All pods with their containers.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn pods(&self) -> Result<Pods, CriError> {
        let sandboxes = self.sandboxes().await?;
        let containers = self.list_containers(ContainerFilter::default()).await?;
        Ok(lists::pods(sandboxes, containers))
    }

    /// All sandboxes, in any state.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        self.list_sandboxes(PodSandboxFilter::default()).await
    }

    /// The ready sandboxes with the labels of `label_selector`.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn ready_sandboxes(
        &self,
        label_selector: HashMap<String, String>,
    ) -> Result<Vec<PodSandbox>, CriError> {
        let state = PodSandboxState::SandboxReady.into();
        self.list_sandboxes(PodSandboxFilter {
            state: Some(PodSandboxStateValue { state }),
            label_selector,
            ..PodSandboxFilter::default()
        })
        .await
    }

    /// The running containers of a sandbox, or of all sandboxes.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn running_containers(
        &self,
        sandbox: Option<&str>,
    ) -> Result<Vec<Container>, CriError> {
        let state = ContainerState::ContainerRunning.into();
        self.list_containers(ContainerFilter {
            state: Some(ContainerStateValue { state }),
            pod_sandbox_id: sandbox.unwrap_or_default().to_owned(),
            ..ContainerFilter::default()
        })
        .await
    }

    /// The runtime's facts about a container; `None` if the runtime does not know the container.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn container_info(&self, id: &str) -> Result<Option<ContainerInfo>, CriError> {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: true,
        };
        let answer = match self.client.clone().container_status(request).await {
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            answer => answer.map_err(failed("ContainerStatus"))?.into_inner(),
        };
        Ok(ContainerInfo::in_answer(&answer.info))
    }

    /// The sources of all writable mounts of a pod's containers in any state, by the kubelet's
    /// requests. The kubelet keeps each init container that ended while the pod runs.
    ///
    /// # Errors
    /// If the CRI does not answer, or reports no container of the pod.
    pub async fn writable_mounts(&self, uid: &str) -> Result<Vec<PathBuf>, CriError> {
        let filter = ContainerFilter {
            label_selector: HashMap::from([(POD_UID.to_owned(), uid.to_owned())]),
            ..ContainerFilter::default()
        };
        let containers = self.list_containers(filter).await?;
        if containers.is_empty() {
            return Err(CriError::Incomplete {
                method: "ListContainers",
                missing: "container with the pod's label",
            });
        }
        let mut writable = Vec::new();
        for container in containers {
            let request = ContainerStatusRequest {
                container_id: container.id,
                verbose: false,
            };
            let answer = match self.client.clone().container_status(request).await {
                Err(status) if status.code() == Code::NotFound => continue,
                answer => answer.map_err(failed("ContainerStatus"))?.into_inner(),
            };
            let mounts = answer.status.unwrap_or_default().mounts.into_iter();
            let sources = mounts.filter(|mount| !mount.readonly);
            writable.extend(sources.map(|mount| PathBuf::from(mount.host_path)));
        }
        Ok(writable)
    }

    /// The runtime's facts about a sandbox, as JSON.
    ///
    /// # Errors
    /// If the CRI does not know the sandbox.
    pub async fn sandbox_info(&self, id: &str) -> Result<String, CriError> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: id.to_owned(),
            verbose: true,
        };
        let method = "PodSandboxStatus";
        let answer = self.client.clone().pod_sandbox_status(request).await;
        part_of(
            method,
            answer.map_err(failed(method))?.into_inner().info,
            "info",
        )
    }

    /// The configuration that the runtime read at its start, as JSON.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn active_config(&self) -> Result<String, CriError> {
        let request = StatusRequest { verbose: true };
        let method = "Status";
        let answer = self.client.clone().status(request).await;
        part_of(
            method,
            answer.map_err(failed(method))?.into_inner().info,
            "config",
        )
    }

    async fn list_sandboxes(&self, filter: PodSandboxFilter) -> Result<Vec<PodSandbox>, CriError> {
        let request = ListPodSandboxRequest {
            filter: Some(filter),
        };
        let answer = self.client.clone().list_pod_sandbox(request).await;
        Ok(answer.map_err(failed("ListPodSandbox"))?.into_inner().items)
    }

    async fn list_containers(&self, filter: ContainerFilter) -> Result<Vec<Container>, CriError> {
        let request = ListContainersRequest {
            filter: Some(filter),
        };
        let answer = self.client.clone().list_containers(request).await;
        let answer = answer.map_err(failed("ListContainers"))?.into_inner();
        Ok(answer.containers)
    }
}

fn part_of(
    method: &'static str,
    mut info: HashMap<String, String>,
    missing: &'static str,
) -> Result<String, CriError> {
    info.remove(missing)
        .ok_or(CriError::Incomplete { method, missing })
}
