//! The containers of this shim: a pod's containers, or a single container.
//!
//! The map is locked for a look-up and never while a runtime runs, so no container waits for a
//! different container. A name is reserved from the beginning of its `create`: a second create is
//! refused, and the shim does not shut down during the first.
//!
//! A shim ends when it has no container and containerd does not need it. Three states make this
//! safe. A container whose `start` was answered with this shim is *expected*: its pod's last
//! container may end just before it arrives. A *deserted* shim ends by itself: a containerd that was
//! killed in the middle of a call may never send `Shutdown`. An *abandoned* container does not run,
//! and its bundle is gone. When a client cancels a create, containerd sends `Delete` and `Shutdown`
//! while the container is being created, and then removes the bundle. The shim deletes such a
//! container itself. Time alone does not show that: a containerd that restarts slowly still reads
//! the bundles, and requests the exit status.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use containerd_shim_protos::api::{CreateTaskRequest, DeleteResponse};
use tokio::sync::Notify;
use ttrpc::Status;

use super::{Calls, shutting_down};
use crate::task::{SharedState, Task, TaskError};
use crate::work::{lock, spawn};

/// The time limit for the `Create` of a container whose `start` was answered; it usually follows
/// within milliseconds.
const EXPECTED_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for containerd's `Shutdown`, which follows the last delete at once.
const DESERTED_LIMIT: Duration = Duration::from_secs(10);
/// The same for a shim that never had a container: containerd may be busy before its first
/// `Create`.
const UNUSED_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for containerd's `Delete` of a container that has ended, after SIGTERM; it
/// follows the exit within milliseconds. Without a limit a shim would outlive its containerd.
const DELETE_LIMIT: Duration = Duration::from_secs(3);

/// The limits of the pause between two checks for abandoned containers: a stopped container may
/// wait for its delete for days.
const ABANDONED_INTERVAL: Duration = Duration::from_secs(5);
const MAX_ABANDONED_INTERVAL: Duration = Duration::from_secs(600);

/// The containers, and their shared state.
pub struct Containers {
    shared: SharedState,
    register: Mutex<Register>,
    pub shutdown: Notify,
    /// A container arrived, ended, or was removed.
    occupancy_changed: Arc<Notify>,
    pub(super) calls: Arc<Calls>,
}

struct Register {
    /// `None` for a reserved name, whose container does not exist yet.
    by_id: HashMap<String, Option<Arc<Task>>>,
    /// Their time limits.
    expected: HashMap<String, Instant>,
    /// The time at which the shim is deserted, if no container arrives.
    deserted_at: Instant,
    /// The time at which `close_if_idle` first found no living container.
    all_ended_at: Option<Instant>,
    /// The shim is about to end: a new container would have no shim.
    closed: bool,
}

impl Containers {
    /// Without containers.
    pub fn new(shared: SharedState) -> Self {
        Self {
            shared,
            register: Mutex::new(Register {
                by_id: HashMap::new(),
                expected: HashMap::new(),
                deserted_at: Instant::now() + UNUSED_LIMIT,
                all_ended_at: None,
                closed: false,
            }),
            shutdown: Notify::new(),
            occupancy_changed: Arc::default(),
            calls: Arc::default(),
        }
    }

    /// The containers and the pending calls, a line for each.
    pub fn describe(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (id, task) in &self.register().by_id {
            match task {
                None => lines.push(format!("container {id}: being created")),
                Some(task) => lines.extend(task.describe()),
            }
        }
        lines.extend(self.calls.describe());
        lines.push(format!(
            "events that containerd has not received yet: {}",
            self.shared.events.waiting()
        ));
        lines
    }

    /// The container of that name.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Task>, Status> {
        match self.register().by_id.get(id) {
            Some(Some(task)) => Ok(Arc::clone(task)),
            _ => Err(TaskError::NotFound(format!("container {id} not created")).into()),
        }
    }

    /// Creates a container; returns the pid of its init.
    pub(super) async fn create(&self, request: CreateTaskRequest) -> Result<u32, Status> {
        let name = self.reserve(&request.id)?;
        let task = Task::create(&self.shared, request).await?;
        let pid = task.pid();
        let (init, changed) = (task.process("")?, Arc::clone(&self.occupancy_changed));
        self.register().by_id.insert(name.id.clone(), Some(task));
        changed.notify_one();
        spawn(async move {
            init.wait().await;
            changed.notify_one();
        });
        Ok(pid)
    }

    /// Deletes an exec, or a container and its name.
    pub(super) async fn delete(&self, id: &str, exec_id: &str) -> Result<DeleteResponse, Status> {
        let deleted = self.find(id)?.delete(exec_id).await?;
        if exec_id.is_empty() {
            self.forget(id);
        }
        Ok(deleted)
    }

    /// Announces a container: `start` is about to answer with this shim. Refused if the shim is
    /// about to end.
    pub(super) fn expect(&self, id: &str) -> Result<(), Status> {
        let mut register = self.register();
        if register.closed {
            return Err(shutting_down());
        }
        let until = Instant::now() + EXPECTED_LIMIT;
        register.expected.insert(id.to_owned(), until);
        register.deserted_at = register.deserted_at.max(until);
        Ok(())
    }

    /// Ends the shim if it has no containers and expects none.
    pub fn shut_down(&self) {
        let mut register = self.register();
        if register.by_id.is_empty() && !register.expects_containers() {
            register.closed = true;
            self.shutdown.notify_one();
        } else {
            // The remaining containers may be abandoned.
            self.occupancy_changed.notify_one();
        }
    }

    /// If no container needs this shim, refuses new containers and returns true.
    ///
    /// A container that has ended needs the shim until its delete, which unmounts its root
    /// filesystem and answers its status, but no longer than `DELETE_LIMIT`.
    pub fn close_if_idle(&self) -> bool {
        let mut register = self.register();
        let mut tasks = register.by_id.values();
        let is_used = tasks.any(|task| task.as_ref().is_none_or(|task| task.is_alive()));
        if is_used || register.expects_containers() {
            register.all_ended_at = None;
            return false;
        }
        let all_ended_at = *register.all_ended_at.get_or_insert_with(Instant::now);
        let is_idle = register.by_id.is_empty() || all_ended_at.elapsed() >= DELETE_LIMIT;
        register.closed |= is_idle;
        is_idle
    }

    /// Resolves after some time without a container and without a request to end. Deletes abandoned
    /// containers.
    pub async fn deserted(&self) {
        let mut pause = ABANDONED_INTERVAL;
        loop {
            self.delete_abandoned().await;
            // A shim whose containers all run has no timer.
            let mut moment = None;
            {
                let mut register = self.register();
                if register.by_id.is_empty() {
                    if register.deserted_at <= Instant::now() {
                        register.closed = true;
                        return;
                    }
                    moment = Some(register.deserted_at);
                } else if register.by_id.values().flatten().any(|task| !task.runs()) {
                    moment = Some(Instant::now() + pause);
                }
            }
            tokio::select! {
                () = self.occupancy_changed.notified() => pause = ABANDONED_INTERVAL,
                () = tokio::time::sleep_until(moment.unwrap_or_else(Instant::now).into()), if moment.is_some() => {
                    pause = (pause * 2).min(MAX_ABANDONED_INTERVAL);
                }
            }
        }
    }

    async fn delete_abandoned(&self) {
        let mut abandoned = Vec::new();
        for (id, task) in &self.register().by_id {
            if let Some(task) = task
                && task.is_abandoned()
            {
                abandoned.push((id.clone(), Arc::clone(task)));
            }
        }
        for (id, task) in abandoned {
            log::info!(id:%; "deleting the container: containerd removed its bundle");
            match task.delete("").await {
                Ok(_) => self.forget(&id),
                // Tried again after the next pause.
                Err(error) => {
                    log::warn!(id:%, error:% = error_chain(&error); "delete the container");
                }
            }
        }
    }

    /// Removes a name. After the last name the shim waits for a request to end.
    fn forget(&self, id: &str) {
        let mut register = self.register();
        register.by_id.remove(id);
        if register.by_id.is_empty() {
            register.deserted_at = Instant::now() + DESERTED_LIMIT;
            self.occupancy_changed.notify_one();
        }
    }

    fn reserve(&self, id: &str) -> Result<ReservedName<'_>, Status> {
        let mut register = self.register();
        if register.closed {
            return Err(shutting_down());
        }
        register.expected.remove(id);
        if register.by_id.is_empty() {
            // A shim in use does not wait for its own end: that timer would wake an idle process.
            self.occupancy_changed.notify_one();
        }
        match register.by_id.entry(id.to_owned()) {
            Entry::Occupied(_) => Err(TaskError::AlreadyExists(id.to_owned()).into()),
            Entry::Vacant(free) => {
                free.insert(None);
                Ok(ReservedName {
                    containers: self,
                    id: id.to_owned(),
                })
            }
        }
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        lock(&self.register)
    }
}

impl Register {
    fn expects_containers(&mut self) -> bool {
        let now = Instant::now();
        self.expected.retain(|_, until| *until > now);
        !self.expected.is_empty()
    }
}

/// A reserved name. A drop frees the name, also after a panic, unless the container exists.
struct ReservedName<'a> {
    containers: &'a Containers,
    id: String,
}

impl Drop for ReservedName<'_> {
    fn drop(&mut self) {
        let is_free_again = matches!(self.containers.register().by_id.get(&self.id), Some(None));
        if is_free_again {
            self.containers.forget(&self.id);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::events::TaskEvents;
    use crate::exits::Exits;

    /// The containers of a shim that publishes no events.
    pub fn containers() -> Containers {
        let events = TaskEvents::publish_to("/nonexistent".into(), "n".into());
        let exits = Arc::new(Exits::default());
        Containers::new(SharedState {
            namespace: "n".into(),
            events,
            exits,
        })
    }

    #[tokio::test]
    async fn a_name_is_taken_from_the_beginning_and_free_after_a_failure() {
        let containers = containers();
        let name = containers.reserve("a").ok();
        assert!(containers.reserve("a").is_err());
        assert!(containers.find("a").is_err());
        containers.shut_down();
        assert!(!containers.close_if_idle());
        drop(name);
        assert!(containers.reserve("a").is_ok());
    }

    #[tokio::test]
    async fn a_shim_that_ends_takes_no_more_containers() {
        let containers = containers();
        containers.shut_down();
        containers.shutdown.notified().await;
        assert!(containers.reserve("a").is_err());
    }

    #[tokio::test]
    async fn an_expected_container_finds_its_shim() {
        let containers = containers();
        containers.expect("b").unwrap();
        containers.shut_down();
        let name = containers.reserve("b").unwrap();
        drop(name);
        containers.shut_down();
        assert!(containers.expect("c").is_err());
    }

    #[tokio::test]
    async fn a_shim_without_containers_ends_by_itself() {
        let containers = containers();
        let is_deserted = async || {
            timeout(Duration::from_millis(20), containers.deserted())
                .await
                .is_ok()
        };
        containers.register().deserted_at = Instant::now();
        let name = containers.reserve("a").unwrap();
        assert!(!is_deserted().await);
        drop(name);
        assert!(!is_deserted().await, "containerd may still request it");
        containers.register().deserted_at = Instant::now();
        containers.deserted().await;
        assert!(containers.reserve("b").is_err());
    }
}
