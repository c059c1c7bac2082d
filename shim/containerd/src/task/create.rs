//! `Create`: from containerd's request to an init that waits for its start.
//!
//! If any step fails, the steps before are undone: streams are closed, the root filesystem is unmounted, and the container that
//! the runtime began is deleted.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};

use containerd_shim_protos::{api::CreateTaskRequest, events::task as proto};
use protobuf::MessageField;

use super::{Process, Surroundings, Task, TaskError, checkpoint::images_of, terms::guard_terms};
use crate::{
    bundle::{Bundle, SpecView},
    causes::with_causes,
    cgroup::{Cgroup, is_systemd, remove_remains},
    events::Event,
    exits::Watched,
    io::{Owner, Streams, Wiring},
    options::Options,
    rootfs,
    runtime::{CreateCall, Runtime},
};

/// The clean-up that `delete` and a failed create share.
pub(crate) struct Rollback<'a> {
    /// The container's runtime.
    pub(crate) runtime: &'a Runtime,
    /// The container.
    pub(crate) id: &'a str,
    /// The path at which its root filesystem is, or may be, mounted.
    pub(crate) rootfs: PathBuf,
    /// The path of its cgroup in the spec.
    pub(crate) cgroups_path: &'a str,
}

impl Rollback<'_> {
    /// Removes the container from the runtime, in any state, and also the parts that the runtime no longer knows: its cgroup,
    /// its root filesystem.
    pub(crate) async fn run(self) {
        self.runtime.clear_away(self.id).await;
        remove_remains(self.cgroups_path).await;
        if let Err(error) = rootfs::unmount(self.rootfs).await {
            tracing::warn!(id = self.id, error = with_causes(&error), "the root filesystem stays mounted");
        }
    }
}

impl Task {
    /// Creates the container and queues the event for containerd.
    pub(crate) async fn create(around: &Surroundings, request: CreateTaskRequest) -> Result<Arc<Self>, TaskError> {
        let mut options = Options::of_request(request.options.as_ref()).await?;
        let bundle = Bundle::at(&request.bundle);
        let spec = bundle.spec()?;
        options.systemd_cgroup = Some(is_systemd(options.systemd_cgroup, spec.has_systemds_path()));
        bundle.write_options(&options)?;
        let exits = Arc::clone(&around.exits);
        let runtime = Runtime::new(&options, &around.namespace, bundle.clone(), exits);
        // Refused here, not by the runtime: a failed create ends with a forced delete, and this container is not ours.
        if runtime.knows(&request.id) {
            return Err(TaskError::AlreadyExists(request.id));
        }
        let task = Self::prepare(around, &request, &options, bundle, runtime, &spec);

        task.mount_rootfs(&request).await?;
        let made = match images_of(&request, &options).is_empty() {
            true => task.make_init(&options, &spec).await.map(Some),
            false => task.ready_restoration(&request, &options).await.map(|()| None),
        };
        match made {
            Ok(watched) => {
                let task = Arc::new(task);
                task.announce(request);
                if let Some(watched) = watched {
                    task.await_init(watched);
                }
                Ok(task)
            }
            Err(error) => {
                let (rootfs, cgroups_path) = (task.bundle.rootfs(), spec.cgroups_path());
                Rollback { runtime: &task.runtime, id: &task.id, rootfs, cgroups_path }.run().await;
                Err(error)
            }
        }
    }

    fn prepare(
        around: &Surroundings,
        request: &CreateTaskRequest,
        options: &Options,
        bundle: Bundle,
        runtime: Runtime,
        spec: &SpecView,
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
            owner: Owner { uid: options.io_uid, gid: options.io_gid },
            outlives_init: !spec.has_own_pid_namespace(),
            init: Arc::new(Process::new(request.id.clone(), streams)),
            cgroup: OnceLock::new(),
            restoration: Mutex::default(),
            execs: Mutex::new(HashMap::new()),
            turn: tokio::sync::Mutex::new(()),
            signals: tokio::sync::RwLock::new(()),
            delete_turn: tokio::sync::Mutex::new(()),
            around: around.clone(),
        }
    }

    async fn mount_rootfs(&self, request: &CreateTaskRequest) -> Result<(), TaskError> {
        Ok(rootfs::mount(request.rootfs.clone(), self.bundle.rootfs()).await?)
    }

    async fn make_init(&self, options: &Options, spec: &SpecView) -> Result<Arc<Watched>, TaskError> {
        let wiring = Wiring::open(self.init.streams(), self.owner, self.author(&self.id)).await?;
        let pending = self.around.exits.pending_process();
        let terms = guard_terms(spec).await;
        let call = CreateCall {
            id: &self.id,
            wiring: &wiring,
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            terms: &terms,
        };
        let created = self.runtime.create(&call).await.map_err(TaskError::runtime("create"))?;
        let pid = Bundle::read_pid(&self.bundle.init_pid_file())?;
        if created.is_worth_verifying {
            self.runtime.verify_apart(&self.id, pid, terms.deadline);
        }
        let watched = Arc::new(pending.watch(pid)?);
        // A process that has ended already is in no cgroup any more, and another process may have its pid.
        if !watched.has_ended() {
            self.find_cgroup(pid);
        }
        self.init.born(Arc::clone(&watched), wiring.attach()?);
        Ok(watched)
    }

    /// A cgroup that cannot be found is no error: the container only has no figures.
    fn find_cgroup(&self, pid: u32) {
        match Cgroup::of_process(pid) {
            Ok(cgroup) => {
                cgroup.enable_controllers();
                drop(self.cgroup.set(cgroup));
            }
            Err(error) => tracing::warn!(id = self.id, error = with_causes(&error), "no figures of this container"),
        }
    }

    fn announce(&self, request: CreateTaskRequest) {
        let io = proto::TaskIO {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
            ..Default::default()
        };
        self.around.events.send(&Event::Created(proto::TaskCreate {
            container_id: self.id.clone(),
            bundle: request.bundle,
            rootfs: request.rootfs,
            io: MessageField::some(io),
            checkpoint: request.checkpoint,
            pid: self.init.pid(),
            ..Default::default()
        }));
    }
}
