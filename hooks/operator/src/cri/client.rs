//! A connection to the socket of a CRI, and its calls.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::info::ContainerInfo;
use super::lists;
use super::messages::{
    CONFIG, Container, ContainerFilter, ContainerList, INFO, ImageAnswer, ImageName,
    ListContainers, ListSandboxes, MountsAnswer, NoAnswer, POD_UID, PodSandbox, READY, RunSandbox,
    SandboxFilter, SandboxId, SandboxList, StateValue, StatusOfId, StatusOfImage, StatusOfRuntime,
    VerboseAnswer,
};
use crate::pods::{ContainerState, Pods};
use crate::unix_http::refuse_server_of_user;

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
        let mut pods = lists::pods(sandboxes, containers);
        // CRI-O reports no such config.
        if let Ok(config) = self.active_config().await {
            pods.runtime_directories = lists::directories(&config);
        }
        Ok(pods)
    }

    /// All sandboxes, in any state.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        self.list_sandboxes(SandboxFilter::default()).await
    }

    /// The ready sandboxes with the labels of `label_selector`.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn ready_sandboxes(
        &self,
        label_selector: HashMap<String, String>,
    ) -> Result<Vec<PodSandbox>, CriError> {
        let state = Some(StateValue { state: READY });
        self.list_sandboxes(SandboxFilter {
            state,
            label_selector,
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
        let state = ContainerState::Running.into();
        self.list_containers(ContainerFilter {
            state: Some(StateValue { state }),
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

    /// The runtime's facts about a sandbox, as JSON.
    ///
    /// # Errors
    /// If the CRI does not know the sandbox.
    pub async fn sandbox_info(&self, id: &str) -> Result<String, CriError> {
        let request = StatusOfId {
            id: id.to_owned(),
            verbose: true,
        };
        let method = "PodSandboxStatus";
        part_of(method, self.call(method, request).await?, INFO)
    }

    /// The configuration that the runtime read at its start, as JSON.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn active_config(&self) -> Result<String, CriError> {
        let (method, request) = ("Status", StatusOfRuntime { verbose: true });
        part_of(method, self.call(method, request).await?, CONFIG)
    }

    /// The sandboxes with a label, in any state.
    pub(super) async fn labelled_sandboxes(
        &self,
        (name, value): (&str, &str),
    ) -> Result<Vec<PodSandbox>, CriError> {
        let label_selector = HashMap::from([(name.to_owned(), value.to_owned())]);
        self.list_sandboxes(SandboxFilter {
            state: None,
            label_selector,
        })
        .await
    }

    pub(super) async fn run_sandbox(&self, request: RunSandbox) -> Result<(), CriError> {
        let answer: SandboxId = self.call("RunPodSandbox", request).await?;
        drop(answer);
        Ok(())
    }

    /// Ends a sandbox, and removes it.
    pub(super) async fn remove_sandbox(&self, id: &str) -> Result<(), CriError> {
        let request = SandboxId {
            pod_sandbox_id: id.to_owned(),
        };
        let NoAnswer {} = self.call("StopPodSandbox", request.clone()).await?;
        let NoAnswer {} = self.call("RemovePodSandbox", request).await?;
        Ok(())
    }

    /// True if an image is on the node.
    pub(super) async fn has_image(&self, name: &str) -> Result<bool, CriError> {
        let request = StatusOfImage {
            image: ImageName {
                image: name.to_owned(),
            },
        };
        let answer: ImageAnswer = self.call_of("ImageService", "ImageStatus", request).await?;
        Ok(answer.image.is_some())
    }

    async fn list_sandboxes(&self, filter: SandboxFilter) -> Result<Vec<PodSandbox>, CriError> {
        let request = ListSandboxes { filter };
        let answer: SandboxList = self.call("ListPodSandbox", request).await?;
        Ok(answer.items)
    }

    async fn list_containers(&self, filter: ContainerFilter) -> Result<Vec<Container>, CriError> {
        let request = ListContainers { filter };
        let answer: ContainerList = self.call("ListContainers", request).await?;
        Ok(answer.containers)
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

    async fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, CriError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.call_of("RuntimeService", method, request).await
    }

    async fn call_of<Q, A>(
        &self,
        service: &'static str,
        method: &'static str,
        request: Q,
    ) -> Result<A, CriError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
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
        let answer = client
            .unary(Request::new(request), path, ProstCodec::default())
            .await;
        Ok(answer.map_err(failed)?.into_inner())
    }
}

fn part_of(
    method: &'static str,
    answer: VerboseAnswer,
    missing: &'static str,
) -> Result<String, CriError> {
    let part = answer.info.get(missing).map(str::to_owned);
    part.ok_or(CriError::Incomplete { method, missing })
}
