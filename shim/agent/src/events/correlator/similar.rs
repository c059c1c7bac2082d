//! Counts different messages with one reason about one pod.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use lru::LruCache;

use super::CAPACITY;
use crate::events::occurrence::Reason;

/// The number of different messages from which on they become one event.
const MANY: usize = 10;

/// The time after which they are forgotten, if no other one comes.
const INTERVAL: Duration = Duration::from_secs(600);

/// The messages of each pod and reason.
#[derive(Debug)]
pub(super) struct SimilarEvents {
    groups: LruCache<(String, Reason), Group>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Group {
    /// Hashes of the messages.
    messages: HashSet<u64>,
    last: Duration,
}

impl Default for SimilarEvents {
    fn default() -> Self {
        Self {
            groups: LruCache::new(CAPACITY),
            hasher: RandomState::new(),
        }
    }
}

impl SimilarEvents {
    /// Adds a message. True if it is one of many.
    pub(super) fn are_many(
        &mut self,
        pod_uid: &str,
        reason: Reason,
        message: &str,
        now: Duration,
    ) -> bool {
        let message = self.hasher.hash_one(message);
        let new = || Group {
            messages: HashSet::new(),
            last: now,
        };
        let group = self
            .groups
            .get_or_insert_mut((pod_uid.to_owned(), reason), new);
        if now.saturating_sub(group.last) > INTERVAL {
            group.messages.clear();
        }
        group.last = now;
        group.messages.insert(message);
        let are_many = group.messages.len() >= MANY;
        // The group does not grow beyond its limit: one of the messages leaves.
        if let Some(one) = group.messages.iter().next().copied().filter(|_| are_many) {
            group.messages.remove(&one);
        }
        are_many
    }
}
