//! A container and its processes, from `Create` to `Delete`.
//!
//! Three rules keep answers and events in order. A task locks `turn` before a runtime call that
//! changes the init, and unlocks `turn` after queueing the event. The init's end waits for the lock:
//! so TaskStart comes before TaskExit even if the program ends at once. An init's exit is published
//! only after the exits of the execs. The exit is also published only after signals to the init are
//! answered, because containerd deletes an exited container and hangs up. Signals do not lock
//! `turn`: a signal may be needed to end a call that hangs. Queries (`State`, `Wait`, `Pids`) do not
//! lock `turn` either, and never wait for the runtime.

mod checkpoint;
mod create;
mod exit;
mod process;
mod queries;
mod start;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

pub use create::{end_pod, roll_back};
pub use process::{IllegalMove, TaskProcess};

use crate::blocking::lock;
use crate::bundle::Bundle;
use crate::cgroup::Cgroup;
use crate::events::TaskEvents;
use crate::exits::Exits;
use crate::io::{LoggedProcess, PreparedIo, StreamOwner};
use crate::options::OptionsError;
use crate::runtime::{Runtime, RuntimeError};
use crate::step::StepError;
use checkpoint::Restoration;
use start::Exec;

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
