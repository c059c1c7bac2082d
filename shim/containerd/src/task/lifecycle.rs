//! The life of an init and of an exec, from `Exec` and `Start` to `Delete`; `Pause`, `Resume`, `Update`
//! and `Kill`. A process ends with the kernel's report, which becomes an event for containerd.

use std::collections::hash_map::Entry;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::spec::RawObject;
use bindguard_sys::write_new_file;
use containerd_shim_protos::api::{DeleteResponse, ExecProcessRequest};
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use nix::libc::{ESRCH, SIGKILL};
use tokio::time::timeout;

use super::create::end_pod;
use super::{IllegalMove, ProcessState, Result, Task, TaskError, TaskProcess};
use crate::bundle::Bundle;
use crate::cgroup::OomWatch;
use crate::events::timestamp;
use crate::exits::{Exit, Watched};
use crate::io::Streams;
use crate::rootfs;
use crate::work::{failed, lock};

/// The status of an exec whose start failed, as of `runc exec`. A client that only waits must not
/// see success.
const NOT_STARTED: u32 = 255;

pub struct Exec {
    pub process: Arc<TaskProcess>,
    /// The OCI process, as JSON.
    spec: Vec<u8>,
    /// Held while it is being started or deleted.
    pub turn: tokio::sync::Mutex<()>,
}

impl Task {
    /// Starts the init, or an exec; returns its pid.
    pub async fn start(self: &Arc<Self>, exec_id: &str) -> Result<u32> {
        if !exec_id.is_empty() {
            return self.start_exec(self.exec(exec_id)?).await;
        }
        let _turn = self.turn.lock().await;
        self.init.state().started()?;
        let restored = self.restore().await?;
        if restored.is_none() {
            self.run("start", vec![]).await?;
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

    async fn start_exec(self: &Arc<Self>, exec: Arc<Exec>) -> Result<u32> {
        let _turn = exec.turn.lock().await;
        exec.process.state().started()?;
        let created = self.create_exec(&exec).await;
        let watched = created.inspect_err(|_| {
            // All waiters get an end, but containerd gets no event: no process was started.
            let exit = Exit::now(NOT_STARTED);
            exec.process.finish(ProcessState::failed_to_start, exit);
        })?;
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
        let task = Arc::clone(self);
        let process = Arc::clone(&exec.process);
        tokio::spawn(async move {
            let exit = watched.exit().await;
            task.publish_exit(&process, exit);
        });
        Ok(pid)
    }

    async fn create_exec(&self, exec: &Exec) -> Result<Arc<Watched>> {
        self.init.state().admits_exec()?;
        let process = &exec.process;
        let prepared_io = self.open_streams(process).await?;
        let spec_file = self.bundle.exec_file(&process.id, "json");
        let pid_file = self.bundle.exec_file(&process.id, "pid");
        // its environment may have secrets
        write_new_file(&spec_file, &exec.spec, 0o600)
            .map_err(failed(format!("write {}", spec_file.display())))?;

        let pending = self.shared.exits.pending_process();
        let made = self.runtime.exec(&spec_file, &pid_file, &prepared_io).await;
        let pid = made
            .map_err(TaskError::runtime("exec"))
            .and_then(|()| Ok(Bundle::read_pid(&pid_file)?));
        let _ = fs::remove_file(&spec_file);
        let _ = fs::remove_file(&pid_file);

        let watched = Arc::new(pending.watch(pid?)?);
        // The client gets an error, so the process must not run. The orphans' reaper reaps it.
        let attached = prepared_io.attach();
        let attached = attached.inspect_err(|_| drop(watched.signal(SIGKILL)))?;
        process.set_running_process(Arc::clone(&watched), attached);
        Ok(watched)
    }

    /// Adds a process by name and queues the event for containerd. `Start` creates the process. Its
    /// description stays as containerd sent it, except that the request decides whether there is a
    /// terminal.
    pub fn add_exec(&self, request: ExecProcessRequest) -> Result<()> {
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
    pub async fn pause(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        self.init.advance(ProcessState::pausing)?;
        if let Err(error) = self.run("pause", vec![]).await {
            // A container that has ended meanwhile is not resumed.
            let _ = self.init.advance(ProcessState::resumed);
            return Err(error);
        }
        self.init.advance(ProcessState::paused)?;
        self.shared.events.send(
            topics::TASK_PAUSED_EVENT_TOPIC,
            &proto::TaskPaused {
                container_id: self.id.clone(),
                ..Default::default()
            },
        );
        Ok(())
    }

    /// Thaws the container.
    pub async fn resume(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        self.init.state().resumed()?;
        self.run("resume", vec![]).await?;
        self.init.advance(ProcessState::resumed)?;
        self.shared.events.send(
            topics::TASK_RESUMED_EVENT_TOPIC,
            &proto::TaskResumed {
                container_id: self.id.clone(),
                ..Default::default()
            },
        );
        Ok(())
    }

    /// Changes the container's limits; `resources` is an OCI LinuxResources as JSON.
    pub async fn update(&self, resources: &[u8]) -> Result<()> {
        let file = self.bundle.path.join("update-resources.json");
        let _turn = self.turn.lock().await;
        write_new_file(&file, resources, 0o600)
            .map_err(failed(format!("write {}", file.display())))?;
        let args = vec!["--resources".into(), (&file).into()];
        let updated = self.run("update", args).await;
        let _ = fs::remove_file(&file);
        updated
    }

    async fn run(&self, verb: &'static str, args: Vec<OsString>) -> Result<()> {
        let done = self.runtime.run(verb, args).await;
        done.map_err(TaskError::runtime(verb))
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

/// The time limit for which an init's exit waits for the exits of execs. The execs are dead or
/// dying by then: only an exec that hangs in the kernel can take longer.
const EXECS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the runtime's answer to a signal. The init has ended, so only a runtime that
/// hangs takes that long.
const SIGNALS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the end of an init that was never started, after the runtime has killed it.
const KILLED_LIMIT: Duration = Duration::from_secs(5);

impl Task {
    /// Waits for the init in a task of its own.
    pub(super) fn await_init(self: &Arc<Self>, watched: Arc<Watched>) {
        let task = Arc::clone(self);
        let id = self.id.clone();
        tokio::spawn(async move {
            let exit = task.end_of_init(&watched).await;
            if task.outlives_init {
                // Without its own pid namespace the container's other processes continue to run.
                let kill = task.runtime.kill(SIGKILL.unsigned_abs(), true);
                match timeout(SIGNALS_LIMIT, kill).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(id, %error, "kill what the init left"),
                    Err(_) => tracing::warn!(id, "the runtime hangs killing what the init left"),
                }
            }
            if timeout(EXECS_LIMIT, task.execs_ended()).await.is_err() {
                tracing::warn!(id, "an exec outlives its container's init");
            }
            // A start or signal of the init that is in progress is answered first.
            let _turn = task.turn.lock().await;
            if timeout(SIGNALS_LIMIT, task.signals.write()).await.is_err() {
                tracing::warn!(
                    id,
                    "the runtime hangs with a signal to an init that has ended"
                );
            }
            if task.deleted_unstarted.load(Ordering::Relaxed) {
                task.init.finish(ProcessState::exited, exit);
            } else {
                task.publish_exit(&task.init, exit);
            }
        });
    }

    /// Waits for the init and reports out-of-memory kills up to the end.
    async fn end_of_init(&self, watched: &Watched) -> Exit {
        let opened = self.cgroup.get().map(OomWatch::open).transpose();
        let opened = opened.unwrap_or_else(|error| {
            // The node has no memory controller, or the init is gone already.
            tracing::debug!(
                id = self.id,
                error = error_chain(&error),
                "out-of-memory kills will not be reported"
            );
            None
        });
        let Some(mut ooms) = opened else {
            return watched.exit().await;
        };
        let report = || {
            self.shared.events.send(
                topics::TASK_OOM_EVENT_TOPIC,
                &proto::TaskOOM {
                    container_id: self.id.clone(),
                    ..Default::default()
                },
            );
        };
        let exit = loop {
            tokio::select! {
                exit = watched.exit() => break exit,
                true = ooms.next() => report(),
            }
        };
        if ooms.take_unreported() {
            report();
        }
        exit
    }

    fn publish_exit(&self, process: &TaskProcess, exit: Exit) {
        process.finish(ProcessState::exited, exit);
        self.shared.events.send(
            topics::TASK_EXIT_EVENT_TOPIC,
            &proto::TaskExit {
                container_id: self.id.clone(),
                id: process.id.clone(),
                pid: process.pid(),
                exit_status: exit.status,
                exited_at: timestamp(exit.at),
                ..Default::default()
            },
        );
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

    /// Removes an exec, or the container.
    ///
    /// The output of a process is passed on before its delete is answered, because the client then
    /// closes its side. An exec's end sends no TaskDelete: containerd would take that for the
    /// container's.
    pub async fn delete(&self, exec_id: &str) -> Result<DeleteResponse> {
        let process = self.process(exec_id)?;
        let exit = if exec_id.is_empty() {
            self.delete_init().await?
        } else {
            let exec = self.exec(exec_id)?;
            let _turn = exec.turn.lock().await;
            process.state().deleted()?;
            release(&process).await;
            process.advance(ProcessState::deleted)?;
            self.execs().remove(exec_id);
            process.exit()
        };
        Ok(DeleteResponse {
            pid: process.pid(),
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map(|exit| timestamp(exit.at)).unwrap_or_default(),
            ..Default::default()
        })
    }

    /// Returns the exit that is to be reported. No program ran in a container without a start.
    async fn delete_init(&self) -> Result<Option<Exit>> {
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
            if timeout(KILLED_LIMIT, ended).await.is_err() {
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
            end_pod(&self.runtime, &spec).await;
        }
        self.bundle.settle();
        self.init.advance(ProcessState::deleted)?;
        let mut exit = self.init.exit();
        if self.deleted_unstarted.load(Ordering::Relaxed) {
            exit = None;
        }
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
        Ok(exit)
    }

    /// A start in progress ends first: it decides whether the init has an exit to report.
    async fn delete_unstarted(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        if self.init.state() != ProcessState::Created {
            return Ok(());
        }
        self.deleted_unstarted.store(true, Ordering::Relaxed);
        let deleted = self.delete_from_runtime().await;
        deleted.inspect_err(|_| self.deleted_unstarted.store(false, Ordering::Relaxed))?;
        // A container that was never restored has no process.
        lock(&self.restoration).take();
        Ok(())
    }

    /// If the runtime no longer knows the container, there is nothing left to delete.
    async fn delete_from_runtime(&self) -> Result<()> {
        match self.run("delete", vec![]).await {
            Err(error) if self.runtime.knows_container() => Err(error),
            _ => Ok(()),
        }
    }

    /// Sends any signal to the init, to the whole container, or to an exec.
    ///
    /// The runtime signals an init, because it handles a frozen container, or a container without a
    /// pid namespace. The shim signals an exec through its pidfd. The kernel reports that a process
    /// has ended; the runtime's text is never parsed for it.
    pub async fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Result<()> {
        if !exec_id.is_empty() {
            return kill_exec(&*self.process(exec_id)?, signal);
        }
        if self.init.state() == ProcessState::Created && self.init.watched().is_none() {
            // While criu restores the container there is no process to signal yet.
            drop(self.turn.lock().await);
        }
        let _signal = self.signals.read().await;
        // `all` also reaches processes that an init left, so a stopped init is no reason to refuse
        // it.
        if self.init.state() == ProcessState::Deleted || !all && has_ended(&self.init) {
            return Err(finished(&self.init));
        }
        match self.runtime.kill(signal, all).await {
            Err(_) if has_ended(&self.init) => Err(finished(&self.init)),
            result => result.map_err(TaskError::runtime("kill")),
        }
    }
}

async fn release(process: &TaskProcess) {
    if let Some(attached) = process.attached() {
        attached.drained().await;
    }
    process.detach();
}

fn kill_exec(process: &TaskProcess, signal: u32) -> Result<()> {
    let Some(watched) = process.watched() else {
        let state = process.state();
        if matches!(state, ProcessState::Created | ProcessState::NotStarted) {
            let verb = "kill";
            return Err(IllegalMove { verb, state }.into());
        }
        return Err(finished(process));
    };
    let number =
        i32::try_from(signal).map_err(|_| TaskError::Invalid(format!("signal {signal}")))?;
    match watched.signal(number) {
        Err(error) if error.raw_os_error() == Some(ESRCH) => Err(finished(process)),
        result => Ok(result.map_err(failed(format!("signal process {}", watched.pid)))?),
    }
}

fn has_ended(process: &TaskProcess) -> bool {
    process.watched().is_none_or(|watched| watched.has_ended())
}

fn finished(process: &TaskProcess) -> TaskError {
    tracing::debug!(id = process.id, "signalled after its end");
    TaskError::NotFound("process already finished".to_owned())
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
