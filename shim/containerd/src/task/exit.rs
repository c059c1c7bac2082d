//! The end of a process, from the kernel's report to containerd's event.

use std::sync::Arc;
use std::time::Duration;

use bindguard_core::error_chain;
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use nix::libc::SIGKILL;

use super::exec::Exec;
use super::state::ProcessState;
use super::{Task, TaskProcess};
use crate::cgroup::OomWatch;
use crate::events::timestamp;
use crate::exits::{Exit, Watched};

/// The time limit for which an init's exit waits for the exits of execs. The execs are dead or
/// dying by then: only an exec that hangs in the kernel can take longer.
const EXECS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the runtime's answer to a signal. The init has ended, so only a runtime that
/// hangs takes that long.
const SIGNALS_LIMIT: Duration = Duration::from_secs(10);

impl Task {
    /// Waits for the init in a task of its own.
    pub(super) fn await_init(self: &Arc<Self>, watched: Arc<Watched>) {
        let task = Arc::clone(self);
        tokio::spawn(async move {
            let exit = task.end_of_init(&watched).await;
            if task.outlives_init {
                task.kill_remaining_processes().await;
            }
            if tokio::time::timeout(EXECS_LIMIT, task.execs_ended())
                .await
                .is_err()
            {
                tracing::warn!(id = task.id, "an exec outlives its container's init");
            }
            // A start or signal of the init that is in progress is answered first.
            let _turn = task.turn.lock().await;
            if tokio::time::timeout(SIGNALS_LIMIT, task.signals.write())
                .await
                .is_err()
            {
                tracing::warn!(
                    id = task.id,
                    "the runtime hangs with a signal to an init that has ended"
                );
            }
            if task.is_deleted_unstarted() {
                task.init.finish(ProcessState::exited, exit);
            } else {
                task.publish_exit(&task.init, exit);
            }
        });
    }

    /// Waits for the init and reports out-of-memory kills up to the end.
    async fn end_of_init(&self, watched: &Watched) -> Exit {
        let Some(mut ooms) = self.watch_oom() else {
            return watched.exit().await;
        };
        let exit = loop {
            tokio::select! {
                exit = watched.exit() => break exit,
                true = ooms.next() => self.publish_oom(),
            }
        };
        if ooms.take_unreported() {
            self.publish_oom();
        }
        exit
    }

    fn watch_oom(&self) -> Option<OomWatch> {
        match self.cgroup.get()?.watch_oom() {
            Ok(ooms) => Some(ooms),
            Err(error) => {
                // The node has no memory controller, or the init is gone already.
                tracing::debug!(
                    id = self.id,
                    error = error_chain(&error),
                    "out-of-memory kills will not be reported"
                );
                None
            }
        }
    }

    fn publish_oom(&self) {
        let killed = proto::TaskOOM {
            container_id: self.id.clone(),
            ..Default::default()
        };
        self.shared
            .events
            .send(topics::TASK_OOM_EVENT_TOPIC, &killed);
    }

    /// Waits for an exec in a task of its own.
    pub(super) fn await_exec(self: &Arc<Self>, process: Arc<TaskProcess>, watched: Arc<Watched>) {
        let task = Arc::clone(self);
        tokio::spawn(async move {
            let exit = watched.exit().await;
            task.publish_exit(&process, exit);
        });
    }

    fn publish_exit(&self, process: &TaskProcess, exit: Exit) {
        process.finish(ProcessState::exited, exit);
        self.shared.events.send(
            topics::TASK_EXIT_EVENT_TOPIC,
            &proto::TaskExit {
                container_id: self.id.clone(),
                id: process.id().to_owned(),
                pid: process.pid(),
                exit_status: exit.status,
                exited_at: timestamp(exit.at),
                ..Default::default()
            },
        );
    }

    /// Without its own pid namespace the container's other processes continue to run.
    async fn kill_remaining_processes(&self) {
        let kill = self.runtime.kill(&self.id, SIGKILL.unsigned_abs(), true);
        match tokio::time::timeout(SIGNALS_LIMIT, kill).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(id = self.id, %error, "kill what the init left"),
            Err(_) => tracing::warn!(id = self.id, "the runtime hangs killing what the init left"),
        }
    }

    async fn execs_ended(&self) {
        let execs: Vec<Arc<Exec>> = self.execs().values().cloned().collect();
        for exec in execs {
            // The delete of an ended exec, which drains its output, does not delay the init's exit.
            if exec.process.exit().is_some() {
                continue;
            }
            // After its turn, an exec whose start was in progress has started or has failed.
            drop(exec.turn.lock().await);
            if exec.process.watched().is_some() {
                Arc::clone(&exec.process).wait().await;
            }
        }
    }
}
