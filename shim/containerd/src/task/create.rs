//! `Create`: from containerd's request to an init that waits for its start.
//!
//! If any step fails, the steps before are undone: streams are closed, the root filesystem is
//! unmounted, and the container that the runtime began is deleted.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use bindguard_core::error_chain;
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use protobuf::MessageField;

use super::checkpoint::images_of;
use super::guard_settings::guard_settings;
use super::{SharedState, Task, TaskError, TaskProcess};
use crate::bundle::{Bundle, ShimSpec};
use crate::cgroup::{Cgroup, is_systemd, remove_leftover_cgroup};
use crate::exits::Watched;
use crate::io::{PreparedIo, StreamOwner, Streams};
use crate::options::Options;
use crate::rootfs;
use crate::runtime::{NewContainer, Runtime};

/// The clean-up that `delete` and a failed create share.
pub(crate) struct Rollback<'a> {
    /// The container's runtime.
    pub(crate) runtime: &'a Runtime,
    /// The container.
    pub(crate) id: &'a str,
    /// The bundle, whose root filesystem may be mounted.
    pub(crate) bundle: &'a Bundle,
    /// The path of its cgroup in the spec.
    pub(crate) cgroups_path: &'a str,
}

impl Rollback<'_> {
    /// Removes the container from the runtime, in any state. Also removes the init, the cgroup and
    /// the root filesystem, which the runtime may no longer know.
    pub(crate) async fn run(self) {
        self.runtime.remove_failed_create(self.id).await;
        remove_leftover_cgroup(self.cgroups_path, &self.runtime.state_of(self.id)).await;
        if let Err(error) = rootfs::unmount(self.bundle.rootfs()).await {
            tracing::warn!(
                id = self.id,
                error = error_chain(&error),
                "the root filesystem stays mounted"
            );
        }
    }
}

impl Task {
    /// Creates the container and queues the event for containerd.
    pub(crate) async fn create(
        shared: &SharedState,
        request: CreateTaskRequest,
    ) -> Result<Arc<Self>, TaskError> {
        let mut options = Options::of_request(request.options.as_ref()).await?;
        let bundle = Bundle::at(&request.bundle);
        let spec = bundle.spec()?;
        options.systemd_cgroup = Some(is_systemd(options.systemd_cgroup, spec.has_systemds_path()));
        let exits = Arc::clone(&shared.exits);
        let runtime = Runtime::new(&options, &shared.namespace, bundle.clone(), exits);
        // Refused here, not by the runtime: a failed create ends with a forced delete, and this
        // container is not ours. `delete` removes no container of a bundle without options.
        if runtime.knows(&request.id) {
            return Err(TaskError::AlreadyExists(request.id));
        }
        bundle.write_options(&options)?;
        let task = Self::prepare(shared, &request, &options, bundle, runtime, &spec);

        rootfs::mount(request.rootfs.clone(), task.bundle.rootfs()).await?;
        let made = match images_of(&request, &options).is_empty() {
            true => task.create_init(&options, &spec).await.map(Some),
            false => task
                .prepare_restoration(&request, &options)
                .await
                .map(|()| None),
        };
        match made {
            Ok(watched) => {
                let task = Arc::new(task);
                task.publish_created(request);
                if let Some(watched) = watched {
                    task.await_init(watched);
                }
                Ok(task)
            }
            Err(error) => {
                let (bundle, cgroups_path) = (&task.bundle, spec.cgroups_path());
                Rollback {
                    runtime: &task.runtime,
                    id: &task.id,
                    bundle,
                    cgroups_path,
                }
                .run()
                .await;
                Err(error)
            }
        }
    }

    fn prepare(
        shared: &SharedState,
        request: &CreateTaskRequest,
        options: &Options,
        bundle: Bundle,
        runtime: Runtime,
        spec: &ShimSpec,
    ) -> Self {
        let streams = Streams {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        Self {
            id: request.id.clone(),
            bundle,
            runtime,
            owner: StreamOwner {
                uid: options.io_uid,
                gid: options.io_gid,
            },
            outlives_init: !spec.has_own_pid_namespace(),
            init: Arc::new(TaskProcess::new(request.id.clone(), streams)),
            cgroup: OnceLock::new(),
            restoration: Mutex::default(),
            execs: Mutex::new(HashMap::new()),
            turn: tokio::sync::Mutex::new(()),
            signals: tokio::sync::RwLock::new(()),
            delete_turn: tokio::sync::Mutex::new(()),
            deleted_unstarted: AtomicBool::new(false),
            shared: shared.clone(),
        }
    }

    async fn create_init(
        &self,
        options: &Options,
        spec: &ShimSpec,
    ) -> Result<Arc<Watched>, TaskError> {
        let prepared_io = PreparedIo::open(
            self.init.streams(),
            self.owner,
            self.logged_process(&self.id),
        )
        .await?;
        let pending = self.shared.exits.pending_process();
        let settings = guard_settings(spec).await;
        let container = NewContainer {
            id: &self.id,
            prepared_io: &prepared_io,
            no_pivot_root: options.no_pivot_root,
            settings: &settings,
        };
        let created = self
            .runtime
            .create(options.no_new_keyring, &container)
            .await
            .map_err(TaskError::runtime("create"))?;
        let pid = Bundle::read_pid(&self.bundle.init_pid_file())?;
        if created.is_provable {
            let proof = self.runtime.prove(&self.id, pid, &settings);
            proof.await.map_err(TaskError::runtime("create"))?;
        }
        self.attach_init(Arc::new(pending.watch(pid)?), prepared_io)
    }

    /// Finds the new init's cgroup, and starts the copies of its streams.
    pub(super) fn attach_init(
        &self,
        watched: Arc<Watched>,
        prepared_io: PreparedIo,
    ) -> Result<Arc<Watched>, TaskError> {
        // A process that has ended already is in no cgroup any more, and another process may have
        // its pid.
        if !watched.has_ended() {
            self.find_cgroup(watched.pid());
        }
        self.init
            .set_running_process(Arc::clone(&watched), prepared_io.attach()?);
        Ok(watched)
    }

    /// A cgroup that cannot be found is no error: the container only has no figures.
    fn find_cgroup(&self, pid: u32) {
        match Cgroup::of_process(pid) {
            Ok(cgroup) => {
                cgroup.enable_controllers();
                drop(self.cgroup.set(cgroup));
            }
            Err(error) => tracing::warn!(
                id = self.id,
                error = error_chain(&error),
                "no figures of this container"
            ),
        }
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
