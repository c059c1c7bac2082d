//! `Start` of an init, and of an exec; `Exec`, `Pause`, `Resume` and `Update`.

use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::fs;
use std::sync::Arc;
use std::time::SystemTime;

use bindguard_core::spec::RawObject;
use bindguard_sys::write_new_file;
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use nix::libc::SIGKILL;

use super::process::{ProcessState, TaskProcess};
use super::{Task, TaskError};
use crate::bundle::Bundle;
use crate::exits::{Exit, Watched};
use crate::io::Streams;
use crate::step::failed;

/// The status of an exec whose start failed, as of `runc exec`. A client that only waits must not
/// see success.
const NOT_STARTED: u32 = 255;

#[derive(Debug)]
pub struct Exec {
    pub process: Arc<TaskProcess>,
    /// The OCI process, as JSON.
    spec: Vec<u8>,
    /// Held while it is being started or deleted.
    pub turn: tokio::sync::Mutex<()>,
}

impl Task {
    /// Starts the init, or an exec; returns its pid.
    pub async fn start(self: &Arc<Self>, exec_id: &str) -> Result<u32, TaskError> {
        if !exec_id.is_empty() {
            return self.start_exec(self.exec(exec_id)?).await;
        }
        let _turn = self.turn.lock().await;
        self.init.state().started()?;
        let restored = self.restore().await?;
        if restored.is_none() {
            let started = self.runtime.start(&self.id).await;
            started.map_err(TaskError::runtime("start"))?;
        }
        self.init.advance(ProcessState::started)?;
        let pid = self.init.pid();
        self.shared.events.send(
            topics::TASK_START_EVENT_TOPIC,
            &proto::TaskStart {
                container_id: self.id.clone(),
                pid,
                ..Default::default()
            },
        );
        if let Some(watched) = restored {
            self.await_init(watched);
        }
        Ok(pid)
    }

    async fn start_exec(self: &Arc<Self>, exec: Arc<Exec>) -> Result<u32, TaskError> {
        let _turn = exec.turn.lock().await;
        exec.process.state().started()?;
        let watched = match self.create_exec(&exec).await {
            Ok(watched) => watched,
            Err(error) => {
                // All waiters get an end, but containerd gets no event: no process was started.
                let exit = Exit {
                    status: NOT_STARTED,
                    at: SystemTime::now(),
                };
                exec.process.finish(ProcessState::failed_to_start, exit);
                return Err(error);
            }
        };
        exec.process.advance(ProcessState::started)?;
        let pid = watched.pid;
        self.shared.events.send(
            topics::TASK_EXEC_STARTED_EVENT_TOPIC,
            &proto::TaskExecStarted {
                container_id: self.id.clone(),
                exec_id: exec.process.id.clone(),
                pid,
                ..Default::default()
            },
        );
        // Its end is waited for only now: however early it comes, it is reported after the start.
        self.await_exec(Arc::clone(&exec.process), watched);
        Ok(pid)
    }

    async fn create_exec(&self, exec: &Exec) -> Result<Arc<Watched>, TaskError> {
        self.init.state().admits_exec()?;
        let process = &exec.process;
        let prepared_io = self.open_streams(process).await?;
        let spec_file = self.bundle.exec_file(&process.id, "json");
        let pid_file = self.bundle.exec_file(&process.id, "pid");
        // its environment may have secrets
        write_new_file(&spec_file, &exec.spec, 0o600)
            .map_err(failed(format!("write {}", spec_file.display())))?;

        let pending = self.shared.exits.pending_process();
        let made = self
            .runtime
            .exec(&self.id, &spec_file, &pid_file, &prepared_io)
            .await;
        let pid = made
            .map_err(TaskError::runtime("exec"))
            .and_then(|()| Ok(Bundle::read_pid(&pid_file)?));
        let _ = fs::remove_file(&spec_file);
        let _ = fs::remove_file(&pid_file);

        let watched = Arc::new(pending.watch(pid?)?);
        match prepared_io.attach() {
            Ok(attached) => process.set_running_process(Arc::clone(&watched), attached),
            Err(error) => {
                // The client gets an error, so the process must not run. The orphans' reaper reaps
                // it.
                let _ = watched.signal(SIGKILL);
                return Err(error.into());
            }
        }
        Ok(watched)
    }

    /// Adds a process by name and queues the event for containerd. `Start` creates the process. Its
    /// description stays as containerd sent it, except that the request decides whether there is a
    /// terminal.
    pub fn add_exec(&self, request: ExecProcessRequest) -> Result<(), TaskError> {
        let exec_id = request.exec_id;
        // The id becomes part of file names in the bundle.
        if exec_id.is_empty() || exec_id.contains('/') {
            return Err(TaskError::Invalid(format!(
                "exec id {exec_id:?} is no name"
            )));
        }
        self.init.state().admits_exec()?;
        let spec = with_terminal(&request.spec.value, request.terminal)
            .map_err(|why| TaskError::Invalid(format!("process of exec {exec_id}: {why}")))?;
        let streams = Streams {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let exec = Exec {
            process: Arc::new(TaskProcess::new(exec_id.clone(), streams)),
            spec,
            turn: tokio::sync::Mutex::new(()),
        };
        match self.execs().entry(exec_id.clone()) {
            Entry::Occupied(_) => return Err(TaskError::AlreadyExists(exec_id)),
            Entry::Vacant(free) => free.insert(Arc::new(exec)),
        };
        self.shared.events.send(
            topics::TASK_EXEC_ADDED_EVENT_TOPIC,
            &proto::TaskExecAdded {
                container_id: self.id.clone(),
                exec_id,
                ..Default::default()
            },
        );
        Ok(())
    }

    /// Freezes the container.
    pub async fn pause(&self) -> Result<(), TaskError> {
        let _turn = self.turn.lock().await;
        self.init.advance(ProcessState::pausing)?;
        if let Err(error) = self.runtime.pause(&self.id).await {
            // A container that has ended meanwhile is not resumed.
            let _ = self.init.advance(ProcessState::resumed);
            return Err(TaskError::runtime("pause")(error));
        }
        self.init.advance(ProcessState::paused)?;
        let paused = proto::TaskPaused {
            container_id: self.id.clone(),
            ..Default::default()
        };
        let events = &self.shared.events;
        events.send(topics::TASK_PAUSED_EVENT_TOPIC, &paused);
        Ok(())
    }

    /// Thaws the container.
    pub async fn resume(&self) -> Result<(), TaskError> {
        let _turn = self.turn.lock().await;
        self.init.state().resumed()?;
        let resumed = self.runtime.resume(&self.id).await;
        resumed.map_err(TaskError::runtime("resume"))?;
        self.init.advance(ProcessState::resumed)?;
        let resumed = proto::TaskResumed {
            container_id: self.id.clone(),
            ..Default::default()
        };
        let events = &self.shared.events;
        events.send(topics::TASK_RESUMED_EVENT_TOPIC, &resumed);
        Ok(())
    }

    /// Changes the container's limits; `resources` is an OCI LinuxResources as JSON.
    pub async fn update(&self, resources: &[u8]) -> Result<(), TaskError> {
        let file = self.bundle.path.join("update-resources.json");
        let _turn = self.turn.lock().await;
        write_new_file(&file, resources, 0o600)
            .map_err(failed(format!("write {}", file.display())))?;
        let updated = self.runtime.update(&self.id, &file).await;
        let _ = fs::remove_file(&file);
        updated.map_err(TaskError::runtime("update"))
    }
}

/// The process as it was sent, with this `terminal` at the end. Keys may be escaped or repeated:
/// the runtime interprets them.
fn with_terminal(process: &[u8], terminal: bool) -> serde_json::Result<Vec<u8>> {
    // As Go does: bytes that are not UTF-8 are U+FFFD.
    let process = String::from_utf8_lossy(process);
    let fields: Option<RawObject<'_>> = serde_json::from_str(&process)?;
    let mut out = String::from("{");
    for (key, value) in fields.iter().flat_map(RawObject::entries) {
        if key != "terminal" {
            let _ = write!(out, "{}:{},", serde_json::to_string(key)?, value.get());
        }
    }
    let _ = write!(out, "\"terminal\":{terminal}}}");
    Ok(out.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_terminal_field_is_replaced() {
        let sent = br#"{"args":["sh"],"x-new":{"b":1,"a":1e400},"cwd":"/"}"#;
        let got = String::from_utf8(with_terminal(sent, true).unwrap()).unwrap();
        assert_eq!(
            got,
            r#"{"args":["sh"],"x-new":{"b":1,"a":1e400},"cwd":"/","terminal":true}"#
        );
        assert!(with_terminal(b"{}{", true).is_err());
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_replaced() {
        let got =
            String::from_utf8(with_terminal(b"{\"env\":[\"A=\xe9\"]}", false).unwrap()).unwrap();
        assert_eq!(got, "{\"env\":[\"A=\u{fffd}\"],\"terminal\":false}");
    }

    #[test]
    fn keys_may_be_escaped_and_written_twice() {
        let sent = br#"{"\u0061rgs":["sh"],"terminal":false,"cwd":"/a","cwd":"/b"}"#;
        let got = String::from_utf8(with_terminal(sent, true).unwrap()).unwrap();
        assert_eq!(
            got,
            r#"{"args":["sh"],"cwd":"/a","cwd":"/b","terminal":true}"#
        );
    }
}
