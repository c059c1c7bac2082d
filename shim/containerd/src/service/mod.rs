//! The task service: passes containerd's requests to the tasks.
//!
//! containerd 1.x calls the service `containerd.task.v2.Task`, 2.x `containerd.task.v3.Task`. The
//! messages are equal, so one implementation serves requests of 1.x and 2.x. Every method is
//! explicit: NOT_FOUND for a missing method would mean to containerd that the container is gone.

mod containers;

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Instant;

use async_trait::async_trait;
use bindguard_core::error_chain;
use bindguard_core::handover::PANIC_IN;
use containerd_shim_protos::api::*;
use protobuf::{Message, MessageField};
use ttrpc::asynchronous::{MethodHandler, TtrpcContext};
use ttrpc::{Code, Error, Request, Response, Status, get_status};

use crate::events::timestamp;
use crate::task::TaskError;
use crate::work::lock;

pub use containers::Containers;
#[cfg(test)]
pub use containers::tests::containers;

pub const V2: &str = "containerd.task.v2.Task";
pub const V3: &str = "containerd.task.v3.Task";
/// The call of our own `start`.
pub const EXPECT: &str = "bindguard.shim.v1.Group/Expect";

/// The handler of all requests; see `serve`.
pub struct TaskService(pub Arc<Containers>);

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
                    encode_pid(containers.create(request).await?)
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
                encode_pid(containers.find(&id)?.start(&exec_id).await?)
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

/// The answer to `Create` and to `Start`: the messages are equal.
fn encode_pid(pid: u32) -> Answer {
    encode(&StartResponse {
        pid,
        ..Default::default()
    })
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
            log::debug!(method:%, code:? = status.code(); "{}", status.message);
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;
    use crate::runtime::RuntimeError;

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
        let message = "runc create failed: no such file or directory".to_owned();
        let source = RuntimeError::from(message);
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
}
