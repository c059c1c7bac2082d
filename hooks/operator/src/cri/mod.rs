//! The client of the CRI: sandboxes, containers, and the runtime's own facts about them.

mod messages;

use std::collections::{BTreeSet, HashMap};
use std::error::Error;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_core::refresh_request::RefreshRequest;
use hyper_util::rt::TokioIo;
use prost::Message;
use prost::bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::cri::messages::{
    CONFIG, ContainerFilter, INFO, ImageAnswer, LinuxSandbox, ListOf, MountList, OF_NODE,
    PodSandboxMetadata, RunSandbox, SandboxConfig, StatusOfId, VerboseAnswer, With,
};
use crate::pods::{ContainerState, PodContainer, Pods};
use crate::unix_http::refuse_server_of_user;

pub use crate::cri::messages::{
    Container, KnownEntries, POD_UID, PodSandbox, READY, SandboxFilter,
};

/// The size of the largest answer: the kubelet's own limit (`pkg/kubelet/cri/remote/utils.go`).
const MAX_ANSWER: usize = 16 << 20;

/// The reason why a CRI gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The socket has no server.
    #[error("connect")]
    Connect(#[source] io::Error),
    /// The CRI refused a call, or the connection broke.
    #[error("call {method} of the CRI: {why}")]
    Call {
        method: &'static str,
        code: Code,
        why: String,
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
    /// True for the answers of a CRI plugin that is not initialized yet.
    pub fn is_starting(&self) -> bool {
        matches!(self.code(), Some(Code::Unknown | Code::Unavailable))
    }

    fn code(&self) -> Option<Code> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::Connect(_) | Self::Incomplete { .. } | Self::Silent => None,
        }
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
    async fn connect(socket: &Path, timeout: Duration) -> Result<Self, CriError> {
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
        let (mut pods, mut names) = (Pods::default(), HashMap::new());
        for sandbox in self.sandboxes(SandboxFilter::default()).await? {
            let uid = sandbox.metadata.uid;
            let mut state = ContainerState::Exited;
            if sandbox.state == READY {
                state = ContainerState::Running;
                let request =
                    RefreshRequest::from_annotations(|name| sandbox.annotations.get(name));
                pods.refresh_requests.insert(uid.clone(), request);
            }
            let pod = PodName {
                uid: Some(uid),
                namespace: Some(sandbox.metadata.namespace),
                name: Some(sandbox.metadata.name),
            };
            names.insert(sandbox.id.clone(), pod.clone());
            pods.containers.push(PodContainer {
                id: sandbox.id,
                pod,
                state: Some(state),
                ..PodContainer::default()
            });
        }
        for listed in self.list_containers(ContainerFilter::default()).await? {
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
        // CRI-O reports no such config.
        if let Ok(config) = self.active_config().await {
            let config: Value = serde_json::from_str(&config).unwrap_or_default();
            let path = |key: &str| config[key].as_str().map(Path::new);
            // the plugin's own `stateDir` is a folder of containerd's
            let state = path("stateDir").and_then(Path::parent);
            for folder in [path("containerdRootDir"), state].into_iter().flatten() {
                pods.runtime_directories.push(folder.to_owned());
            }
        }
        Ok(pods)
    }

    /// The sandboxes of this kind; by default all sandboxes, in any state.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn sandboxes(&self, first: SandboxFilter) -> Result<Vec<PodSandbox>, CriError> {
        let answer: ListOf<_> = self.call("ListPodSandbox", With { first }).await?;
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
        self.list_containers(ContainerFilter {
            state: Some(ContainerState::Running.into()),
            pod_sandbox_id: sandbox.unwrap_or_default().to_owned(),
            ..ContainerFilter::default()
        })
        .await
    }

    async fn list_containers(&self, first: ContainerFilter) -> Result<Vec<Container>, CriError> {
        let answer: ListOf<_> = self.call("ListContainers", With { first }).await?;
        Ok(answer.items)
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
            let answer: Option<With<MountList>> =
                self.status_of_container(&container.id, false).await?;
            for mount in answer.unwrap_or_default().first.mounts {
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
            Err(error) if error.code() == Some(Code::NotFound) => Ok(None),
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
        let is_verbose = true;
        self.verbose_part("Status", is_verbose, CONFIG).await
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
        let failed = |status: Status| CriError::Call {
            method,
            code: status.code(),
            why: why(&status),
        };
        let mut client = self.client.clone();
        let ready = client.ready().await;
        ready.map_err(|error| failed(Status::unknown(error_chain(&error))))?;
        let service = match method {
            "ImageStatus" => "ImageService",
            _ => "RuntimeService",
        };
        let path = PathAndQuery::try_from(format!("/runtime.v1.{service}/{method}"))
            .map_err(|error| failed(Status::internal(error.to_string())))?;
        let answer = client.unary(Request::new(request), path, ProstCodec::default());
        Ok(answer.await.map_err(failed)?.into_inner())
    }
}

/// The reason of a status. `Status` itself prints its source in Rust's debug form.
fn why(status: &Status) -> String {
    match status.source() {
        Some(source) => error_chain(source),
        None if status.message().is_empty() => status.code().to_string(),
        None => status.message().to_owned(),
    }
}

// The verbose answer about a container, as far as containerd and CRI-O both write it.

/// The runtime's own facts about a container.
#[derive(Debug, Default)]
pub struct ContainerInfo {
    /// The pid of the container's init; `None` if the container does not run, or has no such
    /// process on the node, as with a virtual machine.
    pub pid: Option<u32>,
    /// The spec that the runtime recorded. A part of the answer: the spec of a container with many
    /// mounts has megabytes.
    pub spec: Option<Bytes>,
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
            pid: Some(info.pid).filter(|pid| *pid > 0),
            spec: spec.map(|spec| json.slice_ref(spec.get().as_bytes())),
        })
    }
}

// Questions to the CRIs of this node, each within the time of an operator at a terminal.

/// The sockets of CRIs: containerd, k3s, k0s, MicroK8s, CRI-O, cri-dockerd.
const SOCKETS: [&str; 6] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
];
/// The time limit: names are not worth more of an operator's time.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Every sandbox and container that the CRI knows; `None` without a CRI.
pub fn pods(socket: Option<&Path>) -> Result<Option<Pods>> {
    first_cri(socket, async |cri| cri.pods().await)
}

/// The runtime's own facts about a container; none where there is no CRI.
pub fn info_of(socket: Option<&Path>, container: &str) -> Result<ContainerInfo> {
    let info = first_cri(socket, async |cri| cri.container_info(container).await)?;
    Ok(info.flatten().unwrap_or_default())
}

/// The sources of all writable mounts of a pod's containers in any state.
///
/// # Errors
/// If there is no CRI, or if the CRI does not answer.
pub fn writable_mounts(socket: Option<&Path>, uid: &str) -> Result<Vec<PathBuf>> {
    first_cri(socket, async |cri| cri.writable_mounts(uid).await)?
        .context("this node has no CRI; give --cri SOCKET")
}

/// The answer of the named socket, or of the first usual socket whose server has a CRI; `None`
/// without a socket. Docker's containerd has no CRI, and can run beside CRI-O.
fn first_cri<A>(
    named: Option<&Path>,
    calls: impl AsyncFn(Cri) -> Result<A, CriError>,
) -> Result<Option<A>> {
    let mut sockets = Vec::from_iter(named);
    if named.is_none() {
        sockets.extend(SOCKETS.map(Path::new));
        sockets.retain(|socket| socket.symlink_metadata().is_ok());
    }
    let mut without_cri = None;
    for socket in sockets {
        match query(socket, &calls) {
            Err(error) if is_unimplemented(&error) => without_cri = without_cri.or(Some(error)),
            answer => return answer.map(Some),
        }
    }
    without_cri.map_or(Ok(None), Err)
}

/// True if the server of a socket has no CRI, as Docker's containerd.
pub fn is_unimplemented(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<CriError>();
    error.and_then(CriError::code) == Some(Code::Unimplemented)
}

/// The answer to the calls that `calls` makes.
///
/// # Errors
/// If the socket has no server, or if the calls take too long or fail.
pub fn query<A>(socket: &Path, calls: impl AsyncFnOnce(Cri) -> Result<A, CriError>) -> Result<A> {
    block_on(async {
        let calls = async { calls(Cri::connect(socket, CALL_TIMEOUT).await?).await };
        let answer = match timeout(CALL_TIMEOUT, calls).await {
            Ok(answer) => answer.map_err(anyhow::Error::from),
            Err(_) => Err(anyhow!(
                "it does not answer within {} s",
                CALL_TIMEOUT.as_secs()
            )),
        };
        answer.with_context(|| format!("query {}", socket.display()))
    })
}

fn block_on<A>(calls: impl Future<Output = Result<A>>) -> Result<A> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("make a tokio runtime")?;
    runtime.block_on(calls)
}

// A sandbox that shows whether a runtime's handler starts pods: run, then removed.
//
// The label marks the sandbox: it is found and removed also if the CRI's answer never came, or if
// an earlier process that ran such a sandbox was killed.

const LABEL: (&str, &str) = ("bindguard.io/trial", "true");
/// The namespace, the name and the uid of the sandbox's pod, which no API server has.
const NAMES: [&str; 3] = ["bindguard", "trial", "bindguard-trial"];
/// The time limit of each call: a sandbox on a busy node takes many seconds.
const TRIAL_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for the removal. The runtime may first have to end a call that was given up.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// A sandbox whose call failed can appear in the list after its error.
const APPEARANCE_TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);

/// Longer than [`try_sandbox`] takes if each call reaches its limit.
pub const TRIAL_LIMIT: Duration = Duration::from_secs(600);

/// Runs a sandbox in the host's network through a handler, and removes it. Returns why the sandbox
/// was not tried: without its image, the runtime would pull the image.
///
/// # Errors
/// If the sandbox does not start, or cannot be removed.
pub fn try_sandbox(
    socket: &Path,
    handler: &str,
    image: &str,
    cgroup_parent: &str,
) -> Result<Option<String>> {
    block_on(async {
        let cri = Cri::connect(socket, TRIAL_CALL_TIMEOUT).await?;
        remove(&cri, Duration::ZERO).await?;
        let name = With {
            first: image.to_owned(),
        };
        let answer: ImageAnswer = cri.call("ImageStatus", name).await?;
        if answer.image.is_none() {
            return Ok(Some(format!("the image {image} is not on this node")));
        }
        let request = request(handler, cgroup_parent);
        let ran = cri.call::<()>("RunPodSandbox", request).await;
        let appears = match ran {
            Ok(_) => Duration::ZERO,
            Err(_) => APPEARANCE_TIMEOUT,
        };
        let removed = remove(&cri, appears).await;
        ran.with_context(|| format!("run a sandbox through the handler {handler}"))?;
        removed.map(|()| None)
    })
}

fn request(handler: &str, cgroup_parent: &str) -> RunSandbox {
    let [namespace, name, uid] = NAMES.map(str::to_owned);
    let (label, value) = LABEL;
    RunSandbox {
        config: SandboxConfig {
            metadata: PodSandboxMetadata {
                name,
                uid,
                namespace,
            },
            labels: HashMap::from([(label.to_owned(), value.to_owned())]),
            linux: LinuxSandbox {
                cgroup_parent: cgroup_parent.to_owned(),
                security_context: With { first: OF_NODE },
            },
        },
        runtime_handler: handler.to_owned(),
    }
}

/// Removes such sandboxes, until none has been seen for this time.
async fn remove(cri: &Cri, appears: Duration) -> Result<()> {
    let start = Instant::now();
    let mut last_seen = start;
    loop {
        match remove_seen(cri, &mut last_seen).await {
            Ok(()) if last_seen.elapsed() >= appears => return Ok(()),
            Err(failure) if start.elapsed() > REMOVAL_TIMEOUT => {
                let [namespace, name, _] = NAMES;
                return Err(failure).with_context(|| {
                    format!("remove the sandbox of the pod {namespace}/{name}; run crictl rmp -f with its id")
                });
            }
            Ok(()) | Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Ends and removes the sandboxes of trials. Returns the last failure.
async fn remove_seen(cri: &Cri, last_seen: &mut Instant) -> Result<(), CriError> {
    let (label, value) = LABEL;
    let trials = SandboxFilter {
        label_selector: HashMap::from([(label.to_owned(), value.to_owned())]),
        ..SandboxFilter::default()
    };
    let mut removed = Ok(());
    for sandbox in cri.sandboxes(trials).await? {
        *last_seen = Instant::now();
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            if let Err(failure) = cri.call::<()>(method, sandbox.id.clone()).await {
                removed = Err(failure);
                break;
            }
        }
    }
    removed
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
        assert_eq!(running.pid, Some(7));
        assert_eq!(running.spec.as_deref(), Some(&br#"{"hostname": "a"}"#[..]));
        assert_eq!(info(r#"{"pid": 0}"#).unwrap().pid, None);
        assert_eq!(info(r#"{"sandboxID": "x"}"#).unwrap().pid, None);
        assert!(info("{").is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_socket_is_an_error_only_when_it_was_named() {
        let error = pods(Some(Path::new("/nowhere.sock"))).unwrap_err();
        assert!(
            format!("{error:#}").starts_with("query /nowhere.sock: connect: "),
            "{error:#}"
        );
    }

    /// A person reads the reason, and no `tonic::transport::Error(...)`.
    #[test]
    fn a_broken_connection_is_reported_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("cri.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let error = format!("{:#}", pods(Some(&socket)).unwrap_err());
        assert!(
            error.contains("call ListPodSandbox of the CRI: "),
            "{error}"
        );
        assert!(!error.contains("Error(") && !error.contains('"'), "{error}");
    }
}

#[cfg(test)]
mod trial_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use k8s_cri::v1;
    use prost::Message;

    use super::*;

    #[test]
    fn the_request_is_that_of_the_published_protocol() {
        let bytes = request("bindguard", "system.slice").encode_to_vec();
        let read = v1::RunPodSandboxRequest::decode(bytes.as_slice()).unwrap();
        assert_eq!(read.runtime_handler, "bindguard");
        let config = read.config.unwrap();
        assert_eq!(config.metadata.unwrap().uid, "bindguard-trial");
        assert_eq!(config.labels["bindguard.io/trial"], "true");
        let linux = config.linux.unwrap();
        assert_eq!(linux.cgroup_parent, "system.slice");
        let options = linux.security_context.unwrap().namespace_options.unwrap();
        assert_eq!(options.network(), v1::NamespaceMode::Node);
        assert_eq!(options.pid(), v1::NamespaceMode::Pod);
    }
}
