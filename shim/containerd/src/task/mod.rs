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

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use containerd_shim_protos::api::StateResponse;
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::types::task::{ProcessInfo, Status};
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};
use tokio::sync::watch;

use crate::bundle::{Bundle, OptionsError};
use crate::cgroup::Cgroup;
use crate::events::{TaskEvents, timestamp};
use crate::exits::{Exit, Exits, Watched};
use crate::io::{LoggedProcess, PreparedIo, RunningIo, StreamOwner, Streams};
use crate::runtime::{Runtime, RuntimeError};
use crate::work::{StepError, failed, lock};
use lifecycle::Exec;

pub use create::{end_pod, roll_back};

/// The state shared by all tasks of the shim.
#[derive(Clone)]
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

/// The parameters that are kept from the `Create` to the `Start` of a container to restore.
struct Restoration {
    images: String,
    parent: String,
    prepared_io: PreparedIo,
}

pub type Result<T, E = TaskError> = std::result::Result<T, E>;

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

    fn exec(&self, exec_id: &str) -> Result<Arc<Exec>> {
        self.execs()
            .get(exec_id)
            .cloned()
            .ok_or_else(|| TaskError::NotFound(format!("process does not exist {exec_id}")))
    }

    /// The init where the exec id is empty, as in containerd's requests.
    pub fn process(&self, exec_id: &str) -> Result<Arc<TaskProcess>> {
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
    pub fn state(&self, exec_id: &str) -> Result<StateResponse> {
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
    pub async fn pids(&self) -> Result<Vec<ProcessInfo>> {
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
                log::warn!(id:%, error:%; "only the init and the execs are listed: runtime ps");
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
    pub fn stats(&self) -> Result<Any> {
        let metrics = self.cgroup.get().and_then(Cgroup::metrics);
        metrics.ok_or_else(|| TaskError::NotFound(format!("cgroup of container {}", self.id)))
    }

    /// Closes a process's stdin.
    pub fn close_stdin(&self, exec_id: &str) -> Result<()> {
        if let Some(attached) = self.process(exec_id)?.attached() {
            attached.close_stdin();
        }
        Ok(())
    }

    /// Sets the size of a process's terminal.
    pub fn resize(&self, exec_id: &str, columns: u32, rows: u32) -> Result<()> {
        if let Some(attached) = self.process(exec_id)?.attached() {
            // The kernel's sizes have 16 bits; Go's shim also drops the higher bits.
            attached
                .resize(columns as u16, rows as u16)
                .map_err(failed("set the terminal's size"))?;
        }
        Ok(())
    }

    /// Waits for a process: the init if the exec id is empty.
    pub async fn wait(self: Arc<Self>, exec_id: &str) -> Result<Exit> {
        let process = self.process(exec_id)?;
        drop(self);
        let exit = process.wait().await;
        exit.ok_or_else(|| TaskError::NotFound(format!("process {exec_id}")))
    }
}

fn invalid(error: protobuf::Error) -> TaskError {
    TaskError::Invalid(error.to_string())
}

/// The state of a process. The locks inside are held for a read or write only.
pub struct TaskProcess {
    /// Its name in events: the container's id for an init, else the exec's.
    pub id: String,
    /// containerd's paths for its streams.
    pub streams: Streams,
    life: Mutex<Life>,
    exit: watch::Sender<Option<Exit>>,
}

#[derive(Default)]
struct Life {
    state: ProcessState,
    /// Stays after the process's end.
    watched: Option<Arc<Watched>>,
    attached: Option<Arc<RunningIo>>,
}

impl TaskProcess {
    /// A process that has only a name yet.
    pub fn new(id: String, streams: Streams) -> Self {
        Self {
            id,
            streams,
            life: Mutex::default(),
            exit: watch::Sender::default(),
        }
    }

    pub fn state(&self) -> ProcessState {
        self.life().state
    }

    /// The pid; 0 before the start.
    pub fn pid(&self) -> u32 {
        let life = self.life();
        life.watched.as_ref().map_or(0, |watched| watched.pid)
    }

    /// Records that the kernel has a process for it now.
    pub fn set_running_process(&self, watched: Arc<Watched>, attached: RunningIo) {
        let mut life = self.life();
        life.watched = Some(watched);
        life.attached = Some(Arc::new(attached));
    }

    /// Changes the state, if the move allows it.
    pub fn advance(&self, event: impl FnOnce(ProcessState) -> Move) -> Result<(), IllegalMove> {
        let mut life = self.life();
        life.state = event(life.state)?;
        Ok(())
    }

    /// Records the end, or that the start failed, and wakes all waiters.
    pub fn finish(&self, event: impl FnOnce(ProcessState) -> Move, exit: Exit) {
        if let Err(illegal) = self.advance(event) {
            log::error!(id:% = self.id; "{illegal}");
        }
        self.exit.send_replace(Some(exit));
    }

    /// The exit, if the process has ended.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits for the end. None: the process was deleted without ever having run.
    pub async fn wait(self: Arc<Self>) -> Option<Exit> {
        let mut exit = self.exit.subscribe();
        // Only the channel is kept: a waiter must not keep a deleted process alive.
        drop(self);
        *exit.wait_for(Option::is_some).await.ok()?
    }

    /// The kernel's process, while it may be signalled.
    pub fn watched(&self) -> Option<Arc<Watched>> {
        let life = self.life();
        life.watched.clone().filter(|_| life.state.is_alive())
    }

    /// The streams of a process that has been started.
    pub fn attached(&self) -> Option<Arc<RunningIo>> {
        self.life().attached.clone()
    }

    /// Closes its streams.
    pub fn detach(&self) {
        self.life().attached = None;
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.life)
    }
}

/// The state of a process, init or exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum ProcessState {
    /// Known, but its program does not run yet.
    #[default]
    Created,
    Running,
    /// The runtime freezes it; an init only.
    Pausing,
    /// Frozen; an init only.
    Paused,
    /// Has exited, its status is kept.
    Stopped,
    /// The start of an exec failed, so it never had a process. containerd sees CREATED, as from
    /// Go's shim.
    #[strum(to_string = "not started, because its start failed")]
    NotStarted,
    /// Removed; the name may be used again.
    Deleted,
}

/// A move that the life of a process does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot {verb} a process that is {state}")]
pub struct IllegalMove {
    pub verb: &'static str,
    pub state: ProcessState,
}

type Move = Result<ProcessState, IllegalMove>;

impl ProcessState {
    fn to(self, next: Self, verb: &'static str, from: &[Self]) -> Move {
        if from.contains(&self) {
            Ok(next)
        } else {
            Err(IllegalMove { verb, state: self })
        }
    }

    pub fn started(self) -> Move {
        self.to(Self::Running, "start", &[Self::Created])
    }

    pub fn failed_to_start(self) -> Move {
        self.to(Self::NotStarted, "start", &[Self::Created])
    }

    /// The container is about to be frozen.
    pub fn pausing(self) -> Move {
        self.to(Self::Pausing, "pause", &[Self::Running])
    }

    pub fn paused(self) -> Move {
        self.to(Self::Paused, "pause", &[Self::Pausing])
    }

    /// The container was thawed, or could not be frozen.
    pub fn resumed(self) -> Move {
        self.to(Self::Running, "resume", &[Self::Pausing, Self::Paused])
    }

    /// The process ended. The kernel does this in any state in which there is a process.
    pub fn exited(self) -> Move {
        let alive = [Self::Created, Self::Running, Self::Pausing, Self::Paused];
        self.to(Self::Stopped, "exit", &alive)
    }

    /// The process's remains were removed. A container that was only created may be deleted as
    /// well: the runtime then ends its init.
    pub fn deleted(self) -> Move {
        let ended = [Self::Created, Self::Stopped, Self::NotStarted];
        self.to(Self::Deleted, "delete", &ended)
    }

    /// True if there is a process that can be signalled or entered.
    pub fn is_alive(self) -> bool {
        self.exited().is_ok()
    }

    /// Fails unless processes may be added to a container whose init is in this state.
    pub fn admits_exec(self) -> Move {
        self.to(self, "exec in", &[Self::Created, Self::Running])
    }

    /// Fails unless a container whose init is in this state may be written to a checkpoint.
    pub fn admits_checkpoint(self) -> Move {
        self.to(self, "checkpoint", &[Self::Running, Self::Paused])
    }

    /// The state as seen from outside: a running process in a frozen container is frozen with it.
    pub fn within(self, init: Self) -> Self {
        match (self, init) {
            (Self::Running, Self::Pausing | Self::Paused) => init,
            (own, _) => own,
        }
    }

    /// The state in containerd's API.
    pub fn status(self) -> Status {
        match self {
            Self::Created | Self::NotStarted => Status::CREATED,
            Self::Running => Status::RUNNING,
            Self::Pausing => Status::PAUSING,
            Self::Paused => Status::PAUSED,
            Self::Stopped | Self::Deleted => Status::STOPPED,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn all_waiters_get_the_exit() {
        let process = Arc::new(TaskProcess::new("p".into(), Streams::default()));
        let early = tokio::spawn(Arc::clone(&process).wait());
        tokio::task::yield_now().await;
        let exit = Exit {
            status: 3,
            at: SystemTime::now(),
        };
        process.finish(ProcessState::exited, exit);
        assert_eq!(early.await.unwrap(), Some(exit));
        assert_eq!(Arc::clone(&process).wait().await, Some(exit));
        assert_eq!(process.state(), ProcessState::Stopped);
    }

    #[tokio::test]
    async fn a_wait_ends_when_the_process_is_deleted_before_it_ran() {
        let process = Arc::new(TaskProcess::new("p".into(), Streams::default()));
        let waiting = tokio::spawn(Arc::clone(&process).wait());
        tokio::task::yield_now().await;
        drop(process);
        assert_eq!(waiting.await.unwrap(), None);
    }

    type Event = fn(ProcessState) -> Result<ProcessState, IllegalMove>;
    const EVENTS: [Event; 7] = [
        ProcessState::started,
        ProcessState::failed_to_start,
        ProcessState::pausing,
        ProcessState::paused,
        ProcessState::resumed,
        ProcessState::exited,
        ProcessState::deleted,
    ];

    #[test]
    fn a_common_life() {
        let state = ProcessState::Created.started().unwrap();
        let state = state
            .pausing()
            .unwrap()
            .paused()
            .unwrap()
            .resumed()
            .unwrap();
        assert_eq!(state.exited().unwrap().deleted(), Ok(ProcessState::Deleted));
    }

    #[test]
    fn a_failed_start_is_final_and_reads_as_created() {
        let state = ProcessState::Created.failed_to_start().unwrap();
        assert_eq!(state.status(), Status::CREATED);
        assert!(!state.is_alive() && state.started().is_err() && state.exited().is_err());
        assert_eq!(state.deleted(), Ok(ProcessState::Deleted));
    }

    #[test]
    fn an_exec_is_frozen_with_its_container() {
        assert_eq!(
            ProcessState::Running.within(ProcessState::Paused),
            ProcessState::Paused
        );
        assert_eq!(
            ProcessState::Stopped.within(ProcessState::Paused),
            ProcessState::Stopped
        );
        assert_eq!(
            ProcessState::Running.within(ProcessState::Running),
            ProcessState::Running
        );
    }

    #[test]
    fn a_refusal_names_the_verb_and_the_state() {
        let refused = ProcessState::Running.deleted().unwrap_err();
        assert_eq!(
            refused.to_string(),
            "cannot delete a process that is running"
        );
    }

    proptest! {
        /// For any sequence of events: a process exits at most once, nothing runs after the exit,
        /// and Deleted is final.
        #[test]
        fn a_process_exits_once_and_deleted_is_final(events in prop::collection::vec(0..EVENTS.len(), 0..40)) {
            let mut state = ProcessState::Created;
            let mut exits = 0;
            for event in events {
                let before = state;
                let Ok(after) = EVENTS[event](before) else { continue };
                prop_assert_ne!(before, ProcessState::Deleted);
                if matches!(before, ProcessState::Stopped | ProcessState::NotStarted) {
                    prop_assert_eq!(after, ProcessState::Deleted);
                }
                exits += u32::from(after == ProcessState::Stopped);
                state = after;
            }
            prop_assert!(exits <= 1);
        }

        /// Exactly the living processes can exit.
        #[test]
        fn only_a_living_process_can_exit(event in 0..EVENTS.len()) {
            for state in [ProcessState::Created, ProcessState::Running, ProcessState::Pausing, ProcessState::Paused, ProcessState::Stopped, ProcessState::NotStarted, ProcessState::Deleted] {
                prop_assert_eq!(state.exited().is_ok(), state.is_alive());
                if let Ok(next) = EVENTS[event](state) { prop_assert_ne!(next, state); }
            }
        }
    }
}
