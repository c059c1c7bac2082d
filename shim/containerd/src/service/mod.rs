//! The task service: passes containerd's requests to the tasks.
//!
//! containerd 1.x calls the service `containerd.task.v2.Task`, 2.x `containerd.task.v3.Task`. The
//! messages are equal, so one implementation serves requests of 1.x and 2.x. Every method is
//! explicit: for a missing method ttrpc answers NOT_FOUND, which means to containerd that the
//! container is gone.

mod calls;
mod client;
mod containers;
mod decoding;
mod dispatch;
mod expectation;
mod refusal;
mod unknown_services;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::shim_async::{Task as TaskMethods, create_task};
use protobuf::MessageField;
use protobuf::well_known_types::empty::Empty;
use ttrpc::asynchronous::{Service, TtrpcContext};

use calls::PendingCall;
pub(crate) use client::is_alive;
pub(crate) use containers::Containers;
use decoding::decoded;
use dispatch::{panic_on_request, run_cancellable, run_to_end};
pub(crate) use expectation::{ServerAnswer, expect};
pub(crate) use unknown_services::answering_unknown;

use crate::events::timestamp;

const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";
/// The task service under both names, and the service of our own `start`.
pub(crate) fn services(containers: &Arc<Containers>) -> HashMap<String, Service> {
    let service = || {
        Arc::new(TaskService {
            containers: Arc::clone(containers),
        })
    };
    let mut all = create_task(service());
    if let Some(twin) = create_task(service()).remove(V3) {
        all.insert(V2.to_owned(), twin);
    }
    all.insert(
        expectation::SERVICE.to_owned(),
        expectation::service(containers),
    );
    all.into_iter()
        .map(|(name, service)| (name, decoded(service)))
        .collect()
}

struct TaskService {
    containers: Arc<Containers>,
}

impl TaskService {
    fn begin(&self, method: &'static str, id: &str, exec_id: &str) -> PendingCall {
        self.containers.begin_call(method, id, exec_id)
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
        let containers = Arc::clone(&self.containers);
        run_to_end(self.begin("create", &request.id, ""), async move {
            panic_on_request("create", &request.id);
            let pid = containers.create(request).await?;
            Ok(CreateTaskResponse {
                pid,
                ..Default::default()
            })
        })
        .await
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> TtrpcResult<StartResponse> {
        let containers = Arc::clone(&self.containers);
        run_to_end(
            self.begin("start", &request.id, &request.exec_id),
            async move {
                panic_on_request("start", &request.id);
                let pid = containers
                    .find(&request.id)?
                    .start(&request.exec_id)
                    .await?;
                Ok(StartResponse {
                    pid,
                    ..Default::default()
                })
            },
        )
        .await
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(
            self.begin("exec", &request.id, &request.exec_id),
            async move {
                containers.find(&request.id)?.add_exec(request)?;
                Ok(Empty::new())
            },
        )
        .await
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> TtrpcResult<DeleteResponse> {
        let containers = Arc::clone(&self.containers);
        run_to_end(
            self.begin("delete", &request.id, &request.exec_id),
            async move { containers.delete(&request.id, &request.exec_id).await },
        )
        .await
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(
            self.begin("kill", &request.id, &request.exec_id),
            async move {
                containers
                    .find(&request.id)?
                    .kill(&request.exec_id, request.signal, request.all)
                    .await?;
                Ok(Empty::new())
            },
        )
        .await
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(self.begin("pause", &request.id, ""), async move {
            containers.find(&request.id)?.pause().await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(self.begin("resume", &request.id, ""), async move {
            containers.find(&request.id)?.resume().await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(self.begin("update", &request.id, ""), async move {
            containers
                .find(&request.id)?
                .update(&request.resources.value)
                .await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> TtrpcResult<StateResponse> {
        run_cancellable(self.begin("state", &request.id, &request.exec_id), async {
            panic_on_request("state", &request.id);
            Ok(self.containers.find(&request.id)?.state(&request.exec_id)?)
        })
        .await
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> TtrpcResult<PidsResponse> {
        run_cancellable(self.begin("pids", &request.id, ""), async {
            let processes = self.containers.find(&request.id)?.pids().await?;
            Ok(PidsResponse {
                processes,
                ..Default::default()
            })
        })
        .await
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> TtrpcResult<WaitResponse> {
        run_cancellable(self.begin("wait", &request.id, &request.exec_id), async {
            let exit = self
                .containers
                .find(&request.id)?
                .wait(&request.exec_id)
                .await?;
            Ok(WaitResponse {
                exit_status: exit.status,
                exited_at: timestamp(exit.at),
                ..Default::default()
            })
        })
        .await
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> TtrpcResult<Empty> {
        run_cancellable(
            self.begin("close io", &request.id, &request.exec_id),
            async {
                let task = self.containers.find(&request.id)?;
                if request.stdin {
                    task.close_stdin(&request.exec_id)?;
                }
                Ok(Empty::new())
            },
        )
        .await
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> TtrpcResult<Empty> {
        run_cancellable(self.begin("resize", &request.id, &request.exec_id), async {
            self.containers.find(&request.id)?.resize(
                &request.exec_id,
                request.width,
                request.height,
            )?;
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
            // Answered for an unknown container as well: this is how a restarted containerd finds
            // the shim.
            let task_pid = self
                .containers
                .find(&request.id)
                .map_or(0, |task| task.pid());
            let shim_pid = std::process::id();
            Ok(ConnectResponse {
                shim_pid,
                task_pid,
                version: String::new(),
                ..Default::default()
            })
        })
        .await
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> TtrpcResult<Empty> {
        run_cancellable(self.begin("shutdown", &request.id, ""), async {
            // Ignores `now`, like Go's shim: the end of a shim would end its containers.
            self.containers.shut_down();
            Ok(Empty::new())
        })
        .await
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: CheckpointTaskRequest,
    ) -> TtrpcResult<Empty> {
        let containers = Arc::clone(&self.containers);
        run_to_end(self.begin("checkpoint", &request.id, ""), async move {
            containers.find(&request.id)?.checkpoint(request).await?;
            Ok(Empty::new())
        })
        .await
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> TtrpcResult<StatsResponse> {
        run_cancellable(self.begin("stats", &request.id, ""), async {
            let stats = self.containers.find(&request.id)?.stats()?;
            Ok(StatsResponse {
                stats: MessageField::some(stats),
                ..Default::default()
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::TaskEvents;
    use crate::exits::Exits;
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
}
