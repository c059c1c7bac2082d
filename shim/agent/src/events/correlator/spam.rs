//! The limit of events about one pod.

use std::time::Duration;

use lru::LruCache;

use super::CAPACITY;
use crate::events::token_bucket::TokenBucket;

const BURST: u32 = 25;
const INTERVAL: Duration = Duration::from_secs(300);

/// A bucket for each pod.
#[derive(Debug)]
pub(super) struct SpamFilter(LruCache<String, TokenBucket>);

impl Default for SpamFilter {
    fn default() -> Self {
        Self(LruCache::new(CAPACITY))
    }
}

impl SpamFilter {
    /// True if one more event about this pod is admitted.
    pub(super) fn admits(&mut self, pod_uid: &str, now: Duration) -> bool {
        let bucket = self.0.get_or_insert_mut(pod_uid.to_owned(), || {
            TokenBucket::new(BURST, INTERVAL, now)
        });
        bucket.take(now)
    }
}
