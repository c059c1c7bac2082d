//! Queries to the CRI: pods with their annotations, running containers and their init processes.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::RefreshRequest;
use bindguard_core::spec::SpecUsers;
use bindguard_operator::pods::{ContainerState, PodContainer, PodName, Pods as PodsOfNode};
use hyper_util::rt::TokioIo;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    Container as ListedContainer, ContainerFilter, ContainerState as CriContainerState,
    ContainerStateValue, ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest,
    PodSandbox, PodSandboxFilter, PodSandboxMetadata, PodSandboxState, PodSandboxStateValue,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::Pod;
use super::listing::{Listing, NamedContainer};

/// The label with which the kubelet marks a sandbox (`pkg/kubelet/types/labels.go`).
const POD_UID: &str = "io.kubernetes.pod.uid";

/// Time limit of one query.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

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
        let endpoint = Endpoint::from_static("http://cri")
            .timeout(CALL_TIMEOUT)
            .connect_timeout(CALL_TIMEOUT);
        Self {
            client: RuntimeServiceClient::new(endpoint.connect_with_connector_lazy(connector)),
        }
    }

    /// The pod with this uid, if it has a running sandbox; without its containers.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn pod(&self, uid: &str) -> Result<Option<Pod>, CriError> {
        let label = HashMap::from([(POD_UID.to_owned(), uid.to_owned())]);
        Ok(newest(self.sandboxes(label).await?).remove(uid))
    }

    /// All running pods with their running containers.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn listing(&self) -> Result<Listing, CriError> {
        let began = Instant::now();
        let pods = newest(self.sandboxes(HashMap::new()).await?);
        let mut containers: HashMap<String, Vec<NamedContainer>> = HashMap::new();
        for listed in self.running(String::new()).await? {
            containers
                .entry(listed.pod_sandbox_id.clone())
                .or_default()
                .push(listed.into());
        }
        Ok(Listing::new(began, pods, containers))
    }

    /// All pods with their containers, for a survey of the node.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn pods_of_node(&self) -> Result<PodsOfNode, CriError> {
        let sandboxes = self
            .client
            .clone()
            .list_pod_sandbox(ListPodSandboxRequest::default())
            .await;
        let sandboxes = sandboxes
            .map_err(failed("ListPodSandbox"))?
            .into_inner()
            .items;
        let containers = self
            .client
            .clone()
            .list_containers(ListContainersRequest::default())
            .await;
        let containers = containers
            .map_err(failed("ListContainers"))?
            .into_inner()
            .containers;
        Ok(from_lists(sandboxes, containers))
    }

    /// The running containers of a sandbox.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn containers(&self, sandbox: &str) -> Result<Vec<NamedContainer>, CriError> {
        Ok(self
            .running(sandbox.to_owned())
            .await?
            .into_iter()
            .map(NamedContainer::from)
            .collect())
    }

    /// The ready sandboxes with these labels.
    async fn sandboxes(
        &self,
        label_selector: HashMap<String, String>,
    ) -> Result<Vec<PodSandbox>, CriError> {
        let state = Some(PodSandboxStateValue {
            state: PodSandboxState::SandboxReady.into(),
        });
        let filter = PodSandboxFilter {
            state,
            label_selector,
            ..PodSandboxFilter::default()
        };
        let answer = self
            .client
            .clone()
            .list_pod_sandbox(ListPodSandboxRequest {
                filter: Some(filter),
            })
            .await;
        Ok(answer.map_err(failed("ListPodSandbox"))?.into_inner().items)
    }

    /// The running containers of a sandbox, or of all if its id is empty.
    async fn running(&self, pod_sandbox_id: String) -> Result<Vec<ListedContainer>, CriError> {
        let state = Some(ContainerStateValue {
            state: CriContainerState::ContainerRunning.into(),
        });
        let filter = ContainerFilter {
            state,
            pod_sandbox_id,
            ..ContainerFilter::default()
        };
        let answer = self
            .client
            .clone()
            .list_containers(ListContainersRequest {
                filter: Some(filter),
            })
            .await;
        Ok(answer
            .map_err(failed("ListContainers"))?
            .into_inner()
            .containers)
    }

    /// The init of a container; `None` if it ended, or the runtime has no such process, as with a
    /// virtual machine.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn init(&self, id: &str) -> Result<Option<Init>, CriError> {
        let request = ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: true,
        };
        let answer = match self.client.clone().container_status(request).await {
            Err(status) if status.code() == tonic::Code::NotFound => return Ok(None),
            answer => answer.map_err(failed("ContainerStatus"))?.into_inner(),
        };
        let info = answer
            .info
            .get("info")
            .and_then(|text| serde_json::from_str::<Info>(text).ok());
        Ok(info.and_then(Info::init))
    }
}

/// The init process of a container.
#[derive(Debug, Clone)]
pub struct Init {
    /// Its pid.
    pub pid: u32,
    /// The user namespaces in the spec that the runtime recorded. `None` if the CRI reports no spec
    /// that can be read.
    pub spec: Option<Arc<SpecUsers>>,
}

/// The part that containerd and CRI-O both write.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    pid: Option<u32>,
    runtime_spec: Option<Box<RawValue>>,
}

impl Info {
    fn init(self) -> Option<Init> {
        let pid = self.pid.filter(|pid| *pid > 0)?;
        let spec = self
            .runtime_spec
            .and_then(|spec| SpecUsers::from_spec(spec.get().as_bytes()).ok());
        Some(Init {
            pid,
            spec: spec.map(Arc::new),
        })
    }
}

/// The pods of these sandboxes by their uids. Of two sandboxes of one pod the newer one counts.
fn newest(mut sandboxes: Vec<PodSandbox>) -> HashMap<String, Pod> {
    sandboxes.sort_by_key(|sandbox| sandbox.created_at);
    let by_uid =
        |sandbox: PodSandbox| Some((sandbox.labels.get(POD_UID)?.clone(), Pod::from(sandbox)));
    sandboxes.into_iter().filter_map(by_uid).collect()
}

impl From<ListedContainer> for NamedContainer {
    fn from(listed: ListedContainer) -> Self {
        Self {
            id: listed.id,
            name: listed.metadata.unwrap_or_default().name,
        }
    }
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
        let PodSandboxMetadata {
            name,
            namespace,
            uid,
            ..
        } = metadata;
        if is_ready {
            let annotation = |name: &str| sandbox.annotations.get(name).map(String::as_str);
            pods.refresh_requests
                .insert(uid.clone(), RefreshRequest::from_annotations(annotation));
        }
        let pod = PodName {
            uid: Some(uid),
            namespace: Some(namespace),
            name: Some(name),
        };
        let state = if is_ready {
            ContainerState::Running
        } else {
            ContainerState::Exited
        };
        names.insert(sandbox.id.clone(), pod.clone());
        let (name, attempt, guarded) = (None, None, None);
        pods.containers.push(PodContainer {
            id: sandbox.id,
            name,
            state: Some(state),
            attempt,
            pod,
            guarded,
            shim_version: None,
        });
    }
    pods.containers
        .extend(containers.into_iter().map(|container| {
            let metadata = container.metadata.unwrap_or_default();
            PodContainer {
                pod: names
                    .get(&container.pod_sandbox_id)
                    .cloned()
                    .unwrap_or_default(),
                id: container.id,
                name: Some(metadata.name),
                state: Some(state(container.state)),
                attempt: Some(metadata.attempt),
                guarded: None,
                shim_version: None,
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
    move |status| CriError::Call {
        method,
        source: Box::new(status),
    }
}
