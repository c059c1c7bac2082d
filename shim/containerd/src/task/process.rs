//! A process under the shim: a container's init or an exec. Its life is a pure state machine:
//!
//! ```text
//!  Created ──started──► Running ──pausing──► Pausing ──paused──► Paused
//!     │                   │ ▲                  │ │                │ │
//!     │                   │ └─────resumed──────┘─┼────────────────┘ │
//!     ├──────exited───────┴───────exited─────────┴──────────────────┘──► Stopped ──deleted──► Deleted
//!     └──failed to start──► NotStarted ──deleted──► Deleted
//! ```
//! An enum, a method per event, an error for invalid moves. No method makes a system call or sends
//! an event: the caller has just seen the event.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use containerd_shim_protos::types::task::Status;
use tokio::sync::watch;

use crate::blocking::lock;
use crate::exits::{Exit, Watched};
use crate::io::{RunningIo, Streams};

/// The state of a process. The locks inside are held for a read or write only.
#[derive(Debug)]
pub struct TaskProcess {
    /// Its name in events: the container's id for an init, else the exec's.
    pub id: String,
    /// containerd's paths for its streams.
    pub streams: Streams,
    life: Mutex<Life>,
    exit: watch::Sender<Option<Exit>>,
}

#[derive(Debug)]
struct Life {
    state: ProcessState,
    pid: u32,
    watched: Option<Arc<Watched>>,
    attached: Option<Arc<RunningIo>>,
}

impl TaskProcess {
    /// A process that has only a name yet.
    pub fn new(id: String, streams: Streams) -> Self {
        let life = Life {
            state: ProcessState::Created,
            pid: 0,
            watched: None,
            attached: None,
        };
        Self {
            id,
            streams,
            life: Mutex::new(life),
            exit: watch::Sender::new(None),
        }
    }

    pub fn state(&self) -> ProcessState {
        self.life().state
    }

    /// The pid; 0 before the start. It stays after the process's end.
    pub fn pid(&self) -> u32 {
        self.life().pid
    }

    /// Records that the kernel has a process for it now.
    pub fn set_running_process(&self, watched: Arc<Watched>, attached: RunningIo) {
        let mut life = self.life();
        life.pid = watched.pid;
        life.watched = Some(watched);
        life.attached = Some(Arc::new(attached));
    }

    /// Changes the state, if the move allows it.
    pub fn advance(
        &self,
        event: impl FnOnce(ProcessState) -> Result<ProcessState, IllegalMove>,
    ) -> Result<(), IllegalMove> {
        let mut life = self.life();
        life.state = event(life.state)?;
        Ok(())
    }

    /// Records the end, or that the start failed, and wakes all waiters.
    pub fn finish(
        &self,
        event: impl FnOnce(ProcessState) -> Result<ProcessState, IllegalMove>,
        exit: Exit,
    ) {
        if let Err(illegal) = self.advance(event) {
            tracing::error!(id = self.id, "{illegal}");
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// Known, but its program does not run yet.
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

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::NotStarted => "not started, because its start failed",
            Self::Deleted => "deleted",
        })
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
