//! The sources of the binds of new containers, from the create of each until its start.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_guard::ExpectedSources;
use lru::LruCache;

/// Limit of containers between their create and their start. The oldest are forgotten: a create
/// that failed has no start.
const MAX_CONTAINERS: NonZeroUsize = NonZeroUsize::new(128).unwrap();

/// Limit of binds of these containers. A pod can have thousands of binds, and the kubelet repeats a
/// failed create with a new container id.
const MAX_KEPT_BINDS: usize = 8_000;

/// The expected sources by the containers' ids.
#[derive(Debug)]
pub struct ExpectedOfContainers(Mutex<LruCache<String, ExpectedSources>>);

impl Default for ExpectedOfContainers {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MAX_CONTAINERS)))
    }
}

impl ExpectedOfContainers {
    /// Keeps the sources of a container that is about to be created. If there are too many, those of
    /// the container with the most binds are forgotten.
    pub fn keep(&self, id: String, sources: ExpectedSources) {
        let mut known = self.known();
        known.push(id, sources);
        loop {
            let (mut all, mut most) = (0, (0, String::new()));
            for (id, sources) in known.iter() {
                all += sources.binds();
                if sources.binds() >= most.0 {
                    most = (sources.binds(), id.clone());
                }
            }
            if all <= MAX_KEPT_BINDS {
                return;
            }
            known.pop(&most.1);
        }
    }

    /// The sources of a container that is about to start. `None` for a container without a checked
    /// create.
    pub fn take(&self, id: &str) -> Option<ExpectedSources> {
        self.known().pop(id)
    }

    fn known(&self) -> MutexGuard<'_, LruCache<String, ExpectedSources>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
