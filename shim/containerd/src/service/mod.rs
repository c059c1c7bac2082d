//! The task service: passes containerd's requests to the tasks.
//!
//! containerd 1.x calls the service `containerd.task.v2.Task`, 2.x `containerd.task.v3.Task`. The
//! messages are equal, so one implementation serves requests of 1.x and 2.x. Every method is
//! explicit: for a missing method ttrpc answers NOT_FOUND, which means to containerd that the
//! container is gone.
//!
//! Calls to a server that `start` or `delete` finds at a socket.

mod containers;
mod unknown_services;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bindguard_core::error_chain;
use bindguard_core::program_names::PANIC_IN;
use containerd_shim_protos::api::*;
use protobuf::{Message, MessageField};
use ttrpc::asynchronous::transport::Socket;
use ttrpc::asynchronous::{Client, MethodHandler, Service, TtrpcContext};
use ttrpc::{Code, Error, Request, Response, Status, get_status};

use crate::blocking::lock;
use crate::events::timestamp;
use crate::task::TaskError;

pub use containers::Containers;
pub use unknown_services::answering_unknown;

const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";
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

/// The task service under both names, and the service of our own `start`.
pub fn services(containers: &Arc<Containers>) -> HashMap<String, Service> {
    let mut all = HashMap::new();
    for (name, methods) in [
        (V2, &METHODS[..]),
        (V3, &METHODS),
        (EXPECT_SERVICE, &[EXPECT]),
    ] {
        let mut service = Service {
            methods: HashMap::new(),
            streams: HashMap::new(),
        };
        for method in methods {
            let handler = Box::new(TaskService(Arc::clone(containers)));
            service.methods.insert((*method).to_owned(), handler);
        }
        all.insert(name.to_owned(), service);
    }
    all
}

struct TaskService(Arc<Containers>);

#[async_trait]
impl MethodHandler for TaskService {
    /// Every failure is in the response: Rust's ttrpc answers UNKNOWN to any error of a handler.
    async fn handler(&self, _: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        let answered = match self.call(&request.method, &request.payload) {
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
    fn call(&self, method: &str, payload: &[u8]) -> Result<PendingAnswer, Status> {
        let containers = Arc::clone(&self.0);
        let begin = |method, id: &str, exec_id: &str| self.0.calls.begin(method, id, exec_id);
        Ok(match method {
            "Create" => {
                let request: CreateTaskRequest = decode(payload)?;
                let call = begin("create", &request.id, "");
                change(call, async move {
                    panic_on_request("create", &request.id);
                    encode(&CreateTaskResponse {
                        pid: containers.create(request).await?,
                        ..Default::default()
                    })
                })
            }
            "Start" => {
                let StartRequest { id, exec_id, .. } = decode(payload)?;
                change(begin("start", &id, &exec_id), async move {
                    panic_on_request("start", &id);
                    encode(&StartResponse {
                        pid: containers.find(&id)?.start(&exec_id).await?,
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
            "Delete" => {
                let DeleteRequest { id, exec_id, .. } = decode(payload)?;
                change(begin("delete", &id, &exec_id), async move {
                    encode(&containers.delete(&id, &exec_id).await?)
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
            "Pause" => {
                let PauseRequest { id, .. } = decode(payload)?;
                change(begin("pause", &id, ""), async move {
                    containers.find(&id)?.pause().await?;
                    NOTHING
                })
            }
            "Resume" => {
                let ResumeRequest { id, .. } = decode(payload)?;
                change(begin("resume", &id, ""), async move {
                    containers.find(&id)?.resume().await?;
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
            "State" => {
                let StateRequest { id, exec_id, .. } = decode(payload)?;
                query(begin("state", &id, &exec_id), async move {
                    panic_on_request("state", &id);
                    encode(&containers.find(&id)?.state(&exec_id)?)
                })
            }
            "Pids" => {
                let PidsRequest { id, .. } = decode(payload)?;
                query(begin("pids", &id, ""), async move {
                    encode(&PidsResponse {
                        processes: containers.find(&id)?.pids().await?,
                        ..Default::default()
                    })
                })
            }
            "Wait" => {
                let WaitRequest { id, exec_id, .. } = decode(payload)?;
                query(begin("wait", &id, &exec_id), async move {
                    let exit = containers.find(&id)?.wait(&exec_id).await?;
                    encode(&WaitResponse {
                        exit_status: exit.status,
                        exited_at: timestamp(exit.at),
                        ..Default::default()
                    })
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
            "Connect" => {
                let ConnectRequest { id, .. } = decode(payload)?;
                query(begin("connect", &id, ""), async move {
                    encode(&ConnectResponse {
                        shim_pid: std::process::id(),
                        // Answered for an unknown container as well: this is how a restarted
                        // containerd finds the shim.
                        task_pid: containers.find(&id).map_or(0, |task| task.pid()),
                        ..Default::default()
                    })
                })
            }
            "Shutdown" => {
                let ShutdownRequest { id, .. } = decode(payload)?;
                query(begin("shutdown", &id, ""), async move {
                    // Ignores `now`, like Go's shim: the end of a shim would end its containers.
                    containers.shut_down();
                    NOTHING
                })
            }
            "Stats" => {
                let StatsRequest { id, .. } = decode(payload)?;
                query(begin("stats", &id, ""), async move {
                    encode(&StatsResponse {
                        stats: MessageField::some(containers.find(&id)?.stats()?),
                        ..Default::default()
                    })
                })
            }
            EXPECT => {
                let ConnectRequest { id, .. } = decode(payload)?;
                query(begin("expect", &id, ""), async move {
                    containers.expect(&id)?;
                    NOTHING
                })
            }
            other => return Err(get_status(Code::UNIMPLEMENTED, format!("{other} method"))),
        })
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

/// In a build with fault points a method panics for the container that is named after it.
fn panic_on_request(method: &str, id: &str) {
    let is_requested = id.strip_prefix(PANIC_IN) == Some(method);
    assert!(
        !cfg!(feature = "fault-points") || !is_requested,
        "a fault point"
    );
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
        let _pending = call;
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
        catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)))
            .unwrap_or_else(|_| Poll::Ready(Err(panicked(call.method))))
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
#[derive(Debug, Default)]
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
#[derive(Debug)]
struct PendingCall {
    calls: Arc<Calls>,
    method: &'static str,
    number: u64,
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        lock(&self.calls.0).remove(&self.number);
    }
}

/// The time limit: a server that hangs must not block the caller.
const LIMIT: Duration = Duration::from_secs(2);

pub const EXPECT_SERVICE: &str = "bindguard.shim.v1.Group";
pub const EXPECT: &str = "Expect";

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
        timeout_nano: i64::try_from(LIMIT.as_nanos()).unwrap_or(i64::MAX),
        payload: message.write_to_bytes().map_err(other)?,
        ..Default::default()
    };
    server.set_nonblocking(true).map_err(other)?;
    let server = tokio::net::UnixStream::from_std(server).map_err(other)?;
    Client::new(Socket::from(server)).request(request).await
}

fn other(error: impl std::error::Error) -> Error {
    Error::Others(error.to_string())
}

/// True unless the error is an answer, a missed time limit, or a call that could not be sent.
fn has_hung_up(error: &Error) -> bool {
    !matches!(error, Error::RpcStatus(_) | Error::Others(_))
}

/// The server's answer to `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerAnswer {
    /// It waits for the container, or does not know the call.
    Waits,
    /// It is about to end.
    Ends,
}

/// Announces a container to the server behind this connection, for `start`.
///
/// A pod's last container may be deleted, and its shim shut down, between a new container's `start`
/// and `Create`: the create would find no server. So `start` calls first. If the server answers
/// that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
/// older version, is used without the announcement.
pub async fn expect(server: UnixStream, id: &str) -> ServerAnswer {
    match call_server(server, EXPECT_SERVICE, EXPECT, id).await {
        Err(Error::RpcStatus(status)) if status.code() == Code::UNAVAILABLE => ServerAnswer::Ends,
        // The server hung up before, during or after the call.
        Err(error) if has_hung_up(&error) => ServerAnswer::Ends,
        Err(error @ Error::Others(_)) => {
            tracing::warn!(%error, "announce the container to the shim of its group");
            ServerAnswer::Waits
        }
        Ok(_) | Err(_) => ServerAnswer::Waits,
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
    use ttrpc::asynchronous::transport::Socket;
    use ttrpc::asynchronous::{Client, Server};

    use super::containers::tests::containers;
    use super::*;
    use crate::events::TaskEvents;
    use crate::exits::Exits;
    use crate::runtime::RuntimeError;
    use crate::task::SharedState;

    #[tokio::test]
    async fn both_names_have_all_methods() {
        let shared = SharedState {
            namespace: "n".into(),
            events: TaskEvents::publish_to("/nonexistent".into(), "n".into()),
            exits: Arc::new(Exits::default()),
        };
        let services = services(&Arc::new(Containers::new(shared)));
        assert_eq!(services.len(), 3);
        for name in [V2, V3] {
            assert_eq!(services[name].methods.len(), 17, "{name}");
        }
    }

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
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let services = services(&Arc::new(containers()));
        let listener = answering_unknown(listener, services.keys());
        let mut server = Server::new()
            .add_listener(listener)
            .register_service(services);
        server.start().await.unwrap();
        for (service, method, payload, code) in [
            (V2, "State", &b"\xff"[..], Code::INTERNAL),
            (V3, "Create", b"\xff", Code::INTERNAL),
            (V3, "State", b"", Code::NOT_FOUND),
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
            ("", "", b"", Code::UNIMPLEMENTED),
        ] {
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_nonblocking(true).unwrap();
            let client = Client::new(Socket::from(
                tokio::net::UnixStream::from_std(stream).unwrap(),
            ));
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
mod client_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashMap;
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::{fs, thread};

    use ttrpc::asynchronous::Server;
    use ttrpc::asynchronous::transport::Listener;

    use super::*;
    use crate::service::containers::tests::containers;
    use crate::service::{is_alive, services};

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
        for answer in [ServerAnswer::Waits, ServerAnswer::Ends] {
            let containers = Arc::new(containers());
            if answer == ServerAnswer::Ends {
                containers.shut_down();
            }
            let path = folder.path().join(format!("{answer:?}"));
            let listener = UnixListener::bind(&path).unwrap();
            listener.set_nonblocking(true).unwrap();
            let mut server = Server::new()
                .add_listener(Listener::try_from(listener).unwrap())
                .register_service(services(&containers));
            server.start().await.unwrap();
            assert_eq!(
                expect(UnixStream::connect(&path).unwrap(), "c").await,
                answer
            );
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
            assert_eq!(
                expect(other, "c").await,
                ServerAnswer::Ends,
                "{read_limit:?}"
            );
            server.join().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
}
