//! The sources of the binds of new containers, from the create of each until its start, and the
//! mounts that were checked, until the runtime has the changes of all plugins.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_guard::ExpectedSources;
use lru::LruCache;

use super::messages::NriMount;

/// Limit of containers between their create and their start. The oldest are forgotten: a create
/// that failed has no start.
const MAX_CONTAINERS: NonZeroUsize = NonZeroUsize::new(128).unwrap();

/// Limit of binds of these containers. A pod can have thousands of binds, and the kubelet repeats a
/// failed create with a new container id.
const MAX_KEPT_BINDS: usize = 8_000;

/// The expected sources and the hashes of the checked mounts, by the containers' ids.
#[derive(Debug)]
pub struct ExpectedOfContainers {
    sources: Mutex<LruCache<String, ExpectedSources>>,
    checked: Mutex<LruCache<String, HashSet<u64>>>,
    hasher: RandomState,
}

impl Default for ExpectedOfContainers {
    fn default() -> Self {
        Self {
            sources: Mutex::new(LruCache::new(MAX_CONTAINERS)),
            checked: Mutex::new(LruCache::new(MAX_CONTAINERS)),
            hasher: RandomState::new(),
        }
    }
}

impl ExpectedOfContainers {
    /// The hash of a mount.
    pub fn hash_of(&self, mount: &NriMount) -> u64 {
        self.hasher.hash_one(mount)
    }

    /// Keeps which mounts of a container were checked.
    pub fn keep_checked(&self, id: &str, mounts: &[NriMount]) {
        let hashes = mounts.iter().map(|mount| self.hash_of(mount)).collect();
        self.checked().push(id.to_owned(), hashes);
    }

    /// The hashes of the checked mounts; none for a container without a checked create.
    pub fn take_checked(&self, id: &str) -> HashSet<u64> {
        self.checked().pop(id).unwrap_or_default()
    }

    fn checked(&self) -> MutexGuard<'_, LruCache<String, HashSet<u64>>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the sources of a container that is about to be created, beside its earlier ones. If
    /// there are too many, those of the container with the most binds are forgotten.
    pub fn keep(&self, id: String, mut sources: ExpectedSources) {
        let mut known = self.known();
        if let Some(earlier) = known.pop(&id) {
            sources.extend(earlier);
        }
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
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
