//! The client of the CRI: sandboxes, containers, and the runtime's own facts about them.

mod messages;
pub mod of_node;
pub mod trial;

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::identity::PodName;
use bindguard_core::refresh_request::RefreshRequest;
use hyper_util::rt::TokioIo;
use prost::Message;
use prost::bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::cri::messages::{
    CONFIG, ContainerFilter, ContainerList, INFO, ListContainers, ListSandboxes, MountsAnswer,
    PodSandboxMetadata, READY, SandboxFilter, SandboxList, StateValue, StatusOfId, StatusOfRuntime,
    VerboseAnswer,
};
use crate::pods::{ContainerState, PodContainer, Pods};
use crate::unix_http::refuse_server_of_user;

pub use crate::cri::messages::{Container, KnownEntries, POD_UID, PodSandbox};

// A connection to the socket of a CRI, and its calls.

/// The size of the largest answer: the kubelet's own limit (`pkg/kubelet/cri/remote/utils.go`).
const MAX_ANSWER: usize = 16 << 20;

/// The reason why a CRI gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The socket has no server.
    #[error("connect")]
    Connect(#[source] io::Error),
    /// The CRI refused a call, or the connection broke.
    #[error("call {method} of the CRI")]
    Call {
        method: &'static str,
        /// The status of the call.
        #[source]
        source: Box<Status>,
    },
    /// The answer does not contain what the runtime usually reports.
    #[error("the answer to {method} has no {missing}")]
    Incomplete {
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

/// A client. Its clones share a connection, which is made again after a restart of the runtime.
#[derive(Debug, Clone)]
pub struct Cri {
    client: Grpc<Channel>,
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
            client: Grpc::new(channel).max_decoding_message_size(MAX_ANSWER),
        }
    }

    /// A client of this socket, if a server listens on it.
    ///
    /// # Errors
    /// If the socket is missing, refuses connections, or is another user's.
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
        let mut pods = pods(sandboxes, containers);
        // CRI-O reports no such config.
        if let Ok(config) = self.active_config().await {
            pods.runtime_directories = directories(&config);
        }
        Ok(pods)
    }

    /// All sandboxes, in any state.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        self.list_sandboxes(None, HashMap::new()).await
    }

    /// The ready sandboxes with these labels.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn ready_sandboxes(
        &self,
        labels: HashMap<String, String>,
    ) -> Result<Vec<PodSandbox>, CriError> {
        self.list_sandboxes(Some(StateValue { state: READY }), labels)
            .await
    }

    async fn list_sandboxes(
        &self,
        state: Option<StateValue>,
        label_selector: HashMap<String, String>,
    ) -> Result<Vec<PodSandbox>, CriError> {
        let filter = SandboxFilter {
            state,
            label_selector,
        };
        let answer: SandboxList = self
            .call("ListPodSandbox", ListSandboxes { filter })
            .await?;
        Ok(answer.items)
    }

    /// The running containers of a sandbox, or of all sandboxes.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn running_containers(
        &self,
        sandbox: Option<&str>,
    ) -> Result<Vec<Container>, CriError> {
        let state = ContainerState::Running.into();
        self.list_containers(ContainerFilter {
            state: Some(StateValue { state }),
            pod_sandbox_id: sandbox.unwrap_or_default().to_owned(),
            ..ContainerFilter::default()
        })
        .await
    }

    async fn list_containers(&self, filter: ContainerFilter) -> Result<Vec<Container>, CriError> {
        let request = ListContainers { filter };
        let answer: ContainerList = self.call("ListContainers", request).await?;
        Ok(answer.containers)
    }

    /// The runtime's facts about a container; `None` if the runtime does not know the container.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn container_info(&self, id: &str) -> Result<Option<ContainerInfo>, CriError> {
        let answer: Option<VerboseAnswer> = self.status_of_container(id, true).await?;
        Ok(answer.and_then(|answer| ContainerInfo::from_json(answer.info.bytes(INFO)?)))
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
        let mut writable = BTreeSet::new();
        for container in containers {
            let answer: Option<MountsAnswer> =
                self.status_of_container(&container.id, false).await?;
            for mount in answer.unwrap_or_default().status.mounts {
                let source = Path::new(OsStr::from_bytes(&mount.host_path));
                // A pod can mount the same volume at thousands of places.
                if !mount.readonly && !writable.contains(source) {
                    writable.insert(source.to_owned());
                }
            }
        }
        Ok(Vec::from_iter(writable))
    }

    /// `None` if the runtime does not know the container.
    async fn status_of_container<A: Message + Default + 'static>(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<Option<A>, CriError> {
        let id = id.to_owned();
        let answer = self.call("ContainerStatus", StatusOfId { id, verbose });
        match answer.await {
            Err(CriError::Call { source, .. }) if source.code() == Code::NotFound => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// The runtime's facts about a sandbox, as JSON.
    ///
    /// # Errors
    /// If the CRI does not know the sandbox.
    pub async fn sandbox_info(&self, id: &str) -> Result<String, CriError> {
        let (id, verbose) = (id.to_owned(), true);
        self.verbose_part("PodSandboxStatus", StatusOfId { id, verbose }, INFO)
            .await
    }

    /// The configuration that the runtime read at its start, as JSON.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn active_config(&self) -> Result<String, CriError> {
        self.verbose_part("Status", StatusOfRuntime { verbose: true }, CONFIG)
            .await
    }

    async fn verbose_part(
        &self,
        method: &'static str,
        request: impl Message + 'static,
        missing: &'static str,
    ) -> Result<String, CriError> {
        let answer: VerboseAnswer = self.call(method, request).await?;
        let part = answer.info.get(missing).map(str::to_owned);
        part.ok_or(CriError::Incomplete { method, missing })
    }

    async fn call<A: Message + Default + 'static>(
        &self,
        method: &'static str,
        request: impl Message + 'static,
    ) -> Result<A, CriError> {
        self.call_of("RuntimeService", method, request).await
    }

    async fn call_of<A: Message + Default + 'static>(
        &self,
        service: &'static str,
        method: &'static str,
        request: impl Message + 'static,
    ) -> Result<A, CriError> {
        let failed = |status: Status| CriError::Call {
            method,
            source: Box::new(status),
        };
        let mut client = self.client.clone();
        let ready = client.ready().await;
        ready.map_err(|error| failed(Status::unknown(format!("not ready: {error}"))))?;
        let path = format!("/runtime.v1.{service}/{method}");
        let path = PathAndQuery::try_from(path)
            .map_err(|error| failed(Status::internal(error.to_string())))?;
        let answer = client.unary(Request::new(request), path, ProstCodec::default());
        Ok(answer.await.map_err(failed)?.into_inner())
    }
}

/// Builds pods from the CRI's sandboxes and containers.
fn pods(sandboxes: Vec<PodSandbox>, containers: Vec<Container>) -> Pods {
    let mut pods = Pods::default();
    let mut names = HashMap::new();
    for sandbox in sandboxes {
        let PodSandboxMetadata {
            name,
            namespace,
            uid,
        } = sandbox.metadata;
        let mut state = ContainerState::Exited;
        if sandbox.state == READY {
            state = ContainerState::Running;
            let request = RefreshRequest::from_annotations(|name| sandbox.annotations.get(name));
            pods.refresh_requests.insert(uid.clone(), request);
        }
        let pod = PodName {
            uid: Some(uid),
            namespace: Some(namespace),
            name: Some(name),
        };
        names.insert(sandbox.id.clone(), pod.clone());
        pods.containers.push(PodContainer {
            id: sandbox.id,
            pod,
            state: Some(state),
            ..PodContainer::default()
        });
    }
    for listed in containers {
        let pod = names.get(&listed.pod_sandbox_id).cloned();
        let state = ContainerState::try_from(listed.state).unwrap_or(ContainerState::Unknown);
        pods.containers.push(PodContainer {
            id: listed.id,
            name: Some(listed.metadata.name),
            state: Some(state),
            attempt: Some(listed.metadata.attempt),
            pod: pod.unwrap_or_default(),
            ..PodContainer::default()
        });
    }
    pods
}

/// The root and the state folder of containerd, in the config that its CRI plugin reports. The
/// plugin's own `stateDir` is a folder of the state folder.
fn directories(config: &str) -> Vec<PathBuf> {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let path = |key: &str| config[key].as_str().map(Path::new);
    let state = path("stateDir").and_then(Path::parent);
    let found = path("containerdRootDir").into_iter().chain(state);
    found.map(Path::to_owned).collect()
}

// The verbose answer about a container, as far as containerd and CRI-O both write it.

/// The runtime's own facts about a container.
#[derive(Debug, Default)]
pub struct ContainerInfo {
    pid: u32,
    /// A part of the answer: the spec of a container with many mounts has megabytes.
    spec: Option<Bytes>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info<'a> {
    #[serde(default)]
    pid: u32,
    #[serde(borrow)]
    runtime_spec: Option<&'a RawValue>,
}

impl ContainerInfo {
    fn from_json(json: &Bytes) -> Option<Self> {
        let info: Info<'_> = serde_json::from_slice(json).ok()?;
        let spec = info.runtime_spec;
        Some(Self {
            pid: info.pid,
            spec: spec.map(|spec| json.slice_ref(spec.get().as_bytes())),
        })
    }

    /// The pid of the container's init; `None` if the container does not run, or has no such
    /// process on the node, as with a virtual machine.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid).filter(|pid| *pid > 0)
    }

    /// The spec that the runtime recorded.
    pub fn spec(&self) -> Option<&[u8]> {
        self.spec.as_deref()
    }
}

#[cfg(test)]
mod info_tests {
    use super::*;

    fn info(text: &'static str) -> Option<ContainerInfo> {
        ContainerInfo::from_json(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn a_container_that_ended_has_no_pid() {
        let running = info(r#"{"pid": 7, "runtimeSpec": {"hostname": "a"}}"#).unwrap();
        assert_eq!(running.pid(), Some(7));
        assert_eq!(running.spec(), Some(&br#"{"hostname": "a"}"#[..]));
        assert_eq!(info(r#"{"pid": 0}"#).unwrap().pid(), None);
        assert_eq!(info(r#"{"sandboxID": "x"}"#).unwrap().pid(), None);
        assert!(info("{").is_none());
    }
}
