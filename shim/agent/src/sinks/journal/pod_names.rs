//! The names of pods for the agent's lines of the journal and of the log: the kubelet's folders
//! have only their uids.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use bindguard_core::identity::PodName;
use lru::LruCache;

use crate::pods::PodLookup;

/// Limit of names that are kept.
const MAX_NAMES: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The pause after a CRI that gave no answer: a line without names is better than a line that
/// waits.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Finds the names of pods, and keeps them: a pod is never renamed.
#[derive(Debug)]
pub struct PodNames {
    pods: PodLookup,
    known: LruCache<String, PodName>,
    silent_until: Option<Instant>,
}

impl PodNames {
    /// Knows no pod.
    pub fn new(pods: PodLookup) -> Self {
        Self {
            pods,
            known: LruCache::new(MAX_NAMES),
            silent_until: None,
        }
    }

    /// The names of a pod. `None` if it has no sandbox any more, or the CRI does not answer.
    pub fn of(&mut self, uid: &str) -> Option<PodName> {
        if let Some(pod) = self.known.get(uid) {
            return Some(pod.clone());
        }
        if self
            .silent_until
            .is_some_and(|until| Instant::now() < until)
        {
            return None;
        }
        let answer = self.pods.names(uid);
        self.silent_until = answer.is_err().then(|| Instant::now() + RETRY_INTERVAL);
        let pod = answer.ok()??;
        self.known.push(uid.to_owned(), pod.clone());
        Some(pod)
    }
}
