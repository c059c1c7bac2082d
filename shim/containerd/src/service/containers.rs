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
    register: Mutex<Register>,
    over: Notify,
}

#[derive(Debug, Default)]
struct Register {
    by_id: HashMap<String, Slot>,
    /// The shim is about to end: a container that came now would have nobody.
    closed: bool,
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
        Self { around, register: Mutex::default(), over: Notify::new() }
    }

    /// The container of that name.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Task>, Refusal> {
        match self.register().by_id.get(id) {
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
            self.register().by_id.remove(id);
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
        let mut register = self.register();
        if now || register.by_id.is_empty() {
            register.closed = true;
            self.over.notify_one();
        }
    }

    /// Takes no more containers, if none is alive; answers whether that is so.
    pub(crate) fn close_if_idle(&self) -> bool {
        let mut register = self.register();
        let busy = register.by_id.values().any(|slot| match slot {
            Slot::BeingCreated => true,
            Slot::Ready(task) => task.is_alive(),
        });
        register.closed |= !busy;
        !busy
    }

    /// Resolves when the shim is to end.
    pub(crate) async fn shutdown_requested(&self) {
        self.over.notified().await;
    }

    fn reserve(&self, id: &str) -> Result<Place<'_>, Refusal> {
        let mut register = self.register();
        if register.closed {
            return Err(Refusal::shutting_down());
        }
        match register.by_id.entry(id.to_owned()) {
            Entry::Occupied(_) => Err(TaskError::AlreadyExists(id.to_owned()).into()),
            Entry::Vacant(free) => {
                free.insert(Slot::BeingCreated);
                Ok(Place { containers: self, id: id.to_owned() })
            }
        }
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reserved name; free again when dropped, be it by a panic.
struct Place<'a> {
    containers: &'a Containers,
    id: String,
}

impl Place<'_> {
    fn fill(self, task: Arc<Task>) {
        self.containers.register().by_id.insert(self.id.clone(), Slot::Ready(task));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut register = self.containers.register();
        if matches!(register.by_id.get(&self.id), Some(Slot::BeingCreated)) {
            register.by_id.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{events::Events, exits::Exits};

    fn containers() -> Containers {
        let events = Events::publish_to("/nonexistent".into(), "n".into());
        let exits = Arc::new(Exits::default());
        Containers::new(Surroundings { namespace: "n".into(), events, exits, deadline: Duration::from_secs(1) })
    }

    #[tokio::test]
    async fn a_name_is_taken_from_the_beginning_and_free_after_a_failure() {
        let containers = containers();
        let place = containers.reserve("a").ok();
        assert!(containers.reserve("a").is_err());
        assert!(containers.find("a").is_err());
        containers.shut_down(false);
        assert!(!containers.close_if_idle());
        drop(place);
        assert!(containers.reserve("a").is_ok());
    }

    #[tokio::test]
    async fn a_shim_that_ends_takes_no_more_containers() {
        let containers = containers();
        containers.shut_down(false);
        containers.shutdown_requested().await;
        assert!(containers.reserve("a").is_err());
    }
}
