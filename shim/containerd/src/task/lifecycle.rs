//! The life of an init and of an exec, from `Exec` and `Start` to `Delete`; `Pause`, `Resume`, `Update`
//! `Kill`, `Checkpoint` and restore.
//!
//! A restored container has no time between its creation and its start: criu creates it running. So
//! `Create` only opens its streams, answers with pid 0 and keeps the parameters. `Start` lets the
//! runtime restore it.
//!
//! A client of containerd may name the directory of the images in its options. containerd copies
//! the directory into the request, but 1.x does so only if the runtime's name begins with
//! `io.containerd.runc`. Under any other name the shim must read the options.

use std::collections::hash_map::Entry;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::mem::swap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bindguard_core::spec::RawObject;
use bindguard_sys::write_new_file;
use containerd_shim_protos::api::{CheckpointTaskRequest, DeleteResponse, ExecProcessRequest};
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use containerd_shim_protos::topics;
use nix::libc::{ESRCH, SIGKILL};
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use tokio::time::timeout;

use super::create::end_pod;
use super::{IllegalMove, ProcessState, Restoration, Result, Task, TaskError, TaskProcess};
use crate::bundle::{Bundle, given_or, malformed, text, unknown_type};
use crate::events::timestamp;
use crate::exits::{Exit, Watched};
use crate::io::Streams;
use crate::rootfs;
use crate::runtime::{checkpoint_args, images_args};
use crate::work::{failed, lock, run_blocking, spawn};

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
        spawn(async move {
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

/// The time limit for the end of an init that was never started, after the runtime has killed it.
const KILLED_LIMIT: Duration = Duration::from_secs(5);

impl Task {
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
                log::warn!(id:% = self.id; "an init that was never started outlives its container");
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
    log::debug!(id:% = process.id; "signalled after its end");
    TaskError::NotFound("process already finished".to_owned())
}

const OPTIONS_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
/// The type that clients of containerd 1.x send with a foreign runtime type. Its fields are the
/// same, but two are swapped.
const FIRST_OPTIONS_TYPE: &str = "containerd.linux.runc.CheckpointOptions";
/// The field of the checkpoint to build on, which the protos crate does not name yet.
const PARENT_PATH: u32 = 10;
/// The copy of criu's log, for after the removal of criu's own directory.
const DUMP_LOG: &str = "criu-dump.log";

impl Task {
    /// Writes the container into a directory, with criu.
    pub async fn checkpoint(&self, request: CheckpointTaskRequest) -> Result<()> {
        let mut options = decode(request.options.as_ref())?;
        let parent = text(options.special_fields.unknown_fields(), PARENT_PATH);
        // The client expects the images in the directory that it names.
        options.image_path = given_or(&options.image_path, &request.path).to_owned();
        let _turn = self.turn.lock().await;
        self.init.state().admits_checkpoint()?;
        // A directory that the client names stays for the client to inspect.
        let is_own = options.work_path.is_empty();
        if is_own {
            options.work_path = self.bundle.work().join("criu-work").display().to_string();
        }
        let work = Path::new(&options.work_path);
        let mut done = Ok(());
        let args = checkpoint_args(&options, &parent);
        if let Err(source) = self.runtime.run("checkpoint", args).await {
            let log = self.bundle.path.join(DUMP_LOG);
            let (from, to) = (work.join("dump.log"), log.clone());
            // Away from the event loop: the client may have named any directory.
            let copied = run_blocking(move || fs::copy(from, to)).await;
            if let Err(error) = copied.and_then(|copied| copied) {
                log::debug!(id:% = self.id, error:%; "criu left no log");
            }
            done = Err(TaskError::Checkpoint { source, log });
        }
        if is_own {
            let _ = fs::remove_dir_all(work);
        }
        done
    }

    /// Restores the init, if it waits for that; the caller holds its turn. After a failure the start
    /// may be tried again.
    async fn restore(&self) -> Result<Option<Arc<Watched>>> {
        let Some(from) = lock(&self.restoration).take() else {
            return Ok(None);
        };
        let restored = match self.run_restore(&from).await {
            Ok(watched) => self.attach_init(watched, from.prepared_io).map(Some),
            Err(error) => {
                *lock(&self.restoration) = Some(from);
                Err(error)
            }
        };
        if restored.is_err() {
            // A half-restored container is useless.
            self.runtime.remove_failed_create().await;
        }
        restored
    }

    async fn run_restore(&self, from: &Restoration) -> Result<Arc<Watched>> {
        let options = self.bundle.read_options()?;
        let work = match options.criu_work_path.as_str() {
            "" => self.bundle.work(),
            path => path.into(),
        };
        let mut args = images_args(&from.images, work.as_ref(), &from.parent);
        // The shim is the subreaper: the restored process becomes its child.
        args.extend(["--detach".into(), "--no-subreaper".into()]);
        let spec = self.bundle.spec()?;
        let made = self.make_init("restore", args, &options, &from.prepared_io, &spec);
        made.await
    }
}

fn decode(any: Option<&Any>) -> Result<CheckpointOptions> {
    let Some(any) = any.filter(|any| !any.type_url.is_empty()) else {
        return Ok(CheckpointOptions::default());
    };
    let kind = match any.type_url.rsplit('/').next() {
        Some(OPTIONS_TYPE) => OPTIONS_TYPE,
        Some(FIRST_OPTIONS_TYPE) => FIRST_OPTIONS_TYPE,
        _ => return Err(unknown_type(&any.type_url).into()),
    };
    let mut options = CheckpointOptions::parse_from_bytes(&any.value).map_err(malformed(kind))?;
    if kind == FIRST_OPTIONS_TYPE {
        swap(&mut options.work_path, &mut options.image_path);
    }
    Ok(options)
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

#[cfg(test)]
mod checkpoint_tests {
    use super::*;

    #[test]
    fn the_directory_in_the_options_is_used() {
        assert_eq!(
            given_or("", "/tmp/ctrd-checkpoint1"),
            "/tmp/ctrd-checkpoint1"
        );
        assert_eq!(given_or("/images", "/tmp/ctrd-checkpoint1"), "/images");
        assert_eq!(given_or("", ""), "");
    }

    #[test]
    fn options_by_their_type() {
        let any = |type_url: &str, value: &[u8]| Any {
            type_url: type_url.to_owned(),
            value: value.to_owned(),
            ..Default::default()
        };
        // exit, and fields 8 and 9
        let bytes = b"\x08\x01\x42\x01e\x4a\x01n";
        let options = decode(Some(&any(OPTIONS_TYPE, bytes))).unwrap();
        assert_eq!(
            (
                options.exit,
                options.image_path.as_str(),
                options.work_path.as_str()
            ),
            (true, "e", "n")
        );
        assert_eq!(
            text(options.special_fields.unknown_fields(), PARENT_PATH),
            ""
        );
        let with_parent = decode(Some(&any(OPTIONS_TYPE, b"\x08\x01\x52\x03../"))).unwrap();
        assert_eq!(
            text(with_parent.special_fields.unknown_fields(), PARENT_PATH),
            "../"
        );
        let first = decode(Some(&any(FIRST_OPTIONS_TYPE, bytes))).unwrap();
        assert_eq!(
            (
                first.exit,
                first.work_path.as_str(),
                first.image_path.as_str()
            ),
            (true, "e", "n")
        );
        assert_eq!(decode(None).unwrap(), CheckpointOptions::default());
        assert!(decode(Some(&any("containerd.runc.v1.Options", bytes))).is_err());
    }
}
