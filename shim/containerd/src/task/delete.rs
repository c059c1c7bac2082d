//! `Delete`: of an init with its container, or of an exec.
//!
//! The output of a process is passed on before its delete is answered, because the client then
//! closes its side. An exec's end sends no TaskDelete: containerd would take that for the
//! container's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;

use super::exec::Exec;
use super::guard_settings::end_pod;
use super::state::ProcessState;
use super::{Task, TaskError, TaskProcess};
use crate::events::timestamp;
use crate::exits::Exit;
use crate::rootfs;

/// The time limit for the end of an init that was never started, after the runtime has killed it.
const KILLED_LIMIT: Duration = Duration::from_secs(5);

impl Task {
    /// Removes an exec, or the container. Returns the process, and its exit if the process ran.
    pub(crate) async fn delete(
        &self,
        exec_id: &str,
    ) -> Result<(Arc<TaskProcess>, Option<Exit>), TaskError> {
        let process = self.process(exec_id)?;
        match exec_id {
            "" => self.delete_init().await?,
            _ => self.delete_exec(self.exec(exec_id)?).await?,
        }
        let exit = process
            .exit()
            .filter(|_| !(exec_id.is_empty() && self.is_deleted_unstarted()));
        Ok((process, exit))
    }

    async fn delete_exec(&self, exec: Arc<Exec>) -> Result<(), TaskError> {
        let _turn = exec.turn.lock().await;
        exec.process.state().deleted()?;
        release(&exec.process).await;
        exec.process.advance(ProcessState::deleted)?;
        self.execs().remove(exec.process.id());
        Ok(())
    }

    async fn delete_init(&self) -> Result<(), TaskError> {
        let _turn = self.delete_turn.lock().await;
        if self.init.state() == ProcessState::Deleted {
            return Err(TaskError::NotFound(format!("container {}", self.id)));
        }
        if self.init.state() == ProcessState::Created {
            self.delete_unstarted().await?;
        }
        self.init.state().deleted()?;
        if self.init.state() == ProcessState::Stopped {
            release(&self.init).await;
            self.delete_from_runtime().await?;
        } else if self.init.watched().is_some() {
            let ended = Arc::clone(&self.init).wait();
            if tokio::time::timeout(KILLED_LIMIT, ended).await.is_err() {
                tracing::warn!(
                    id = self.id,
                    "an init that was never started outlives its container"
                );
            }
            release(&self.init).await;
        }
        rootfs::unmount(self.bundle.rootfs()).await?;
        // Before the answer: after it the kubelet removes the volumes. If the shim is killed here, the
        // command `delete` ends the pod.
        if let Ok(spec) = self.bundle.spec() {
            end_pod(&self.runtime, &self.id, &spec).await;
        }
        self.bundle.settle();
        self.init.advance(ProcessState::deleted)?;
        self.publish_deleted();
        Ok(())
    }

    /// A start in progress ends first: it decides whether the init has an exit to report.
    async fn delete_unstarted(&self) -> Result<(), TaskError> {
        let _turn = self.turn.lock().await;
        if self.init.state() != ProcessState::Created {
            return Ok(());
        }
        self.deleted_unstarted.store(true, Ordering::Relaxed);
        if let Err(error) = self.delete_from_runtime().await {
            self.deleted_unstarted.store(false, Ordering::Relaxed);
            return Err(error);
        }
        // A container that was never restored has no process.
        self.restoration().take();
        Ok(())
    }

    /// If the runtime no longer knows the container, there is nothing left to delete.
    async fn delete_from_runtime(&self) -> Result<(), TaskError> {
        match self.runtime.delete(&self.id).await {
            Err(error) if self.runtime.knows(&self.id) => Err(TaskError::runtime("delete")(error)),
            _ => Ok(()),
        }
    }

    /// True if the runtime ended the init for a delete. No program ran, so there is no exit to
    /// report.
    pub(super) fn is_deleted_unstarted(&self) -> bool {
        self.deleted_unstarted.load(Ordering::Relaxed)
    }

    fn publish_deleted(&self) {
        let exit = self.init.exit().filter(|_| !self.is_deleted_unstarted());
        self.shared.events.send(
            topics::TASK_DELETE_EVENT_TOPIC,
            &proto::TaskDelete {
                container_id: self.id.clone(),
                pid: self.init.pid(),
                exit_status: exit.map_or(0, |exit| exit.status),
                exited_at: exit.map(|exit| timestamp(exit.at)).unwrap_or_default(),
                ..Default::default()
            },
        );
    }
}

async fn release(process: &TaskProcess) {
    if let Some(attached) = process.attached() {
        attached.drained().await;
    }
    process.detach();
}
