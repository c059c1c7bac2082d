//! Read-only queries about a task; they do not wait for the task's turn.

use std::collections::HashMap;
use std::sync::Arc;

use containerd_shim_protos::api::StateResponse;
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::types::task::ProcessInfo;
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};

use super::process::ProcessState;
use super::{Task, TaskError, TaskProcess};
use crate::events::timestamp;
use crate::step::failed;

impl Task {
    /// The state of a process.
    pub fn state(&self, exec_id: &str) -> Result<StateResponse, TaskError> {
        let process = self.process(exec_id)?;
        let streams = process.streams();
        let state = process.state();
        // containerd expects no status of a process that is CREATED.
        let exit = process.exit().filter(|_| state != ProcessState::NotStarted);
        Ok(StateResponse {
            id: process.id().to_owned(),
            bundle: self.bundle.path().display().to_string(),
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
        let line = |process: &TaskProcess| {
            format!(
                "{}, pid {}",
                process.state().within(self.init.state()),
                process.pid()
            )
        };
        let is_busy = |turn: &tokio::sync::Mutex<()>| match turn.try_lock() {
            Ok(_) => "",
            Err(_) => ", a call changes it",
        };
        let mut lines = vec![format!(
            "container {}: {}{}",
            self.id,
            line(&self.init),
            is_busy(&self.turn)
        )];
        let execs = self.execs();
        lines.extend(execs.values().map(|exec| {
            format!(
                "exec {} of {}: {}{}",
                exec.process.id(),
                self.id,
                line(&exec.process),
                is_busy(&exec.turn)
            )
        }));
        lines
    }

    /// The init's pid.
    pub fn pid(&self) -> u32 {
        self.init.pid()
    }

    /// True if a process of it still runs, or could be started.
    pub fn is_alive(&self) -> bool {
        self.init.state().is_alive()
    }

    /// True while its program runs or is paused.
    pub fn runs(&self) -> bool {
        match self.init.state() {
            ProcessState::Running | ProcessState::Pausing | ProcessState::Paused => true,
            ProcessState::Created
            | ProcessState::Stopped
            | ProcessState::NotStarted
            | ProcessState::Deleted => false,
        }
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
            return match self.init.state() {
                ProcessState::Deleted => Err(TaskError::NotFound(format!("container {}", self.id))),
                _ => Ok(vec![ProcessInfo {
                    pid: self.pid(),
                    ..Default::default()
                }]),
            };
        }
        let listed = self.runtime.pids(&self.id).await;
        let names = self.exec_names();
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
        pids.into_iter()
            .map(|pid| describe(pid, names.get(&pid)))
            .collect()
    }

    /// Only of running execs: the kernel may have reused the pid of an ended exec.
    fn exec_names(&self) -> HashMap<u32, String> {
        let execs = self.execs();
        let running = execs.values().filter(|exec| {
            exec.process
                .watched()
                .is_some_and(|watched| !watched.has_ended())
        });
        running
            .map(|exec| (exec.process.pid(), exec.process.id().to_owned()))
            .collect()
    }

    /// The resource usage of the container's cgroup, also after the init's end, until the cgroup is
    /// removed.
    pub fn stats(&self) -> Result<Any, TaskError> {
        let gone = || TaskError::NotFound(format!("cgroup of container {}", self.id));
        let metrics = self.cgroup.get().ok_or_else(gone)?.metrics();
        metrics
            .map_err(|error| TaskError::Invalid(error.to_string()))?
            .ok_or_else(gone)
    }

    /// Closes a process's stdin.
    pub fn close_stdin(&self, exec_id: &str) -> Result<(), TaskError> {
        if let Some(attached) = self.process(exec_id)?.attached() {
            attached.close_stdin();
        }
        Ok(())
    }

    /// Sets the size of a process's terminal. The kernel's sizes have 16 bits; Go's shim also drops
    /// the higher bits.
    pub fn resize(&self, exec_id: &str, columns: u32, rows: u32) -> Result<(), TaskError> {
        let [columns, rows] = [columns, rows].map(lower_half);
        let Some(attached) = self.process(exec_id)?.attached() else {
            return Ok(());
        };
        Ok(attached
            .resize(columns, rows)
            .map_err(failed("set the terminal's size"))?)
    }

    /// Waits for a process: the init if the exec id is empty.
    pub async fn wait(self: Arc<Self>, exec_id: &str) -> Result<crate::exits::Exit, TaskError> {
        let process = self.process(exec_id)?;
        drop(self);
        process
            .wait()
            .await
            .ok_or_else(|| TaskError::NotFound(format!("process {exec_id}")))
    }
}

fn lower_half(number: u32) -> u16 {
    let [low, high, ..] = number.to_le_bytes();
    u16::from_le_bytes([low, high])
}

fn describe(pid: u32, exec_id: Option<&String>) -> Result<ProcessInfo, TaskError> {
    let mut info = ProcessInfo {
        pid,
        ..Default::default()
    };
    if let Some(exec_id) = exec_id {
        let details = ProcessDetails {
            exec_id: exec_id.clone(),
            ..Default::default()
        };
        let value = details
            .write_to_bytes()
            .map_err(|error| TaskError::Invalid(error.to_string()))?;
        let type_url = "containerd.runc.v1.ProcessDetails".to_owned();
        info.info = MessageField::some(Any {
            type_url,
            value,
            ..Default::default()
        });
    }
    Ok(info)
}
