//! A blocking client of the task service.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use containerd_shim_protos::api::{
    CloseIORequest, CreateTaskRequest, DeleteRequest, DeleteResponse, ExecProcessRequest,
    KillRequest, PauseRequest, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest,
    StateRequest, StateResponse, UpdateTaskRequest, WaitRequest,
};
use containerd_shim_protos::shim_async::{Client as Connection, TaskClient};
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::{Context, with_duration};
use ttrpc::{Code, Error};

/// The time limit of a call.
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(2);

/// A connection to a shim.
#[allow(
    missing_debug_implementations,
    reason = "the generated client has none"
)]
pub struct Client {
    runtime: Runtime,
    task: TaskClient,
}

impl Client {
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start an event loop")?;
        let task = runtime.block_on(async {
            let stream = UnixStream::connect(socket).await;
            let stream = stream.with_context(|| format!("connect to {}", socket.display()))?;
            anyhow::Ok(TaskClient::new(Connection::new(Socket::from(stream))))
        })?;
        Ok(Self { runtime, task })
    }

    /// Sends any request, with a generous deadline.
    pub fn call<T>(
        &self,
        call: impl AsyncFnOnce(&TaskClient, Context) -> ttrpc::Result<T>,
    ) -> ttrpc::Result<T> {
        self.call_within(LIMIT, call)
    }

    /// Sends a request with a deadline.
    pub fn call_within<T>(
        &self,
        limit: Duration,
        call: impl AsyncFnOnce(&TaskClient, Context) -> ttrpc::Result<T>,
    ) -> ttrpc::Result<T> {
        self.runtime
            .block_on(call(&self.task, with_duration(limit)))
    }

    /// Sends a request, and disconnects without the answer as soon as `when` says so. True if there
    /// was no answer before that.
    pub fn call_without_waiting<T>(
        self,
        call: impl AsyncFnOnce(&TaskClient, Context) -> ttrpc::Result<T>,
        when: impl Fn() -> bool,
    ) -> bool {
        let Self { runtime, task } = self;
        runtime.block_on(async {
            let moment = async {
                while !when() {
                    sleep(POLL).await;
                }
            };
            tokio::select! {
                _ = call(&task, with_duration(LIMIT)) => false,
                () = moment => true,
            }
        })
    }

    /// Creates a container; answers its init's pid.
    pub fn create(&self, request: &CreateTaskRequest) -> ttrpc::Result<u32> {
        self.call(async |task, context| Ok(task.create(context, request).await?.pid))
    }

    /// Starts an init, or an exec; answers its pid.
    pub fn start(&self, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
        let request = StartRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| Ok(task.start(context, &request).await?.pid))
    }

    /// Adds an exec with these streams that runs `words`.
    pub fn exec(&self, mut request: ExecProcessRequest, words: &[&str]) -> ttrpc::Result<()> {
        request.spec = Some(process(words)).into();
        self.call(async |task, context| task.exec(context, &request).await.map(drop))
    }

    /// The state of a process.
    pub fn state(&self, id: &str, exec_id: &str) -> ttrpc::Result<StateResponse> {
        let request = StateRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| task.state(context, &request).await)
    }

    /// Waits for a process's end; answers its status.
    pub fn wait(&self, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
        let request = WaitRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| Ok(task.wait(context, &request).await?.exit_status))
    }

    /// Sends a signal.
    pub fn kill(&self, id: &str, exec_id: &str, signal: u32) -> ttrpc::Result<()> {
        let request = KillRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            signal,
            ..Default::default()
        };
        self.call(async |task, context| task.kill(context, &request).await.map(drop))
    }

    /// Deletes a process, an init with its container.
    pub fn delete(&self, id: &str, exec_id: &str) -> ttrpc::Result<DeleteResponse> {
        let request = DeleteRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| task.delete(context, &request).await)
    }

    /// Kills a container's init and deletes it.
    pub fn end(&self, id: &str) -> ttrpc::Result<DeleteResponse> {
        // the init may have ended already
        let _ = self.kill(id, "", 9);
        self.wait(id, "")?;
        self.delete(id, "")
    }

    /// Freezes a container.
    pub fn pause(&self, id: &str) -> ttrpc::Result<()> {
        let request = PauseRequest {
            id: id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| task.pause(context, &request).await.map(drop))
    }

    /// Thaws it.
    pub fn resume(&self, id: &str) -> ttrpc::Result<()> {
        let request = ResumeRequest {
            id: id.to_owned(),
            ..Default::default()
        };
        self.call(async |task, context| task.resume(context, &request).await.map(drop))
    }

    /// Changes a container's limits to these resources, as the runtime spec writes them.
    pub fn update(&self, id: &str, resources: &Value) -> ttrpc::Result<()> {
        let resources = Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
            value: resources.to_string().into_bytes(),
            ..Default::default()
        };
        let resources = MessageField::some(resources);
        let request = UpdateTaskRequest {
            id: id.to_owned(),
            resources,
            ..Default::default()
        };
        self.call(async |task, context| task.update(context, &request).await.map(drop))
    }

    /// Sets the size of a terminal.
    pub fn resize(&self, id: &str, exec_id: &str, width: u32, height: u32) -> ttrpc::Result<()> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        let request = ResizePtyRequest {
            id,
            exec_id,
            width,
            height,
            ..Default::default()
        };
        self.call(async |task, context| task.resize_pty(context, &request).await.map(drop))
    }

    /// Lets the process see the end of its stdin.
    pub fn close_stdin(&self, id: &str, exec_id: &str) -> ttrpc::Result<()> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        let request = CloseIORequest {
            id,
            exec_id,
            stdin: true,
            ..Default::default()
        };
        self.call(async |task, context| task.close_io(context, &request).await.map(drop))
    }

    /// Lets the shim end, if it has no container left.
    pub fn shut_down(&self, id: &str) -> ttrpc::Result<()> {
        self.request_shutdown(ShutdownRequest {
            id: id.to_owned(),
            ..Default::default()
        })
    }

    /// The same in the words of a client that will not wait.
    pub fn shut_down_now(&self, id: &str) -> ttrpc::Result<()> {
        self.request_shutdown(ShutdownRequest {
            id: id.to_owned(),
            now: true,
            ..Default::default()
        })
    }

    fn request_shutdown(&self, request: ShutdownRequest) -> ttrpc::Result<()> {
        self.call(async |task, context| task.shutdown(context, &request).await.map(drop))
    }
}

/// The code of a refusal; an error if the shim did not refuse.
pub fn code<T>(answer: ttrpc::Result<T>) -> Result<Code> {
    match answer {
        Err(Error::RpcStatus(status)) => Ok(status.code()),
        Err(error) => Err(error).context("not an answer of the shim"),
        Ok(_) => anyhow::bail!("it was done, and should have been refused"),
    }
}

/// An OCI process, as containerd sends it.
fn process(words: &[&str]) -> Any {
    let user = json!({"uid": 0, "gid": 0});
    let process: Value = json!({"args": words, "cwd": "/", "env": ["PATH=/bin"], "user": user});
    let type_url = "types.containerd.io/opencontainers/runtime-spec/1/Process".to_owned();
    Any {
        type_url,
        value: process.to_string().into_bytes(),
        ..Default::default()
    }
}
