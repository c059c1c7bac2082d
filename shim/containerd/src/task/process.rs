//! A process under the shim: a container's init or an exec.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::state::{IllegalMove, ProcessState};
use crate::exits::{Exit, Watched};
use crate::io::{RunningIo, Streams};

/// The state of a process. The locks inside are held for a read or write only.
#[derive(Debug)]
pub(crate) struct TaskProcess {
    id: String,
    streams: Streams,
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
    pub(super) fn new(id: String, streams: Streams) -> Self {
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

    /// Its name in events: the container's id for an init, else the exec's.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// containerd's paths for its streams.
    pub(crate) fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Its state.
    pub(crate) fn state(&self) -> ProcessState {
        self.life().state
    }

    /// The pid; 0 before the start. It stays after the process's end.
    pub(crate) fn pid(&self) -> u32 {
        self.life().pid
    }

    /// Records that the kernel has a process for it now.
    pub(super) fn set_running_process(&self, watched: Arc<Watched>, attached: RunningIo) {
        let mut life = self.life();
        life.pid = watched.pid();
        life.watched = Some(watched);
        life.attached = Some(Arc::new(attached));
    }

    /// Changes the state, if the move allows it.
    pub(super) fn advance(
        &self,
        event: impl FnOnce(ProcessState) -> Result<ProcessState, IllegalMove>,
    ) -> Result<(), IllegalMove> {
        let mut life = self.life();
        life.state = event(life.state)?;
        Ok(())
    }

    /// Records the end, or that the start failed, and wakes all waiters.
    pub(super) fn finish(
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
    pub(crate) fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits for the end. None: the process was deleted without ever having run.
    pub(crate) async fn wait(self: Arc<Self>) -> Option<Exit> {
        let mut exit = self.exit.subscribe();
        // Only the channel is kept: a waiter must not keep a deleted process alive.
        drop(self);
        exit.wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|exit| *exit)
    }

    /// The kernel's process, while it may be signalled.
    pub(super) fn watched(&self) -> Option<Arc<Watched>> {
        let life = self.life();
        life.watched.clone().filter(|_| life.state.is_alive())
    }

    /// The streams of a process that has been started.
    pub(crate) fn attached(&self) -> Option<Arc<RunningIo>> {
        self.life().attached.clone()
    }

    /// Closes its streams.
    pub(super) fn detach(&self) {
        self.life().attached = None;
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

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
}
