//! The task service: passes containerd's requests to the tasks.
//!
//! containerd 1.x calls the service `containerd.task.v2.Task`, 2.x `containerd.task.v3.Task`. The
//! messages are equal, so one implementation serves requests of 1.x and 2.x. Every method is
//! explicit: for a missing method ttrpc answers NOT_FOUND, which means to containerd that the
//! container is gone.

mod client;
mod containers;
mod unknown_services;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Instant;

use async_trait::async_trait;
use bindguard_core::error_chain;
use bindguard_core::fault_points::PANIC_IN;
use containerd_shim_protos::api::*;
use containerd_shim_protos::shim_async::{Task as TaskMethods, create_task};
use protobuf::MessageField;
use protobuf::well_known_types::empty::Empty;
use ttrpc::asynchronous::{MethodHandler, Service, TtrpcContext};
use ttrpc::{Code, Error, Request, Response, get_status};

use client::{EXPECT_SERVICE, expect_service};
pub use client::{ServerAnswer, expect, is_alive};
pub use containers::Containers;
pub use unknown_services::answering_unknown;

use crate::blocking::lock;
use crate::events::timestamp;
use crate::task::TaskError;

const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";

/// The task service under both names, and the service of our own `start`.
pub fn services(containers: &Arc<Containers>) -> HashMap<String, Service> {
    let service = || Arc::new(TaskService(Arc::clone(containers)));
    let mut all = create_task(service());
    if let Some(twin) = create_task(service()).remove(V3) {
        all.insert(V2.to_owned(), twin);
    }
    all.insert(EXPECT_SERVICE.to_owned(), expect_service(containers));
    all.into_iter()
        .map(|(name, service)| (name, decoded(service)))
        .collect()
}

struct TaskService(Arc<Containers>);

impl TaskService {
    fn begin(&self, method: &'static str, id: &str, exec_id: &str) -> PendingCall {
        self.0.calls.begin(method, id, exec_id)
    }
}

type TtrpcResult<T> = ttrpc::Result<T>;

#[async_trait]
impl TaskMethods for TaskService {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> TtrpcResult<CreateTaskResponse> {
        let containers = Arc::clone(&self.0);
        run_to_end(self.begin("create", &request.id, ""), async move {
            panic_on_request("create", &request.id);
            Ok(CreateTaskResponse {
                pid: containers.create(request).await?,
                ..Default::default()
            })
        })
        .await
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> TtrpcResult<StartResponse> {
        let containers = Arc::clone(&self.0);
        let call = self.begin("start", &request.id, &request.exec_id);
        run_to_end(call, async move {
            panic_on_request("start", &request.id);
            let task = containers.find(&request.id)?;
            Ok(StartResponse {
                pid: task.start(&request.exec_id).await?,
                ..Default::default()
            })
        })
        .await
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        let call = self.begin("exec", &request.id, &request.exec_id);
        run_to_end(call, async move {
            containers.find(&request.id)?.add_exec(request)?;
            Ok(Empty::new())
        })
        .await
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> TtrpcResult<DeleteResponse> {
        let containers = Arc::clone(&self.0);
        let call = self.begin("delete", &request.id, &request.exec_id);
        run_to_end(call, async move {
            containers.delete(&request.id, &request.exec_id).await
        })
        .await
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        let call = self.begin("kill", &request.id, &request.exec_id);
        run_to_end(call, async move {
            let task = containers.find(&request.id)?;
            task.kill(&request.exec_id, request.signal, request.all)
                .await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        run_to_end(self.begin("pause", &request.id, ""), async move {
            containers.find(&request.id)?.pause().await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        run_to_end(self.begin("resume", &request.id, ""), async move {
            containers.find(&request.id)?.resume().await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        run_to_end(self.begin("update", &request.id, ""), async move {
            let task = containers.find(&request.id)?;
            task.update(&request.resources.value).await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> TtrpcResult<StateResponse> {
        run_cancellable(self.begin("state", &request.id, &request.exec_id), async {
            panic_on_request("state", &request.id);
            Ok(self.0.find(&request.id)?.state(&request.exec_id)?)
        })
        .await
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> TtrpcResult<PidsResponse> {
        run_cancellable(self.begin("pids", &request.id, ""), async {
            Ok(PidsResponse {
                processes: self.0.find(&request.id)?.pids().await?,
                ..Default::default()
            })
        })
        .await
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> TtrpcResult<WaitResponse> {
        run_cancellable(self.begin("wait", &request.id, &request.exec_id), async {
            let exit = self.0.find(&request.id)?.wait(&request.exec_id).await?;
            Ok(WaitResponse {
                exit_status: exit.status,
                exited_at: timestamp(exit.at),
                ..Default::default()
            })
        })
        .await
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> TtrpcResult<Empty> {
        let call = self.begin("close io", &request.id, &request.exec_id);
        run_cancellable(call, async {
            let task = self.0.find(&request.id)?;
            if request.stdin {
                task.close_stdin(&request.exec_id)?;
            }
            Ok(Empty::new())
        })
        .await
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> TtrpcResult<Empty> {
        run_cancellable(self.begin("resize", &request.id, &request.exec_id), async {
            let task = self.0.find(&request.id)?;
            task.resize(&request.exec_id, request.width, request.height)?;
            Ok(Empty::new())
        })
        .await
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: ConnectRequest,
    ) -> TtrpcResult<ConnectResponse> {
        run_cancellable(self.begin("connect", &request.id, ""), async {
            Ok(ConnectResponse {
                shim_pid: std::process::id(),
                // Answered for an unknown container as well: this is how a restarted containerd
                // finds the shim.
                task_pid: self.0.find(&request.id).map_or(0, |task| task.pid()),
                ..Default::default()
            })
        })
        .await
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> TtrpcResult<Empty> {
        run_cancellable(self.begin("shutdown", &request.id, ""), async {
            // Ignores `now`, like Go's shim: the end of a shim would end its containers.
            self.0.shut_down();
            Ok(Empty::new())
        })
        .await
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: CheckpointTaskRequest,
    ) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.0);
        run_to_end(self.begin("checkpoint", &request.id, ""), async move {
            containers.find(&request.id)?.checkpoint(request).await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> TtrpcResult<StatsResponse> {
        run_cancellable(self.begin("stats", &request.id, ""), async {
            Ok(StatsResponse {
                stats: MessageField::some(self.0.find(&request.id)?.stats()?),
                ..Default::default()
            })
        })
        .await
    }
}

/// In a build with fault points a method panics for the container that is named after it.
fn panic_on_request(method: &str, id: &str) {
    let is_requested = id.strip_prefix(PANIC_IN) == Some(method);
    assert!(
        !cfg!(feature = "fault-points") || !is_requested,
        "a fault point"
    );
}

/// Runs a method that changes something to its end, even if the client disconnects.
///
/// ttrpc drops a method's future when its client disconnects or its deadline passes. If a `create`
/// is dropped between the runtime's run and its record, the container is unknown to the shim. So
/// the method runs in a separate task. A method that panics would never answer: the panic is caught
/// and answered as INTERNAL, and the pod's other containers live on.
async fn run_to_end<T: Send + 'static>(
    call: PendingCall,
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> TtrpcResult<T> {
    let method = call.method;
    let work = tokio::spawn(async move {
        let _pending = call;
        work.await
    });
    match work.await {
        Ok(result) => result.map_err(|refusal| {
            // containerd's own log has it at the level that containerd chooses.
            tracing::debug!(method, code = ?refusal.code, "{}", refusal.message);
            refusal.into()
        }),
        Err(_panicked) => Err(Refusal::panicked(method).into()),
    }
}

/// Runs a method that only reads. The future may be dropped at any time.
async fn run_cancellable<T>(
    call: PendingCall,
    work: impl Future<Output = Result<T, Refusal>> + Send,
) -> TtrpcResult<T> {
    let mut work = pin!(work);
    let caught = std::future::poll_fn(|context| {
        catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)))
            .unwrap_or_else(|_| Poll::Ready(Err(Refusal::panicked(call.method))))
    });
    caught.await.map_err(Into::into)
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

/// A request that failed, in the form for containerd: a gRPC code and a line of text.
///
/// containerd decides by the code: NOT_FOUND to a kill means that the process has ended. containerd
/// shows the text of all other errors to the user.
#[derive(Debug)]
struct Refusal {
    code: Code,
    message: String,
}

impl Refusal {
    /// A method that panicked; the log has the details.
    fn panicked(method: &str) -> Self {
        Self {
            code: Code::INTERNAL,
            message: format!("the shim broke in {method}; its log says where"),
        }
    }

    /// The shim is about to end; containerd must start a new shim.
    fn shutting_down() -> Self {
        Self {
            code: Code::UNAVAILABLE,
            message: "the shim is shutting down".to_owned(),
        }
    }
}

impl From<TaskError> for Refusal {
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
        Self {
            code,
            message: error_chain(&error),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::RpcStatus(get_status(refusal.code, refusal.message))
    }
}

type Handler = Box<dyn MethodHandler + Send + Sync>;

/// Answers requests to the service that cannot be decoded as Go's ttrpc does: INTERNAL. Rust's
/// ttrpc answers UNKNOWN to any error of a handler. A handler returns only errors of decoding and
/// encoding: the response already has the error of a method.
fn decoded(service: Service) -> Service {
    let answering = |(name, handler)| (name, Box::new(Decoding(handler)) as Handler);
    Service {
        methods: service.methods.into_iter().map(answering).collect(),
        streams: service.streams,
    }
}

struct Decoding(Handler);

#[async_trait]
impl MethodHandler for Decoding {
    async fn handler(&self, context: TtrpcContext, request: Request) -> TtrpcResult<Response> {
        let answer = self.0.handler(context, request).await;
        Ok(answer.unwrap_or_else(|error| match error {
            Error::RpcStatus(status) => Error::RpcStatus(status).into(),
            error => Error::RpcStatus(get_status(Code::INTERNAL, error.to_string())).into(),
        }))
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
    use ttrpc::asynchronous::transport::{Listener, Socket};
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

    fn code(result: ttrpc::Result<()>) -> Code {
        match result {
            Err(Error::RpcStatus(status)) => status.code(),
            other => panic!("no status: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_panic_is_answered() {
        assert_eq!(
            code(run_to_end(call(), async { panic!("no") }).await),
            Code::INTERNAL
        );
        assert_eq!(
            code(run_cancellable(call(), async { panic!("no") }).await),
            Code::INTERNAL
        );
    }

    #[tokio::test]
    async fn a_change_is_finished_after_the_client_disconnects() {
        let (go_on, resumed) = oneshot::channel();
        let (done, seen) = oneshot::channel();
        let work = run_to_end(call(), async move {
            resumed.await.unwrap();
            done.send(()).unwrap();
            Ok(())
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
        let refusal = Refusal::from(TaskError::Runtime {
            stage: "create",
            source,
        });
        assert_eq!(refusal.code, Code::UNKNOWN);
        assert_eq!(
            refusal.message,
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
        let listener = Listener::try_from(listener).unwrap();
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
