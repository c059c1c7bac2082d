//! Queries to the CRI, in gRPC by hand: a unary call is one HTTP/2 request with a five-byte frame
//! in its body.
//!
//! A generated client would need a whole stack for three calls (docs/decisions/0029). `h2`
//! implements the protocol, and the messages are ours: [`messages`](super::messages).

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail, ensure};
use bindguard_core::refresh_request::RefreshRequest;
use bindguard_operator::pods::{ContainerState, PodContainer, PodName, Pods};
use bytes::{Buf, Bytes};
use h2::client::{SendRequest, handshake};
use http::{HeaderMap, Request};
use prost::Message;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::messages::{
    Container, ContainerStatusRequest, ContainerStatusResponse, ListContainersResponse,
    ListPodSandboxResponse, ListRequest, PodSandbox,
};

/// The sockets of CRIs: containerd, k3s, k0s, MicroK8s, CRI-O.
const SOCKETS: [&str; 5] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
];
/// The time limit: names are not worth more of an operator's time.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// `SANDBOX_READY` of the CRI's api.proto.
const READY: i32 = 0;
/// gRPC's code of a service that the server does not have.
const UNIMPLEMENTED: &str = "12";
/// gRPC's frame: one byte of flags, four of length.
const FRAME: usize = 5;

/// A call that the server answered with an error.
#[derive(Debug, thiserror::Error)]
#[error("gRPC status {code}: {message}")]
pub struct GrpcStatus {
    /// The number of the status, as the header has it.
    pub code: String,
    /// The server's message.
    pub message: String,
}

/// Every sandbox and container that the CRI knows; none where there is no CRI.
pub fn pods(socket: Option<&Path>) -> Result<Pods> {
    let pods = first_cri(socket, |socket| {
        within_time_limit(socket, async |client| {
            let pods: ListPodSandboxResponse =
                call(&client, "ListPodSandbox", ListRequest {}).await?;
            let containers: ListContainersResponse =
                call(&client, "ListContainers", ListRequest {}).await?;
            let refresh_requests = pods
                .items
                .iter()
                .filter(|pod| pod.state == READY)
                .filter_map(refresh_request)
                .collect();
            Ok(Pods {
                containers: named(&pods.items, containers.containers),
                refresh_requests,
            })
        })
    })?;
    Ok(pods.unwrap_or_default())
}

/// The runtime's own facts about a container, as containerd and CRI-O both report them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    #[serde(default)]
    pid: u32,
    runtime_spec: Option<Box<RawValue>>,
}

impl Info {
    /// The pid of its init; `None` if it does not run.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid).filter(|pid| *pid > 0)
    }

    /// Its spec.
    pub fn spec(&self) -> Option<&[u8]> {
        let spec = self.runtime_spec.as_deref()?;
        Some(spec.get().as_bytes())
    }
}

/// The facts about a container; none where there is no CRI.
pub fn info_of(socket: Option<&Path>, container: &str) -> Result<Info> {
    let request = || ContainerStatusRequest {
        container_id: container.to_owned(),
        verbose: true,
    };
    let answer: Option<ContainerStatusResponse> =
        first_cri(socket, |socket| query(socket, "ContainerStatus", request()))?;
    let info = answer
        .unwrap_or_default()
        .info
        .get("info")
        .map(|text| serde_json::from_str(text))
        .transpose()?;
    Ok(info.unwrap_or_default())
}

/// The uids of all pods with a sandbox: of the named socket's, or of every CRI of this node.
///
/// # Errors
/// If there is no CRI, or if one does not answer: a pod of that CRI would look absent.
pub fn uids(named: Option<&Path>) -> Result<BTreeSet<String>> {
    let (mut uids, mut answered) = (BTreeSet::new(), false);
    for socket in sockets(named) {
        match query::<ListPodSandboxResponse>(socket, "ListPodSandbox", ListRequest {}) {
            Ok(pods) => {
                answered = true;
                uids.extend(
                    pods.items
                        .into_iter()
                        .filter_map(|pod| Some(pod.metadata?.uid)),
                );
            }
            // Docker's containerd has no CRI.
            Err(error) if named.is_none() && is_unimplemented(&error) => {}
            Err(error) => return Err(error),
        }
    }
    ensure!(answered, "this node has no CRI; give --cri SOCKET");
    Ok(uids)
}

/// The named socket, or all usual ones that exist.
fn sockets(named: Option<&Path>) -> Vec<&Path> {
    match named {
        Some(socket) => vec![socket],
        None => SOCKETS
            .iter()
            .map(Path::new)
            .filter(|socket| socket.symlink_metadata().is_ok())
            .collect(),
    }
}

/// The answer of the named socket, or of the first usual socket whose server has a CRI; `None`
/// without a socket. Docker's containerd has no CRI, and can run beside CRI-O.
fn first_cri<A>(named: Option<&Path>, query: impl Fn(&Path) -> Result<A>) -> Result<Option<A>> {
    let mut without_cri = None;
    for socket in sockets(named) {
        match query(socket) {
            Err(error) if is_unimplemented(&error) => without_cri = without_cri.or(Some(error)),
            answer => return answer.map(Some),
        }
    }
    without_cri.map_or(Ok(None), Err)
}

/// True if the server of a socket has no CRI.
pub fn is_unimplemented(error: &Error) -> bool {
    error
        .downcast_ref::<GrpcStatus>()
        .is_some_and(|status| status.code == UNIMPLEMENTED)
}

/// The answer to one call of the CRI's runtime service.
pub fn query<A: Message + Default>(
    socket: &Path,
    method: &str,
    request: impl Message,
) -> Result<A> {
    within_time_limit(socket, async |client| call(&client, method, request).await)
}

fn within_time_limit<A>(
    socket: &Path,
    calls: impl AsyncFnOnce(SendRequest<Bytes>) -> Result<A>,
) -> Result<A> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("make a tokio runtime")?;
    let calls = async {
        let stream = UnixStream::connect(socket).await.context("connect")?;
        let (client, connection) = handshake(stream).await.context("begin HTTP/2")?;
        // The connection needs a task that drives it; it ends with the runtime.
        tokio::spawn(connection);
        calls(client).await
    };
    // the timer needs the runtime when it is made
    let answer = runtime.block_on(async { timeout(CALL_TIMEOUT, calls).await });
    let answer = answer
        .map_err(|_| anyhow::anyhow!("it does not answer within {} s", CALL_TIMEOUT.as_secs()));
    answer
        .and_then(|answer| answer)
        .with_context(|| format!("query {}", socket.display()))
}

async fn call<A: Message + Default>(
    client: &SendRequest<Bytes>,
    method: &str,
    request: impl Message,
) -> Result<A> {
    let failed = || format!("call {method}");
    let uri = format!("http://localhost/runtime.v1.RuntimeService/{method}");
    let head = Request::post(uri)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let mut client = client.clone().ready().await.with_context(failed)?;
    let (response, mut body) = client.send_request(head, false).with_context(failed)?;
    body.send_data(frame(&request), true).with_context(failed)?;
    let (head, mut stream) = response.await.with_context(failed)?.into_parts();
    status(&head.headers).with_context(failed)?;
    let mut answer = Vec::new();
    while let Some(data) = stream.data().await {
        let data = data.with_context(failed)?;
        // Without it the server stops after 64 KiB.
        stream
            .flow_control()
            .release_capacity(data.len())
            .with_context(failed)?;
        answer.extend_from_slice(&data);
    }
    status(
        &stream
            .trailers()
            .await
            .with_context(failed)?
            .unwrap_or_default(),
    )
    .with_context(failed)?;
    unframed(&answer).with_context(failed)
}

fn frame(message: &impl Message) -> Bytes {
    let body = message.encode_to_vec();
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), &body].concat().into()
}

fn unframed<A: Message + Default>(mut answer: &[u8]) -> Result<A> {
    ensure!(answer.len() >= FRAME, "it ended without an answer");
    ensure!(
        answer.get_u8() == 0,
        "it is compressed, which was not requested"
    );
    let length = answer.get_u32() as usize;
    let message = answer.get(..length).context("it was cut off")?;
    A::decode(message).context("parse it")
}

/// gRPC's own status, in the headers of an answer without a body or in the trailers of any other.
fn status(headers: &HeaderMap) -> Result<()> {
    let text = |key: &str| {
        headers
            .get(key)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    match text("grpc-status").as_str() {
        "" | "0" => Ok(()),
        code => bail!(GrpcStatus {
            code: code.to_owned(),
            message: text("grpc-message")
        }),
    }
}

/// The uid of a pod, and what its annotations request.
fn refresh_request(pod: &PodSandbox) -> Option<(String, RefreshRequest)> {
    let request =
        RefreshRequest::from_annotations(|name| pod.annotations.get(name).map(String::as_str));
    Some((pod.metadata.clone()?.uid, request))
}

fn named(pods: &[PodSandbox], containers: Vec<Container>) -> Vec<PodContainer> {
    let name = |id: &str| {
        pods.iter()
            .find(|pod| pod.id == id)
            .map(pod_name)
            .unwrap_or_default()
    };
    let sandboxes = pods.iter().map(|pod| PodContainer {
        id: pod.id.clone(),
        name: None,
        state: Some(if pod.state == READY {
            ContainerState::Running
        } else {
            ContainerState::Exited
        }),
        attempt: None,
        pod: pod_name(pod),
        guarded: None,
        shim_version: None,
    });
    let containers = containers.into_iter().map(|container| {
        let metadata = container.metadata.unwrap_or_default();
        PodContainer {
            pod: name(&container.pod_sandbox_id),
            guarded: None,
            shim_version: None,
            state: Some(state(container.state)),
            attempt: Some(metadata.attempt),
            name: Some(metadata.name),
            id: container.id,
        }
    });
    sandboxes.chain(containers).collect()
}

/// `ContainerState` of the CRI's api.proto.
fn state(number: i32) -> ContainerState {
    match number {
        0 => ContainerState::Created,
        1 => ContainerState::Running,
        2 => ContainerState::Exited,
        _ => ContainerState::Unknown,
    }
}

fn pod_name(pod: &PodSandbox) -> PodName {
    let metadata = pod.metadata.clone().unwrap_or_default();
    PodName {
        uid: Some(metadata.uid),
        namespace: Some(metadata.namespace),
        name: Some(metadata.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_and_half_a_frame_does_not() {
        let pod = PodSandbox {
            id: "s-1".to_owned(),
            ..PodSandbox::default()
        };
        let bytes = frame(&ListPodSandboxResponse { items: vec![pod] });
        assert_eq!(
            unframed::<ListPodSandboxResponse>(&bytes).unwrap().items[0].id,
            "s-1"
        );
        assert!(unframed::<ListPodSandboxResponse>(&bytes[..bytes.len() - 1]).is_err());
        assert!(unframed::<ListPodSandboxResponse>(&bytes[..3]).is_err());
    }

    #[test]
    fn a_missing_socket_is_an_error_only_when_it_was_named() {
        let error = pods(Some(Path::new("/nowhere.sock"))).unwrap_err();
        assert!(
            format!("{error:#}").starts_with("query /nowhere.sock: connect: "),
            "{error:#}"
        );
    }
}
