//! A container and its processes, from `Create` to `Delete`.
//!
//! Three rules keep answers and events in order. A task locks `turn` before a runtime call that
//! changes the init, and unlocks `turn` after queueing the event. The init's end waits for the lock:
//! so TaskStart comes before TaskExit even if the program ends at once. An init's exit is published
//! only after the exits of the execs. The exit is also published only after signals to the init are
//! answered, because containerd deletes an exited container and hangs up. Signals do not lock
//! `turn`: a signal may be needed to end a call that hangs. Queries (`State`, `Wait`, `Pids`) do not
//! lock `turn` either, and never wait for the runtime.

mod create;
mod lifecycle;
mod process;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use containerd_shim_protos::api::StateResponse;
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::types::task::ProcessInfo;
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};

use crate::blocking::lock;
use crate::bundle::Bundle;
use crate::cgroup::Cgroup;
use crate::events::{TaskEvents, timestamp};
use crate::exits::{Exit, Exits};
use crate::io::{LoggedProcess, PreparedIo, StreamOwner};
use crate::options::OptionsError;
use crate::runtime::{Runtime, RuntimeError};
use crate::step::{StepError, failed};
use create::Restoration;
use lifecycle::Exec;
use process::ProcessState;

pub use create::{end_pod, roll_back};
pub use process::{IllegalMove, TaskProcess};

/// The state shared by all tasks of the shim.
#[derive(Debug, Clone)]
pub struct SharedState {
    /// containerd's namespace.
    pub namespace: String,
    pub events: TaskEvents,
    pub exits: Arc<Exits>,
}

pub struct Task {
    id: String,
    bundle: Bundle,
    runtime: Runtime,
    owner: StreamOwner,
    /// True if the container has no pid namespace of its own: its processes may outlive the init.
    outlives_init: bool,
    init: Arc<TaskProcess>,
    /// Present while the container waits to be restored.
    restoration: Mutex<Option<Restoration>>,
    /// Found when the init was created; it stays readable when the init is dead.
    cgroup: OnceLock<Cgroup>,
    execs: Mutex<HashMap<String, Arc<Exec>>>,
    turn: tokio::sync::Mutex<()>,
    /// Read while the init is being signalled.
    signals: tokio::sync::RwLock<()>,
    delete_turn: tokio::sync::Mutex<()>,
    /// True if the runtime ended the init for a delete. No program ran, so there is no exit to
    /// report.
    deleted_unstarted: AtomicBool,
    shared: SharedState,
}

/// A request that a task could not complete.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No container or process of that name exists, or not any more.
    #[error("{0}: not found")]
    NotFound(String),
    #[error("id {0}: already exists")]
    AlreadyExists(String),
    #[error("{0}")]
    Invalid(String),
    /// The request is not allowed in this state.
    #[error(transparent)]
    Illegal(#[from] IllegalMove),
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// A request to the system, a stream, a file of the bundle, the root filesystem.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The runtime, at a checkpoint; criu's own log has the details.
    #[error("OCI runtime checkpoint failed: {source} path= {log}", log = .log.display())]
    Checkpoint { source: RuntimeError, log: PathBuf },
    /// The runtime; containerd's users know the text before its own.
    #[error("OCI runtime {stage} failed: {source}")]
    Runtime {
        stage: &'static str,
        source: RuntimeError,
    },
}

impl TaskError {
    fn runtime(stage: &'static str) -> impl Fn(RuntimeError) -> Self {
        move |source| Self::Runtime { stage, source }
    }
}

impl Task {
    fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Exec>>> {
        lock(&self.execs)
    }

    fn exec(&self, exec_id: &str) -> Result<Arc<Exec>, TaskError> {
        self.execs()
            .get(exec_id)
            .cloned()
            .ok_or_else(|| TaskError::NotFound(format!("process does not exist {exec_id}")))
    }

    /// The init where the exec id is empty, as in containerd's requests.
    pub fn process(&self, exec_id: &str) -> Result<Arc<TaskProcess>, TaskError> {
        match exec_id {
            "" => Ok(Arc::clone(&self.init)),
            _ => Ok(Arc::clone(&self.exec(exec_id)?.process)),
        }
    }

    async fn open_streams(&self, process: &TaskProcess) -> Result<PreparedIo, StepError> {
        let logged = LoggedProcess {
            id: &process.id,
            namespace: &self.shared.namespace,
            exits: &self.shared.exits,
        };
        PreparedIo::open(&process.streams, self.owner, logged).await
    }
}

impl Task {
    /// The state of a process.
    pub fn state(&self, exec_id: &str) -> Result<StateResponse, TaskError> {
        let process = self.process(exec_id)?;
        let streams = &process.streams;
        let state = process.state();
        // containerd expects no status of a process that is CREATED.
        let exit = process.exit().filter(|_| state != ProcessState::NotStarted);
        Ok(StateResponse {
            id: process.id.clone(),
            bundle: self.bundle.path.display().to_string(),
            pid: process.pid(),
            status: EnumOrUnknown::new(state.within(self.init.state()).status()),
            stdin: streams.stdin.clone(),
            stdout: streams.stdout.clone(),
            stderr: streams.stderr.clone(),
            terminal: streams.terminal,
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map(|exit| timestamp(exit.at)).unwrap_or_default(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        })
    }

    /// A line for the container, and for each exec.
    pub fn describe(&self) -> Vec<String> {
        let line = |name: String, process: &TaskProcess, turn: &tokio::sync::Mutex<()>| {
            let state = process.state().within(self.init.state());
            let is_busy = if turn.try_lock().is_ok() {
                ""
            } else {
                ", a call changes it"
            };
            format!("{name}: {state}, pid {}{is_busy}", process.pid())
        };
        let name = format!("container {}", self.id);
        let mut lines = vec![line(name, &self.init, &self.turn)];
        for (exec_id, exec) in &*self.execs() {
            let name = format!("exec {exec_id} of {}", self.id);
            lines.push(line(name, &exec.process, &exec.turn));
        }
        lines
    }

    pub fn pid(&self) -> u32 {
        self.init.pid()
    }

    /// True if a process of it still runs, or could be started.
    pub fn is_alive(&self) -> bool {
        self.init.state().is_alive()
    }

    /// True while its program runs or is paused.
    pub fn runs(&self) -> bool {
        let state = self.init.state();
        state.is_alive() && state != ProcessState::Created
    }

    /// True if its program does not run, and containerd removed its bundle.
    pub fn is_abandoned(&self) -> bool {
        !self.runs() && self.bundle.is_gone()
    }

    /// All processes of the container, those of execs by name.
    ///
    /// A restarted containerd calls this first, and serves no client before the answer. It treats a
    /// container without processes as leaked: containerd kills the shim, and the exit status of a just
    /// stopped container is lost. So a stopped init is still listed until its deletion. If the runtime
    /// fails or hangs, the answer has the processes that the shim itself started.
    pub async fn pids(&self) -> Result<Vec<ProcessInfo>, TaskError> {
        if !self.is_alive() {
            if self.init.state() == ProcessState::Deleted {
                return Err(TaskError::NotFound(format!("container {}", self.id)));
            }
            return Ok(vec![ProcessInfo {
                pid: self.pid(),
                ..Default::default()
            }]);
        }
        let listed = self.runtime.pids().await;
        // Only of running execs: the kernel may have reused the pid of an ended exec.
        let mut names = HashMap::new();
        for (exec_id, exec) in &*self.execs() {
            if let Some(watched) = exec.process.watched()
                && !watched.has_ended()
            {
                names.insert(exec.process.pid(), exec_id.clone());
            }
        }
        let pids = match listed {
            Ok(pids) => pids,
            Err(error) if self.pid() == 0 => return Err(TaskError::runtime("ps")(error)),
            Err(error) => {
                let id = &self.id;
                tracing::warn!(id, %error, "only the init and the execs are listed: runtime ps");
                let mut started = vec![self.pid()];
                started.extend(names.keys());
                started
            }
        };
        let mut processes = Vec::new();
        for pid in pids {
            let mut process = ProcessInfo {
                pid,
                ..Default::default()
            };
            if let Some(exec_id) = names.get(&pid) {
                let details = ProcessDetails {
                    exec_id: exec_id.clone(),
                    ..Default::default()
                };
                process.info = MessageField::some(Any {
                    type_url: "containerd.runc.v1.ProcessDetails".to_owned(),
                    value: details.write_to_bytes().map_err(invalid)?,
                    ..Default::default()
                });
            }
            processes.push(process);
        }
        Ok(processes)
    }

    /// The resource usage of the container's cgroup, also after the init's end, until the cgroup is
    /// removed.
    pub fn stats(&self) -> Result<Any, TaskError> {
        let metrics = self.cgroup.get().and_then(Cgroup::metrics);
        metrics.ok_or_else(|| TaskError::NotFound(format!("cgroup of container {}", self.id)))
    }

    /// Closes a process's stdin.
    pub fn close_stdin(&self, exec_id: &str) -> Result<(), TaskError> {
        if let Some(attached) = self.process(exec_id)?.attached() {
            attached.close_stdin();
        }
        Ok(())
    }

    /// Sets the size of a process's terminal.
    pub fn resize(&self, exec_id: &str, columns: u32, rows: u32) -> Result<(), TaskError> {
        if let Some(attached) = self.process(exec_id)?.attached() {
            // The kernel's sizes have 16 bits; Go's shim also drops the higher bits.
            attached
                .resize(columns as u16, rows as u16)
                .map_err(failed("set the terminal's size"))?;
        }
        Ok(())
    }

    /// Waits for a process: the init if the exec id is empty.
    pub async fn wait(self: Arc<Self>, exec_id: &str) -> Result<Exit, TaskError> {
        let process = self.process(exec_id)?;
        drop(self);
        let exit = process.wait().await;
        exit.ok_or_else(|| TaskError::NotFound(format!("process {exec_id}")))
    }
}

fn invalid(error: protobuf::Error) -> TaskError {
    TaskError::Invalid(error.to_string())
}
