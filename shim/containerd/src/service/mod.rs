//! The task service: passes containerd's requests to the tasks.
//!
//! containerd 1.x calls the service `containerd.task.v2.Task`, 2.x `containerd.task.v3.Task`. The
//! messages are equal, so one implementation serves requests of 1.x and 2.x. Every method is
//! explicit: NOT_FOUND for a missing method would mean to containerd that the container is gone.
//!
//! Go's ttrpc answers UNIMPLEMENTED for an unknown service, and containerd tries something else at
//! this code alone. The Rust one answers INVALID_ARGUMENT and has no hook for that. So ttrpc knows a
//! single method without a name, and each request arrives as the payload of a call of this method.
//! All other bytes pass unchanged.
//!
//! A frame is a header of ten bytes and a payload: ttrpc's PROTOCOL.md.

mod containers;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Poll, ready};
use std::time::Instant;

use async_trait::async_trait;
use bindguard_core::error_chain;
use bindguard_core::handover::PANIC_IN;
use containerd_shim_protos::api::*;
use futures_util::stream;
use protobuf::{Message, MessageField};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, duplex, join};
use tokio::net;
use ttrpc::asynchronous::transport::{Listener, Socket};
use ttrpc::asynchronous::{Client, MethodHandler, Server, Service, TtrpcContext};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST};
use ttrpc::{Code, Error, MessageHeader, Request, Response, Status, get_status};

use crate::events::timestamp;
use crate::task::TaskError;
use crate::work::lock;

pub use containers::Containers;

const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";
/// The call of our own `start`.
const EXPECT: &str = "bindguard.shim.v1.Group/Expect";

/// A server of the task service on this socket. ttrpc knows a single method without a name: it gets
/// each request whole, see [`pass_on`].
pub fn server(listener: UnixListener, containers: &Arc<Containers>) -> io::Result<Server> {
    let task_service = Box::new(TaskService(Arc::clone(containers)));
    let service = Service {
        methods: HashMap::from([(String::new(), task_service as _)]),
        streams: HashMap::new(),
    };
    let server = Server::new().add_listener(accept_from(listener)?);
    Ok(server.register_service(HashMap::from([(String::new(), service)])))
}

struct TaskService(Arc<Containers>);

#[async_trait]
impl MethodHandler for TaskService {
    /// Every failure is in the response: Rust's ttrpc answers UNKNOWN to any error of a handler.
    async fn handler(&self, _: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        let answered = match self.call(&request.payload) {
            Ok(call) => call.await,
            Err(status) => Err(status),
        };
        Ok(match answered {
            Ok(payload) => Response {
                status: MessageField::some(get_status(Code::OK, "")),
                payload,
                ..Default::default()
            },
            Err(status) => Error::RpcStatus(status).into(),
        })
    }
}

/// The encoded answer to a request, or a gRPC code and a line of text.
///
/// containerd decides by the code: NOT_FOUND to a kill means that the process has ended. containerd
/// shows the text of all other errors to the user.
type Answer = Result<Vec<u8>, Status>;
type PendingAnswer = Pin<Box<dyn Future<Output = Answer> + Send>>;

impl TaskService {
    fn call(&self, request: &[u8]) -> Result<PendingAnswer, Status> {
        let request: Request = decode(request)?;
        let method = match &*request.service {
            V2 | V3 => request.method,
            service => format!("{service}/{}", request.method),
        };
        let payload = &request.payload;
        let containers = Arc::clone(&self.0);
        let begin = |method, id: &str, exec_id: &str| self.0.calls.begin(method, id, exec_id);
        Ok(match &*method {
            "Create" => {
                let request: CreateTaskRequest = decode(payload)?;
                let call = begin("create", &request.id, "");
                change(call, async move {
                    encode(&CreateTaskResponse {
                        pid: containers.create(request).await?,
                        ..Default::default()
                    })
                })
            }
            "Exec" => {
                let request: ExecProcessRequest = decode(payload)?;
                let call = begin("exec", &request.id, &request.exec_id);
                change(call, async move {
                    containers.find(&request.id)?.add_exec(request)?;
                    NOTHING
                })
            }
            "Kill" => {
                let request: KillRequest = decode(payload)?;
                let call = begin("kill", &request.id, &request.exec_id);
                change(call, async move {
                    let task = containers.find(&request.id)?;
                    task.kill(&request.exec_id, request.signal, request.all)
                        .await?;
                    NOTHING
                })
            }
            "Update" => {
                let UpdateTaskRequest { id, resources, .. } = decode(payload)?;
                change(begin("update", &id, ""), async move {
                    containers.find(&id)?.update(&resources.value).await?;
                    NOTHING
                })
            }
            "Checkpoint" => {
                let request: CheckpointTaskRequest = decode(payload)?;
                let call = begin("checkpoint", &request.id, "");
                change(call, async move {
                    containers.find(&request.id)?.checkpoint(request).await?;
                    NOTHING
                })
            }
            "CloseIO" => {
                let request: CloseIORequest = decode(payload)?;
                let call = begin("close io", &request.id, &request.exec_id);
                query(call, async move {
                    let task = containers.find(&request.id)?;
                    if request.stdin {
                        task.close_stdin(&request.exec_id)?;
                    }
                    NOTHING
                })
            }
            "ResizePty" => {
                let request: ResizePtyRequest = decode(payload)?;
                let call = begin("resize", &request.id, &request.exec_id);
                query(call, async move {
                    let task = containers.find(&request.id)?;
                    task.resize(&request.exec_id, request.width, request.height)?;
                    NOTHING
                })
            }
            "Start" | "Delete" | "Pause" | "Resume" | "State" | "Pids" | "Wait" | "Connect"
            | "Shutdown" | "Stats" | EXPECT => self.call_by_name(&method, decode(payload)?),
            other => return Err(get_status(Code::UNIMPLEMENTED, format!("{other} method"))),
        })
    }

    /// Calls a method whose request has only names: of the container and, in some, of the exec.
    fn call_by_name(&self, method: &str, names: StateRequest) -> PendingAnswer {
        let containers = Arc::clone(&self.0);
        let StateRequest { id, exec_id, .. } = names;
        let begin = |method| self.0.calls.begin(method, &id, &exec_id);
        match method {
            "Start" => change(begin("start"), async move {
                encode(&StartResponse {
                    pid: containers.find(&id)?.start(&exec_id).await?,
                    ..Default::default()
                })
            }),
            "Delete" => change(begin("delete"), async move {
                encode(&containers.delete(&id, &exec_id).await?)
            }),
            "Pause" => change(begin("pause"), async move {
                containers.find(&id)?.pause().await?;
                NOTHING
            }),
            "Resume" => change(begin("resume"), async move {
                containers.find(&id)?.resume().await?;
                NOTHING
            }),
            "State" => query(begin("state"), async move {
                encode(&containers.find(&id)?.state(&exec_id)?)
            }),
            "Pids" => query(begin("pids"), async move {
                encode(&PidsResponse {
                    processes: containers.find(&id)?.pids().await?,
                    ..Default::default()
                })
            }),
            "Wait" => query(begin("wait"), async move {
                let exit = containers.find(&id)?.wait(&exec_id).await?;
                encode(&WaitResponse {
                    exit_status: exit.status,
                    exited_at: timestamp(exit.at),
                    ..Default::default()
                })
            }),
            "Connect" => query(begin("connect"), async move {
                encode(&ConnectResponse {
                    shim_pid: std::process::id(),
                    // Answered for an unknown container as well: this is how a restarted containerd
                    // finds the shim.
                    task_pid: containers.find(&id).map_or(0, |task| task.pid()),
                    ..Default::default()
                })
            }),
            "Shutdown" => query(begin("shutdown"), async move {
                // Ignores `now`, like Go's shim: the end of a shim would end its containers.
                containers.shut_down();
                NOTHING
            }),
            "Stats" => query(begin("stats"), async move {
                encode(&StatsResponse {
                    stats: MessageField::some(containers.find(&id)?.stats()?),
                    ..Default::default()
                })
            }),
            _expect => query(begin("expect"), async move {
                containers.expect(&id)?;
                NOTHING
            }),
        }
    }
}

/// The encoding of a message without fields.
const NOTHING: Answer = Ok(Vec::new());

fn encode(message: &impl Message) -> Answer {
    let encoded = message.write_to_bytes();
    encoded.map_err(|error| broken_message("Encoding response", &error))
}

fn decode<M: Message>(payload: &[u8]) -> Result<M, Status> {
    M::parse_from_bytes(payload).map_err(|error| broken_message("Unpack request error", &error))
}

/// As Go's ttrpc answers.
fn broken_message(what: &str, error: &protobuf::Error) -> Status {
    get_status(Code::INTERNAL, format!("ttrpc err: {what} {error}"))
}

/// A method's future is boxed before it is wrapped: one wrapper is in the program, not one a method.
fn change(call: PendingCall, work: impl Future<Output = Answer> + Send + 'static) -> PendingAnswer {
    Box::pin(run_to_end(call, Box::pin(work)))
}

fn query(call: PendingCall, work: impl Future<Output = Answer> + Send + 'static) -> PendingAnswer {
    Box::pin(run_cancellable(call, Box::pin(work)))
}

/// Runs a method that changes something to its end, even if the client disconnects.
///
/// ttrpc drops a method's future when its client disconnects or its deadline passes. If a `create`
/// is dropped between the runtime's run and its record, the container is unknown to the shim. So
/// the method runs in a separate task. A method that panics would never answer: the panic is caught
/// and answered as INTERNAL, and the pod's other containers live on.
async fn run_to_end(call: PendingCall, work: PendingAnswer) -> Answer {
    let method = call.method;
    let work = tokio::spawn(async move {
        call.panic_on_request();
        work.await
    });
    match work.await {
        Ok(answer) => answer.inspect_err(|status| {
            // containerd's own log has it at the level that containerd chooses.
            tracing::debug!(method, code = ?status.code(), "{}", status.message);
        }),
        Err(_panicked) => Err(panicked(method)),
    }
}

/// Runs a method that only reads. The future may be dropped at any time.
async fn run_cancellable(call: PendingCall, mut work: PendingAnswer) -> Answer {
    let caught = std::future::poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| {
            call.panic_on_request();
            work.as_mut().poll(context)
        }));
        polled.unwrap_or_else(|_| Poll::Ready(Err(panicked(call.method))))
    });
    caught.await
}

/// A method that panicked; the log has the details.
fn panicked(method: &str) -> Status {
    let message = format!("the shim broke in {method}; its log says where");
    get_status(Code::INTERNAL, message)
}

/// The shim is about to end; containerd must start a new shim.
fn shutting_down() -> Status {
    get_status(Code::UNAVAILABLE, "the shim is shutting down")
}

impl From<TaskError> for Status {
    fn from(error: TaskError) -> Self {
        let code = match error {
            TaskError::NotFound(_) => Code::NOT_FOUND,
            TaskError::AlreadyExists(_) => Code::ALREADY_EXISTS,
            TaskError::Invalid(_) | TaskError::Options(_) => Code::INVALID_ARGUMENT,
            TaskError::Illegal(_) => Code::FAILED_PRECONDITION,
            // Go's shim has no code for these either; containerd adds ": unknown" to the text.
            TaskError::Step(_) | TaskError::Checkpoint { .. } | TaskError::Runtime { .. } => {
                Code::UNKNOWN
            }
        };
        get_status(code, error_chain(&error))
    }
}

/// The pending calls, for the dump of the shim's state, in the order of their arrival: what was
/// called, and when.
#[derive(Default)]
struct Calls(Mutex<BTreeMap<u64, (String, Instant)>>);

impl Calls {
    /// Begins a call; it is pending until the result is dropped.
    fn begin(self: &Arc<Self>, method: &'static str, id: &str, exec_id: &str) -> PendingCall {
        let mut name = format!("{method} {id}");
        if !exec_id.is_empty() {
            name.push_str(" exec ");
            name.push_str(exec_id);
        }
        let mut pending = lock(&self.0);
        let number = pending.last_key_value().map_or(0, |(last, _)| last + 1);
        pending.insert(number, (name, Instant::now()));
        PendingCall {
            is_to_panic: cfg!(feature = "fault-points")
                && id.strip_prefix(PANIC_IN) == Some(method),
            calls: Arc::clone(self),
            method,
            number,
        }
    }

    /// A line for each call, the oldest first.
    fn describe(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, since) in lock(&self.0).values() {
            let seconds = since.elapsed().as_secs_f64();
            lines.push(format!("pending call: {name}, for {seconds:.1} s"));
        }
        lines
    }
}

/// A call that is not answered yet.
struct PendingCall {
    calls: Arc<Calls>,
    method: &'static str,
    number: u64,
    /// In a build with fault points a method panics for the container that is named after it.
    is_to_panic: bool,
}

impl PendingCall {
    fn panic_on_request(&self) {
        assert!(!self.is_to_panic, "a fault point");
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        lock(&self.calls.0).remove(&self.number);
    }
}

/// The largest number of bytes that wait for ttrpc. An idle connection keeps a buffer of the size
/// of its largest request, up to this number.
const MAX_WAITING: usize = 1024;

/// The connections of clients, with each request as a call of the method without a name.
fn accept_from(listener: UnixListener) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    let listener = net::UnixListener::from_std(listener)?;
    Ok(Listener::new(stream::poll_fn(move |context| {
        let accepted = ready!(listener.poll_accept(context));
        Poll::Ready(Some(accepted.map(|(socket, _)| {
            let (read, write) = socket.into_split();
            let (requests, server) = duplex(MAX_WAITING);
            tokio::spawn(pass_on(read, requests));
            join(server, write)
        })))
    })))
}

/// Passes the frames of a connection to ttrpc until either end closes.
async fn pass_on(
    mut socket: impl AsyncRead + Unpin,
    mut server: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    loop {
        let mut bytes = [0; MESSAGE_HEADER_LENGTH];
        socket.read_exact(&mut bytes).await?;
        let mut header = MessageHeader::from(bytes);
        let length = header.length as usize;
        // ttrpc refuses a frame above its limit and reads the next frame.
        if header.type_ != MESSAGE_TYPE_REQUEST || length > MESSAGE_LENGTH_MAX {
            server.write_all(&bytes).await?;
            let mut rest = (&mut socket).take(length as u64);
            copy(&mut rest, &mut server).await?;
            continue;
        }
        let mut payload = vec![0; length];
        socket.read_exact(&mut payload).await?;
        // What cannot be parsed is ttrpc's to answer.
        if let Ok(Request { timeout_nano, .. }) = Request::parse_from_bytes(&payload) {
            let call = Request {
                payload,
                timeout_nano,
                ..Default::default()
            };
            payload = call.write_to_bytes()?;
            header.length = u32::try_from(payload.len()).map_err(io::Error::other)?;
        }
        let mut frame = Vec::from(header);
        frame.extend(payload);
        server.write_all(&frame).await?;
    }
}

/// The time limit: a server that hangs must not block the caller.
const LIMIT_NANOSECONDS: i64 = 2_000_000_000;

/// True if the connection's server lives. The kernel accepts for a killed server until its files
/// are closed, and then hangs up. A living server answers, with or without the container. A server
/// that hangs counts as alive.
pub async fn is_alive(server: UnixStream, id: &str) -> bool {
    let answer = call_server(server, V3, "Connect", id).await;
    !answer.is_err_and(|error| has_hung_up(&error))
}

/// Calls a method whose only argument is the container.
async fn call_server(
    server: UnixStream,
    service: &str,
    method: &str,
    id: &str,
) -> ttrpc::Result<Response> {
    let message = ConnectRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let request = Request {
        service: service.to_owned(),
        method: method.to_owned(),
        timeout_nano: LIMIT_NANOSECONDS,
        payload: message.write_to_bytes().map_err(other)?,
        ..Default::default()
    };
    server.set_nonblocking(true).map_err(other)?;
    let server = net::UnixStream::from_std(server).map_err(other)?;
    Client::new(Socket::from(server)).request(request).await
}

fn other(error: impl std::error::Error) -> Error {
    Error::Others(error.to_string())
}

/// True unless the error is an answer, a missed time limit, or a call that could not be sent.
fn has_hung_up(error: &Error) -> bool {
    !matches!(error, Error::RpcStatus(_) | Error::Others(_))
}

/// Announces a container to the server behind this connection, for `start`. False if the server is
/// about to end.
///
/// A pod's last container may be deleted, and its shim shut down, between a new container's `start`
/// and `Create`: the create would find no server. So `start` calls first. If the server answers
/// that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
/// older version, is used without the announcement.
pub async fn takes(server: UnixStream, id: &str) -> bool {
    let (service, method) = EXPECT.split_once('/').unwrap_or_default();
    match call_server(server, service, method, id).await {
        Err(Error::RpcStatus(status)) => status.code() != Code::UNAVAILABLE,
        Err(error @ Error::Others(_)) => {
            tracing::warn!(%error, "announce the container to the shim of its group");
            true
        }
        // The server hung up before, during or after the call.
        Err(_) => false,
        Ok(_) => true,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;
    use ttrpc::asynchronous::Client;
    use ttrpc::asynchronous::transport::Socket;

    use super::containers::tests::containers;
    use super::*;
    use crate::runtime::RuntimeError;

    const METHODS: [&str; 17] = [
        "Create",
        "Start",
        "Exec",
        "Delete",
        "Kill",
        "Pause",
        "Resume",
        "Update",
        "State",
        "Pids",
        "Wait",
        "CloseIO",
        "ResizePty",
        "Connect",
        "Shutdown",
        "Checkpoint",
        "Stats",
    ];

    fn call() -> PendingCall {
        Arc::new(Calls::default()).begin("x", "web", "")
    }

    fn code(answer: Answer) -> Code {
        answer.unwrap_err().code()
    }

    #[tokio::test]
    async fn a_panic_is_answered() {
        assert_eq!(
            code(change(call(), async { panic!("no") }).await),
            Code::INTERNAL
        );
        assert_eq!(
            code(query(call(), async { panic!("no") }).await),
            Code::INTERNAL
        );
    }

    #[tokio::test]
    async fn a_change_is_finished_after_the_client_disconnects() {
        let (go_on, resumed) = oneshot::channel();
        let (done, seen) = oneshot::channel();
        let work = change(call(), async move {
            resumed.await.unwrap();
            done.send(()).unwrap();
            NOTHING
        });
        assert!(timeout(Duration::from_millis(5), work).await.is_err());
        go_on.send(()).unwrap();
        timeout(Duration::from_secs(60), seen)
            .await
            .unwrap()
            .unwrap();
    }

    #[test]
    fn a_call_is_pending_until_it_is_answered() {
        let calls = Arc::new(Calls::default());
        let (wait, kill) = (
            calls.begin("wait", "web", "e"),
            calls.begin("kill", "web", ""),
        );
        let lines = calls.describe();
        assert!(
            lines[0].starts_with("pending call: wait web exec e, for 0."),
            "{lines:?}"
        );
        assert!(
            lines[1].starts_with("pending call: kill web, for 0."),
            "{lines:?}"
        );
        drop((wait, kill));
        assert!(calls.describe().is_empty());
    }

    #[test]
    fn a_failed_create_reads_as_with_gos_shim() {
        let source = RuntimeError::Failed {
            message: "runc create failed: no such file or directory".into(),
        };
        let status = Status::from(TaskError::Runtime {
            stage: "create",
            source,
        });
        assert_eq!(status.code(), Code::UNKNOWN);
        assert_eq!(
            status.message,
            "OCI runtime create failed: runc create failed: no such file or directory"
        );
    }

    /// As Go's ttrpc answers.
    #[tokio::test]
    async fn codes_of_calls_that_no_method_can_serve() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut server = server(listener, &Arc::new(containers())).unwrap();
        server.start().await.unwrap();
        let mut calls = vec![
            (V3, "State", &b""[..], Code::NOT_FOUND),
            (V3, "Dance", b"", Code::UNIMPLEMENTED),
            (
                "containerd.runtime.sandbox.v1.Sandbox",
                "Platform",
                b"",
                Code::UNIMPLEMENTED,
            ),
            (
                "containerd.services.streaming.v1.Streaming",
                "Stream",
                b"",
                Code::UNIMPLEMENTED,
            ),
            ("any.other.Service", "State", b"\xff", Code::UNIMPLEMENTED),
            ("bindguard.shim.v1.Group", "Expect", b"\xff", Code::INTERNAL),
            ("", "", b"", Code::UNIMPLEMENTED),
        ];
        for method in METHODS {
            for service in [V2, V3] {
                calls.push((service, method, b"\xff", Code::INTERNAL));
            }
        }
        for (service, method, payload, code) in calls {
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_nonblocking(true).unwrap();
            let client = Client::new(Socket::from(net::UnixStream::from_std(stream).unwrap()));
            let (service, method) = (service.to_owned(), method.to_owned());
            let request = Request {
                service,
                method,
                payload: payload.to_owned(),
                ..Default::default()
            };
            let called = format!("{}/{}", request.service, request.method);
            match client.request(request).await {
                Err(Error::RpcStatus(status)) => {
                    assert_eq!(status.code(), code, "{called}: {status}")
                }
                other => panic!("{called}: {other:?}"),
            }
        }
    }
}

#[cfg(test)]
mod connection_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::from((payload.len() as u32).to_be_bytes());
        frame.extend(stream.to_be_bytes());
        frame.extend([kind, 0]);
        frame.extend(payload);
        frame
    }

    fn request(service: &str, method: &str, payload: &[u8]) -> Vec<u8> {
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload: payload.to_owned(),
            timeout_nano: 7,
            ..Default::default()
        };
        request.write_to_bytes().unwrap()
    }

    /// The call of the method without a name.
    fn call(request: &[u8]) -> Vec<u8> {
        let timeout_nano = Request::parse_from_bytes(request).unwrap().timeout_nano;
        let call = Request {
            payload: request.to_owned(),
            timeout_nano,
            ..Default::default()
        };
        call.write_to_bytes().unwrap()
    }

    /// The input of ttrpc, for the input of a socket that arrives in pieces of this size.
    fn read(input: &[u8], piece: usize) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (socket, mut client) = duplex(piece);
            let (requests, mut server) = duplex(piece);
            let mut output = Vec::new();
            let (sent, _, _) = tokio::join!(
                async move { client.write_all(input).await },
                pass_on(socket, requests),
                server.read_to_end(&mut output)
            );
            sent.unwrap();
            output
        })
    }

    fn any_frame() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        let data = (prop_oneof![Just(2_u8), Just(3)], any::<u32>(), bytes());
        prop_oneof![
            data.prop_map(|(kind, stream, payload)| {
                let frame = frame(kind, stream, &payload);
                (frame.clone(), frame)
            }),
            ("[a-j.]{0,150}", any::<u32>(), bytes()).prop_map(|(service, stream, payload)| {
                let request = request(&service, "Method", &payload);
                (
                    frame(1, stream, &request),
                    frame(1, stream, &call(&request)),
                )
            }),
        ]
    }

    proptest! {
        #[test]
        fn only_requests_change(
            frames in prop::collection::vec(any_frame(), 0..6),
            piece in 1..64_usize,
            end in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let (mut input, mut expected) = (Vec::new(), Vec::new());
            for (sent, arrives) in frames {
                input.extend(sent);
                expected.extend(arrives);
            }
            // A header that is cut off.
            input.extend(&end[..end.len().min(MESSAGE_HEADER_LENGTH - 1)]);
            prop_assert_eq!(read(&input, piece), expected);
        }
    }

    #[test]
    fn a_frame_above_the_limit_passes() {
        let long = vec![10; MESSAGE_LENGTH_MAX + 1];
        let request = request("other", "M", b"");
        let input = [frame(1, 1, &long), frame(1, 3, &request)].concat();
        let expected = [frame(1, 1, &long), frame(1, 3, &call(&request))].concat();
        assert!(read(&input, 4096) == expected);
    }

    #[test]
    fn bytes_that_are_no_request_pass() {
        let input = frame(1, 1, b"\xff\xff\xff");
        assert_eq!(read(&input, 7), input);
    }
}

#[cfg(test)]
mod client_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashMap;
    use std::io::Read;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use std::{fs, thread};

    use ttrpc::asynchronous::Server;

    use super::containers::tests::containers;
    use super::{Listener, is_alive, server, takes};

    /// Includes a server that has no such service, and does not know the container.
    #[tokio::test]
    async fn a_server_that_answers_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut server = Server::new().add_listener(Listener::try_from(listener).unwrap());
        server = server.register_service(HashMap::new());
        server.start().await.unwrap();
        assert!(is_alive(UnixStream::connect(&path).unwrap(), "c").await);
    }

    /// The refusal passes through ttrpc with its code, on which `start` depends.
    #[tokio::test]
    async fn a_server_waits_unless_it_is_about_to_end() {
        let folder = tempfile::tempdir().unwrap();
        for is_ending in [false, true] {
            let containers = Arc::new(containers());
            if is_ending {
                containers.shut_down();
            }
            let path = folder.path().join(is_ending.to_string());
            let mut server = server(UnixListener::bind(&path).unwrap(), &containers).unwrap();
            server.start().await.unwrap();
            let client = UnixStream::connect(&path).unwrap();
            assert_eq!(takes(client, "c").await, !is_ending);
        }
    }

    /// A server that never accepted the call, or ended during or after it.
    #[tokio::test]
    async fn a_server_that_hangs_up_is_dead_and_does_not_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for read_limit in [None, Some(1), Some(100)] {
            let listener = UnixListener::bind(&path).unwrap();
            let clients = [
                UnixStream::connect(&path).unwrap(),
                UnixStream::connect(&path).unwrap(),
            ];
            let server = thread::spawn(move || {
                let Some(most) = read_limit else { return };
                for _ in 0..2 {
                    let _ = listener.accept().unwrap().0.read(&mut vec![0; most]);
                }
            });
            let [one, other] = clients;
            assert!(!is_alive(one, "c").await, "{read_limit:?}");
            assert!(!takes(other, "c").await, "{read_limit:?}");
            server.join().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
}
