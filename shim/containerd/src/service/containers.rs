//! The containers of this shim: a pod's, or a single one.
//!
//! The map is locked for a look-up and never while a runtime runs, so no container waits for another. A name is taken from
//! the beginning of its `create`: a second create is refused, and the shim does not shut down under the first.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use containerd_shim_protos::api::{CreateTaskRequest, DeleteResponse};
use tokio::sync::Notify;

use super::refusal::Refusal;
use crate::{
    events::timestamp,
    task::{Surroundings, Task, TaskError},
};

/// The containers, and what they share.
#[derive(Debug)]
pub(crate) struct Containers {
    around: Surroundings,
    by_id: Mutex<HashMap<String, Slot>>,
    over: Notify,
}

#[derive(Debug)]
enum Slot {
    /// The name is taken, the container is not there yet.
    BeingCreated,
    Ready(Arc<Task>),
}

impl Containers {
    /// None yet.
    pub(crate) fn new(around: Surroundings) -> Self {
        Self { around, by_id: Mutex::default(), over: Notify::new() }
    }

    /// The container of that name.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Task>, Refusal> {
        match self.by_id().get(id) {
            Some(Slot::Ready(task)) => Ok(Arc::clone(task)),
            Some(Slot::BeingCreated) | None => Err(Refusal::no_container(id)),
        }
    }

    /// Creates a container; answers the pid of its init.
    pub(super) async fn create(&self, request: CreateTaskRequest) -> Result<u32, Refusal> {
        let place = self.reserve(&request.id)?;
        let task = Task::create(&self.around, request).await?;
        let pid = task.pid();
        place.fill(task);
        Ok(pid)
    }

    /// Deletes an exec, or a container with its name.
    pub(super) async fn delete(&self, id: &str, exec_id: &str) -> Result<DeleteResponse, Refusal> {
        let (process, exit) = self.find(id)?.delete(exec_id).await?;
        if exec_id.is_empty() {
            self.by_id().remove(id);
        }
        Ok(DeleteResponse {
            pid: process.pid(),
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map(|exit| timestamp(exit.at)).unwrap_or_default(),
            ..Default::default()
        })
    }

    /// Ends the shim when it has no containers left, or `now`.
    pub(super) fn shut_down(&self, now: bool) {
        if now || self.by_id().is_empty() {
            self.over.notify_one();
        }
    }

    /// Resolves when the shim is to end.
    pub(crate) async fn shutdown_requested(&self) {
        self.over.notified().await;
    }

    /// Is there a container with a living init, or one on its way?
    pub(crate) fn any_alive(&self) -> bool {
        self.by_id().values().any(|slot| match slot {
            Slot::BeingCreated => true,
            Slot::Ready(task) => task.is_alive(),
        })
    }

    fn reserve(&self, id: &str) -> Result<Place<'_>, Refusal> {
        match self.by_id().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(TaskError::AlreadyExists(id.to_owned()).into()),
            Entry::Vacant(free) => {
                free.insert(Slot::BeingCreated);
                Ok(Place { containers: self, id: id.to_owned() })
            }
        }
    }

    fn by_id(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reserved name; free again when dropped, be it by a panic.
struct Place<'a> {
    containers: &'a Containers,
    id: String,
}

impl Place<'_> {
    fn fill(self, task: Arc<Task>) {
        self.containers.by_id().insert(self.id.clone(), Slot::Ready(task));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut by_id = self.containers.by_id();
        if matches!(by_id.get(&self.id), Some(Slot::BeingCreated)) {
            by_id.remove(&self.id);
        }
    }
}
