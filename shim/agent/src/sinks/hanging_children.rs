//! The children that hang in containers. No second child enters such a container.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_guard::refresh::Abandoned;
use bindguard_operator::agent_status::HangingChild;

/// The children that hang, by the ids of their containers.
#[derive(Debug, Default)]
pub struct HangingChildren(Mutex<BTreeMap<String, Child>>);

#[derive(Debug)]
struct Child {
    /// The container's name for people.
    container: String,
    abandoned: Abandoned,
}

impl HangingChildren {
    /// Remembers the child of a container until the child ends.
    pub fn add(&self, id: &str, container: &str, abandoned: Abandoned) {
        let container = container.to_owned();
        let child = Child {
            container,
            abandoned,
        };
        self.alive().insert(id.to_owned(), child);
    }

    /// True if a child hangs in the container with this id.
    pub fn are_in(&self, id: &str) -> bool {
        self.alive().contains_key(id)
    }

    /// All of them.
    pub fn listed(&self) -> Vec<HangingChild> {
        let alive = self.alive();
        let child = |(id, child): (&String, &Child)| HangingChild {
            container: child.container.clone(),
            id: id.clone(),
            pid: child.abandoned.pid(),
        };
        alive.iter().map(child).collect()
    }

    fn alive(&self) -> MutexGuard<'_, BTreeMap<String, Child>> {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain(|_, child| child.abandoned.is_alive());
        children
    }
}
