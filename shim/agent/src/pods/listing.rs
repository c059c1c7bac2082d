//! A listing of the CRI for many pods: after an update of many volumes, single queries would be
//! three for each pod.

use std::collections::HashMap;
use std::time::Instant;

use super::Pod;

/// A running container of a pod, as a list of the CRI names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedContainer {
    /// Its id.
    pub id: String,
    /// Its name in the pod.
    pub name: String,
}

/// The pods of the node at one moment, by their uids, and their running containers, by their
/// sandboxes.
#[derive(Debug)]
pub struct Listing {
    began: Instant,
    pods: HashMap<String, Pod>,
    containers: HashMap<String, Vec<NamedContainer>>,
}

impl Listing {
    /// The lists that were queried at this moment or later.
    pub fn new(
        began: Instant,
        pods: HashMap<String, Pod>,
        containers: HashMap<String, Vec<NamedContainer>>,
    ) -> Self {
        Self {
            began,
            pods,
            containers,
        }
    }

    /// True if the listing has every container that can be stale by an update. A container that
    /// started after the update, and after the re-bind on the host, has the current file.
    pub fn is_enough_for(&self, update: Instant) -> bool {
        self.began >= update
    }

    /// The pod with this uid.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid)
    }

    /// The running containers of a sandbox.
    pub fn containers(&self, sandbox: &str) -> &[NamedContainer] {
        self.containers.get(sandbox).map_or(&[], Vec::as_slice)
    }

    /// True if a container with this id runs.
    pub fn is_running(&self, id: &str) -> bool {
        self.containers
            .values()
            .flatten()
            .any(|container| container.id == id)
    }
}
