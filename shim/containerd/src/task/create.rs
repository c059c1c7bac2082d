//! `Create`: from containerd's request to an init that waits for its start, and whose end is waited
//! for.
//!
//! If any step fails, the steps before are undone: streams are closed, the root filesystem is
//! unmounted, and the container that the runtime began is deleted.
//!
//! For a container that is restored from a checkpoint, `Create` only opens the streams: see
//! `lifecycle`.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bindguard_config::load_without_file;
use bindguard_core::error_chain;
use bindguard_core::identity::{CONTAINER_TYPE, Identity};
use bindguard_core::policy::{BelowEmptyDirs, policy_of_pod};
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use nix::libc::SIGKILL;
use protobuf::MessageField;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::lifecycle::Exec;
use super::{ProcessState, Restoration, Result, SharedState, Task, TaskError, TaskProcess};
use crate::bundle::{Bundle, Options, ShimSpec, given_or};
use crate::cgroup::{self, OomWatch, is_systemd, remove_leftover_cgroup};
use crate::events::timestamp;
use crate::exits::{Exit, Watched};
use crate::io::{PreparedIo, StreamOwner, Streams};
use crate::rootfs;
use crate::runtime::{GuardSettings, NewContainer, Runtime};
use crate::work::{lock, run_blocking, spawn};

/// The time limit for reading the config: it may be on a server that hangs, and the event loop
/// serves the whole pod.
const READ_LIMIT: Duration = Duration::from_millis(700);

/// A hanging read keeps its thread until the server answers again: the semaphore limits the
/// threads.
static READ_SLOTS: Semaphore = Semaphore::const_new(64);

/// The clean-up that `delete` and a failed create share. Removes the container from the runtime, in
/// any state. Also removes the init, the cgroup and the root filesystem, which the runtime may no
/// longer know.
pub async fn roll_back(runtime: &Runtime, cgroups_path: &str) {
    runtime.remove_failed_create().await;
    remove_leftover_cgroup(cgroups_path, &runtime.state()).await;
    if let Err(error) = rootfs::unmount(runtime.bundle.rootfs()).await {
        log::warn!(
            id:% = runtime.id, error:% = error_chain(&error);
            "the root filesystem stays mounted"
        );
    }
}

impl Task {
    /// Creates the container and queues the event for containerd.
    pub async fn create(shared: &SharedState, request: CreateTaskRequest) -> Result<Arc<Self>> {
        let mut options = Options::of_request(request.options.as_ref()).await?;
        let bundle = Bundle::at(&request.bundle);
        let spec = bundle.spec()?;
        options.systemd_cgroup = Some(is_systemd(options.systemd_cgroup, spec.has_systemds_path()));
        let exits = Arc::clone(&shared.exits);
        let id = &request.id;
        let runtime = Runtime::new(&options, &shared.namespace, id, bundle.clone(), exits);
        // Refused here, not by the runtime: a failed create ends with a forced delete, and this
        // container is not ours. `delete` removes no container of a bundle without options.
        if runtime.knows_container() {
            return Err(TaskError::AlreadyExists(request.id));
        }
        bundle.write_options(&options)?;
        let streams = Streams {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let task = Self {
            id: request.id.clone(),
            bundle,
            runtime,
            owner: StreamOwner {
                uid: options.io_uid,
                gid: options.io_gid,
            },
            outlives_init: !spec.has_own_pid_namespace,
            init: Arc::new(TaskProcess::new(request.id.clone(), streams)),
            restoration: Default::default(),
            cgroup: Default::default(),
            execs: Default::default(),
            turn: Default::default(),
            signals: Default::default(),
            delete_turn: Default::default(),
            deleted_unstarted: Default::default(),
            shared: shared.clone(),
        };

        rootfs::mount(request.rootfs.clone(), task.bundle.rootfs()).await?;
        match task.create_init(&request, &options, &spec).await {
            Ok(watched) => {
                let task = Arc::new(task);
                task.publish_created(request);
                if let Some(watched) = watched {
                    task.await_init(watched);
                }
                Ok(task)
            }
            Err(error) => {
                roll_back(&task.runtime, &spec.cgroups_path).await;
                Err(error)
            }
        }
    }

    /// Opens the init's streams, and creates the init unless it is to be restored at its start.
    async fn create_init(
        &self,
        request: &CreateTaskRequest,
        options: &Options,
        spec: &ShimSpec,
    ) -> Result<Option<Arc<Watched>>> {
        let prepared_io = self.open_streams(&self.init).await?;
        // Empty without a checkpoint.
        let images = given_or(&request.checkpoint, &options.images_to_restore);
        if !images.is_empty() {
            *lock(&self.restoration) = Some(Restoration {
                images: images.to_owned(),
                parent: request.parent_checkpoint.clone(),
                prepared_io,
            });
            return Ok(None);
        }
        let mut args = Vec::new();
        if options.no_new_keyring {
            args.push("--no-new-keyring".into());
        }
        let made = self.make_init("create", args, options, &prepared_io, spec);
        self.attach_init(made.await?, prepared_io).map(Some)
    }

    pub(super) async fn make_init(
        &self,
        verb: &'static str,
        mut args: Vec<OsString>,
        options: &Options,
        prepared_io: &PreparedIo,
        spec: &ShimSpec,
    ) -> Result<Arc<Watched>> {
        let pending = self.shared.exits.pending_process();
        let settings = guard_settings(spec).await;
        if options.no_pivot_root {
            args.push("--no-pivot".into());
        }
        let made = self.runtime.make(NewContainer {
            verb,
            args,
            prepared_io,
            settings: &settings,
        });
        let is_provable = made.await.map_err(TaskError::runtime(verb))?;
        let pid = Bundle::read_pid(&self.bundle.init_pid_file())?;
        // The programs of a restored container run already.
        if is_provable && verb == "create" {
            let proof = self.runtime.prove(pid, &settings);
            proof.await.map_err(TaskError::runtime(verb))?;
        }
        Ok(Arc::new(pending.watch(pid)?))
    }

    /// Finds the new init's cgroup, and starts the copies of its streams.
    pub(super) fn attach_init(
        &self,
        watched: Arc<Watched>,
        prepared_io: PreparedIo,
    ) -> Result<Arc<Watched>> {
        // A process that has ended already is in no cgroup any more, and another process may have
        // its pid.
        if !watched.has_ended() {
            match cgroup::find(watched.pid) {
                Ok(cgroup) => {
                    cgroup.enable_controllers();
                    let _ = self.cgroup.set(cgroup);
                }
                // No error: the container only has no figures.
                Err(error) => {
                    log::warn!(
                        id:% = self.id, error:% = error_chain(&error);
                        "no figures of this container"
                    )
                }
            }
        }
        self.init
            .set_running_process(Arc::clone(&watched), prepared_io.attach()?);
        Ok(watched)
    }

    fn publish_created(&self, request: CreateTaskRequest) {
        let io = proto::TaskIO {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
            ..Default::default()
        };
        self.shared.events.send(
            topics::TASK_CREATE_EVENT_TOPIC,
            &proto::TaskCreate {
                container_id: self.id.clone(),
                bundle: request.bundle,
                rootfs: request.rootfs,
                io: MessageField::some(io),
                checkpoint: request.checkpoint,
                pid: self.init.pid(),
                ..Default::default()
            },
        );
    }
}

/// The settings of the guard before the runtime: from the node's config, with the changes of the
/// pod's annotations. Read for each create and restore, so that a change of the config also affects
/// a pod that runs for months.
async fn guard_settings(spec: &ShimSpec) -> GuardSettings {
    let read = run_in_slot(&READ_SLOTS, bindguard_config::load);
    let loaded = match timeout(READ_LIMIT, read).await {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => load_without_file(error),
        Err(_) => load_without_file(io::Error::other(format!(
            "it did not answer within {READ_LIMIT:?}"
        ))),
    };
    // The guard records the mistakes of a file that is used.
    if let Some(problem) = &loaded.problem {
        log::warn!("{}", error_chain(problem));
    }
    let config = loaded.config;
    let annotation = |name: &str| spec.annotations.get(name).map(String::as_str);
    // The guard itself reports the annotations that are ignored.
    let (policy, _) = policy_of_pod(config.policy(), annotation);
    GuardSettings {
        container: Identity::from_annotations(annotation),
        deadline: config.deadline(),
        policy: policy.into_owned(),
        journal: config.journal().map(Path::to_owned),
    }
}

/// The slot belongs to the reading, so that it is free again when the reading ends, panics, or gets
/// no thread.
async fn run_in_slot<T: Send + 'static>(
    slots: &'static Semaphore,
    read: fn() -> T,
) -> io::Result<T> {
    let slot = slots.try_acquire();
    let slot = slot.map_err(|_| io::Error::other("so far it has not answered"))?;
    run_blocking(move || {
        let _slot = slot;
        read()
    })
    .await
}

/// Detaches the mounts below a pod's emptyDirs, if policy wants that and this was the pod's sandbox.
pub async fn end_pod(runtime: &Runtime, spec: &ShimSpec) {
    let kind = spec.annotations.get(CONTAINER_TYPE);
    if kind.is_some_and(|kind| kind == "sandbox")
        && guard_settings(spec).await.policy.below_emptydirs == BelowEmptyDirs::Detach
    {
        runtime.detach_below_emptydirs().await;
    }
}

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
        let id = self.id.clone();
        spawn(async move {
            let exit = task.end_of_init(&watched).await;
            if task.outlives_init {
                // Without its own pid namespace the container's other processes continue to run.
                let kill = task.runtime.kill(SIGKILL.unsigned_abs(), true);
                match timeout(SIGNALS_LIMIT, kill).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => log::debug!(id:%, error:%; "kill what the init left"),
                    Err(_) => log::warn!(id:%; "the runtime hangs killing what the init left"),
                }
            }
            if timeout(EXECS_LIMIT, task.execs_ended()).await.is_err() {
                log::warn!(id:%; "an exec outlives its container's init");
            }
            // A start or signal of the init that is in progress is answered first.
            let _turn = task.turn.lock().await;
            if timeout(SIGNALS_LIMIT, task.signals.write()).await.is_err() {
                log::warn!(id:%; "the runtime hangs with a signal to an init that has ended");
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
            log::debug!(
                id:% = self.id, error:% = error_chain(&error);
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

    pub(super) fn publish_exit(&self, process: &TaskProcess, exit: Exit) {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_config_read_frees_its_slot_however_it_ends() {
        static SLOTS: Semaphore = Semaphore::const_new(1);
        let reading = run_in_slot(&SLOTS, || std::thread::sleep(Duration::from_millis(50)));
        let second = async { run_in_slot(&SLOTS, || ()).await };
        let (first, second) = tokio::join!(reading, second);
        assert!(first.is_ok() && second.is_err(), "two readings in one slot");
        assert!(run_in_slot(&SLOTS, || panic!("no config")).await.is_err());
        run_in_slot(&SLOTS, || ()).await.unwrap();
        assert_eq!(SLOTS.available_permits(), 1);
    }
}
