//! Queries to the CRI about one pod: its annotations, its running containers and their init processes.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use bindguard_core::refresh_request::RefreshRequest;
use bindguard_operator::pods::{ContainerState, PodContainer, PodName, Pods as PodsOfNode};
use hyper_util::rt::TokioIo;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    Container as ListedContainer, ContainerFilter, ContainerState as CriContainerState, ContainerStateValue,
    ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest, PodSandbox, PodSandboxFilter,
    PodSandboxMetadata, PodSandboxState, PodSandboxStateValue, StatusRequest,
};
use serde::Deserialize;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::Pod;
use crate::refresher::Container;

/// The label with which the kubelet marks a sandbox (`pkg/kubelet/types/labels.go`).
const POD_UID: &str = "io.kubernetes.pod.uid";

/// Time limit of one query.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why the CRI gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// It refused a call.
    #[error("call {method} of the CRI")]
    Call {
        /// The method.
        method: &'static str,
        /// Its status.
        #[source]
        source: Box<tonic::Status>,
    },
    /// No query was possible: the agent ends.
    #[error("no answer from the CRI in time")]
    Silent,
}

/// A connection, made at the first query and again after a restart of the runtime.
#[derive(Debug, Clone)]
pub struct Cri {
    client: RuntimeServiceClient<Channel>,
}

impl Cri {
    /// A client of this socket. Nothing is connected yet.
    pub fn of(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connector = service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        let endpoint = Endpoint::from_static("http://cri").timeout(PATIENCE).connect_timeout(PATIENCE);
        Self { client: RuntimeServiceClient::new(endpoint.connect_with_connector_lazy(connector)) }
    }

    /// The pod with this uid, if it has a running sandbox; without its containers.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn pod(&self, uid: &str) -> Result<Option<Pod>, CriError> {
        let filter = PodSandboxFilter {
            state: Some(PodSandboxStateValue { state: PodSandboxState::SandboxReady.into() }),
            label_selector: HashMap::from([(POD_UID.to_owned(), uid.to_owned())]),
            ..PodSandboxFilter::default()
        };
        let request = ListPodSandboxRequest { filter: Some(filter) };
        let answer = self.client.clone().list_pod_sandbox(request).await;
        let items = answer.map_err(failed("ListPodSandbox"))?.into_inner().items;
        Ok(items.into_iter().max_by_key(|sandbox| sandbox.created_at).map(Pod::from))
    }

    /// All pods with their containers, for a survey of the node.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn pods_of_node(&self) -> Result<PodsOfNode, CriError> {
        let sandboxes = self.client.clone().list_pod_sandbox(ListPodSandboxRequest::default()).await;
        let sandboxes = sandboxes.map_err(failed("ListPodSandbox"))?.into_inner().items;
        let containers = self.client.clone().list_containers(ListContainersRequest::default()).await;
        let containers = containers.map_err(failed("ListContainers"))?.into_inner().containers;
        Ok(from_lists(sandboxes, containers))
    }

    /// The running containers of a sandbox. One that ends meanwhile is left out.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn containers(&self, sandbox: &str) -> Result<Vec<Container>, CriError> {
        let filter = ContainerFilter {
            state: Some(ContainerStateValue { state: CriContainerState::ContainerRunning.into() }),
            pod_sandbox_id: sandbox.to_owned(),
            ..ContainerFilter::default()
        };
        let request = ListContainersRequest { filter: Some(filter) };
        let answer = self.client.clone().list_containers(request).await;
        let mut containers = Vec::new();
        for listed in answer.map_err(failed("ListContainers"))?.into_inner().containers {
            let name = listed.metadata.unwrap_or_default().name;
            if let Some(pid) = self.pid(&listed.id).await? {
                containers.push(Container { id: listed.id, name, pid, pod: None });
            }
        }
        Ok(containers)
    }

    /// The configuration that the CRI plugin of containerd reports; `None` if the runtime is another one.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn config(&self) -> Result<Option<serde_json::Value>, CriError> {
        let answer = self.client.clone().status(StatusRequest { verbose: true }).await.map_err(failed("Status"))?;
        Ok(answer.into_inner().info.get("config").and_then(|text| serde_json::from_str(text).ok()))
    }

    /// The pid of a container's init; `None` if it ended, or the runtime has no such process, as with a virtual machine.
    async fn pid(&self, id: &str) -> Result<Option<u32>, CriError> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
        let answer = match self.client.clone().container_status(request).await {
            Err(status) if status.code() == tonic::Code::NotFound => return Ok(None),
            answer => answer.map_err(failed("ContainerStatus"))?.into_inner(),
        };
        let info = answer.info.get("info").and_then(|text| serde_json::from_str::<Info>(text).ok());
        Ok(info.and_then(|info| info.pid).filter(|pid| *pid > 0))
    }
}

/// The part that containerd and CRI-O both write.
#[derive(Debug, Deserialize)]
struct Info {
    pid: Option<u32>,
}

impl From<PodSandbox> for Pod {
    fn from(sandbox: PodSandbox) -> Self {
        let metadata = sandbox.metadata.unwrap_or_default();
        Self {
            sandbox: sandbox.id,
            name: metadata.name,
            namespace: metadata.namespace,
            annotations: sandbox.annotations.into_iter().collect(),
        }
    }
}

/// The pods of two lists of the CRI.
fn from_lists(sandboxes: Vec<PodSandbox>, containers: Vec<ListedContainer>) -> PodsOfNode {
    let mut pods = PodsOfNode::default();
    let mut names = HashMap::new();
    for sandbox in sandboxes {
        let metadata = sandbox.metadata.unwrap_or_default();
        let is_ready = sandbox.state == i32::from(PodSandboxState::SandboxReady);
        let PodSandboxMetadata { name, namespace, uid, .. } = metadata;
        if is_ready {
            let annotation = |name: &str| sandbox.annotations.get(name).map(String::as_str);
            pods.refresh_requests.insert(uid.clone(), RefreshRequest::from_annotations(annotation));
        }
        let pod = PodName { uid: Some(uid), namespace: Some(namespace), name: Some(name) };
        let state = if is_ready { ContainerState::Running } else { ContainerState::Exited };
        names.insert(sandbox.id.clone(), pod.clone());
        let (name, attempt, guarded) = (None, None, None);
        pods.containers.push(PodContainer { id: sandbox.id, name, state: Some(state), attempt, pod, guarded });
    }
    pods.containers.extend(containers.into_iter().map(|container| {
        let metadata = container.metadata.unwrap_or_default();
        PodContainer {
            pod: names.get(&container.pod_sandbox_id).cloned().unwrap_or_default(),
            id: container.id,
            name: Some(metadata.name),
            state: Some(state(container.state)),
            attempt: Some(metadata.attempt),
            guarded: None,
        }
    }));
    pods
}

fn state(number: i32) -> ContainerState {
    match CriContainerState::try_from(number) {
        Ok(CriContainerState::ContainerCreated) => ContainerState::Created,
        Ok(CriContainerState::ContainerRunning) => ContainerState::Running,
        Ok(CriContainerState::ContainerExited) => ContainerState::Exited,
        Ok(CriContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

fn failed(method: &'static str) -> impl FnOnce(tonic::Status) -> CriError {
    move |status| CriError::Call { method, source: Box::new(status) }
}
