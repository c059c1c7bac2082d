//! The names of pods: the kubelet's folders have only their uids.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_operator::cri::CriError;
use lru::LruCache;
use tracing::warn;

use super::Pod;

/// Limit of names that are kept.
const MAX_NAMES: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The pause after a CRI that gave no answer in time: a line without names is better than a line
/// that waits.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The names that are known: a pod is never renamed.
#[derive(Debug)]
pub struct PodNames {
    known: LruCache<String, PodName>,
    silent_until: Option<Instant>,
    /// True if the last query failed: further failures are not logged.
    is_failing: bool,
}

impl Default for PodNames {
    fn default() -> Self {
        Self {
            known: LruCache::new(MAX_NAMES),
            silent_until: None,
            is_failing: false,
        }
    }
}

impl PodNames {
    /// The names of a pod, if they are known.
    pub fn of(&mut self, uid: &str) -> Option<PodName> {
        self.known.get(uid).cloned()
    }

    /// True while no query is made, because the CRI gave no answer in time.
    pub fn is_silent(&self) -> bool {
        let now = Instant::now();
        self.silent_until.is_some_and(|until| now < until)
    }

    /// Keeps the answer to a query, and returns the names. A runtime that starts refuses a query at
    /// once, so the next query may follow at once.
    pub fn add(&mut self, uid: &str, answer: Result<Option<Pod>, CriError>) -> Option<PodName> {
        let failure = answer.as_ref().err();
        self.silent_until = failure
            .filter(|error| !error.is_starting())
            .map(|_| Instant::now() + RETRY_INTERVAL);
        if let Some(error) = failure.filter(|_| !self.is_failing) {
            warn!("name a pod: {}", error_chain(error));
        }
        self.is_failing = failure.is_some();
        let pod = answer.ok()??;
        let names = PodName {
            namespace: Some(pod.namespace),
            name: Some(pod.name),
            uid: Some(uid.to_owned()),
        };
        self.known.push(uid.to_owned(), names.clone());
        Some(names)
    }
}
