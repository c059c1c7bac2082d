//! `Create`: from containerd's request to an init that waits for its start.
//!
//! If any step fails, the steps before are undone: streams are closed, the root filesystem is
//! unmounted, and the container that the runtime began is deleted.
//!
//! `Checkpoint` and restore are here as well. A restored container has no time between its creation and its start: criu creates it running. So
//! `Create` only opens its streams, answers with pid 0 and keeps the parameters. `Start` lets the
//! runtime restore it.
//!
//! A client of containerd may name the directory of the images in its options. containerd copies
//! the directory into the request, but 1.x does so only if the runtime's name begins with
//! `io.containerd.runc`. Under any other name the shim must read the options.

use std::ffi::OsString;
use std::mem::swap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use bindguard_config::load_without_file;
use bindguard_core::error_chain;
use bindguard_core::identity::CONTAINER_TYPE;
use bindguard_core::policy::{BelowEmptyDirs, policy_of_pod};
use containerd_shim_protos::api::{CheckpointTaskRequest, CreateTaskRequest};
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use containerd_shim_protos::topics;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{Result, SharedState, Task, TaskError, TaskProcess};
use crate::bundle::{Bundle, Options, ShimSpec, given_or, malformed, text, unknown_type};
use crate::cgroup::{self, is_systemd, remove_leftover_cgroup};
use crate::exits::Watched;
use crate::io::{PreparedIo, StreamOwner, Streams};
use crate::rootfs;
use crate::runtime::{GuardSettings, NewContainer, Runtime, checkpoint_args, images_args};
use crate::work::{lock, run_blocking};

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
        tracing::warn!(
            id = runtime.id,
            error = error_chain(&error),
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

    async fn make_init(
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
    fn attach_init(&self, watched: Arc<Watched>, prepared_io: PreparedIo) -> Result<Arc<Watched>> {
        // A process that has ended already is in no cgroup any more, and another process may have
        // its pid.
        if !watched.has_ended() {
            match cgroup::find(watched.pid) {
                Ok(cgroup) => {
                    cgroup.enable_controllers();
                    let _ = self.cgroup.set(cgroup);
                }
                // No error: the container only has no figures.
                Err(error) => tracing::warn!(
                    id = self.id,
                    error = error_chain(&error),
                    "no figures of this container"
                ),
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
        tracing::warn!("{}", error_chain(problem));
    }
    let config = loaded.config;
    // The guard itself reports the annotations that are ignored.
    let (policy, _) = policy_of_pod(config.policy(), |name| {
        spec.annotations.get(name).map(String::as_str)
    });
    GuardSettings {
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

const OPTIONS_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
/// The type that clients of containerd 1.x send with a foreign runtime type. Its fields are the
/// same, but two are swapped.
const FIRST_OPTIONS_TYPE: &str = "containerd.linux.runc.CheckpointOptions";
/// The field of the checkpoint to build on, which the protos crate does not name yet.
const PARENT_PATH: u32 = 10;
/// The copy of criu's log, for after the removal of criu's own directory.
const DUMP_LOG: &str = "criu-dump.log";

/// The parameters that are kept from the `Create` to the `Start` of a container to restore.
pub struct Restoration {
    images: String,
    parent: String,
    prepared_io: PreparedIo,
}

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
                tracing::debug!(id = self.id, %error, "criu left no log");
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
    pub(super) async fn restore(&self) -> Result<Option<Arc<Watched>>> {
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
