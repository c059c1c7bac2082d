//! `Kill`: any signal to the init, to the whole container, or to an exec.
//!
//! The runtime signals an init, because it handles a frozen container, or a container without a pid
//! namespace. The shim signals an exec through its pidfd. The kernel reports that a process has
//! ended; the runtime's text is never parsed for it.

use nix::libc::ESRCH;

use super::state::ProcessState;
use super::{Task, TaskError, TaskProcess};
use crate::step::failed;

impl Task {
    /// Sends the signal.
    pub(crate) async fn kill(
        &self,
        exec_id: &str,
        signal: u32,
        all: bool,
    ) -> Result<(), TaskError> {
        match exec_id {
            "" => self.kill_init(signal, all).await,
            _ => kill_exec(&*self.process(exec_id)?, signal),
        }
    }

    async fn kill_init(&self, signal: u32, all: bool) -> Result<(), TaskError> {
        if self.init.state() == ProcessState::Created && self.init.watched().is_none() {
            // While criu restores the container there is no process to signal yet.
            drop(self.turn.lock().await);
        }
        let _signal = self.signals.read().await;
        if self.init.state() == ProcessState::Deleted {
            return Err(finished(&self.init));
        }
        // `all` also reaches processes that an init left, so a stopped init is no reason to refuse
        // it.
        if !all && has_ended(&self.init) {
            return Err(finished(&self.init));
        }
        match self.runtime.kill(&self.id, signal, all).await {
            Err(_) if has_ended(&self.init) => Err(finished(&self.init)),
            result => result.map_err(TaskError::runtime("kill")),
        }
    }
}

fn kill_exec(process: &TaskProcess, signal: u32) -> Result<(), TaskError> {
    let Some(watched) = process.watched() else {
        return match process.state() {
            state @ (ProcessState::Created | ProcessState::NotStarted) => Err(super::IllegalMove {
                verb: "kill",
                state,
            }
            .into()),
            ProcessState::Running
            | ProcessState::Pausing
            | ProcessState::Paused
            | ProcessState::Stopped
            | ProcessState::Deleted => Err(finished(process)),
        };
    };
    let number =
        i32::try_from(signal).map_err(|_| TaskError::Invalid(format!("signal {signal}")))?;
    match watched.signal(number) {
        Err(error) if error.raw_os_error() == Some(ESRCH) => Err(finished(process)),
        result => Ok(result.map_err(failed(format!("signal process {}", watched.pid())))?),
    }
}

fn has_ended(process: &TaskProcess) -> bool {
    process.watched().is_none_or(|watched| watched.has_ended())
}

fn finished(process: &TaskProcess) -> TaskError {
    tracing::debug!(id = process.id(), "signalled after its end");
    TaskError::NotFound("process already finished".to_owned())
}
