//! Remembers the last message about each subject. Surveys and retries find the same faults again;
//! only news are logged, journaled or written as events.

use std::hash::Hash;

use lru::LruCache;
use tracing::warn;

/// Limit of subjects. The findings about a subject that was not checked for the longest time are
/// forgotten: pods and containers come and go.
const MAX_SUBJECTS: usize = 4096;

/// The findings about each subject at its last check.
#[derive(Debug)]
pub struct SayOnce<T, K: Hash + Eq = ()>(LruCache<K, Vec<T>>);

impl<T, K: Hash + Eq> Default for SayOnce<T, K> {
    fn default() -> Self {
        // A bounded cache would reserve memory for all subjects.
        Self(LruCache::unbounded())
    }
}

impl<T: PartialEq + Clone, K: Hash + Eq> SayOnce<T, K> {
    /// The findings about a subject that its last check did not have.
    pub fn news(&mut self, about: K, found: Vec<T>) -> Vec<T> {
        let known = self.0.pop(&about).unwrap_or_default();
        let mut news = found.clone();
        news.retain(|finding| !known.contains(finding));
        if !found.is_empty() {
            self.0.push(about, found);
        }
        if self.0.len() > MAX_SUBJECTS {
            self.0.pop_lru();
        }
        news
    }

    #[cfg(test)]
    pub fn known(&self, about: &K) -> &[T] {
        self.0.peek(about).map_or(&[], Vec::as_slice)
    }
}

impl<K: Hash + Eq> SayOnce<String, K> {
    /// Logs the warnings about a subject that are news.
    pub fn warn(&mut self, about: K, warnings: impl IntoIterator<Item = String>) {
        for warning in self.news(about, Vec::from_iter(warnings)) {
            warn!("{warning}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_is_news() {
        let mut said = SayOnce::default();
        assert_eq!(said.news(1, vec!["a"]), ["a"]);
        assert_eq!(said.news(1, vec!["a", "b"]), ["b"]);
        assert_eq!(said.news(2, vec!["a"]), ["a"], "another subject");
        assert!(said.news(1, vec!["b"]).is_empty());
        assert_eq!(said.news(1, vec!["a"]), ["a"], "it was gone in between");
    }

    #[test]
    fn findings_about_subjects_that_are_gone_are_forgotten() {
        let mut said = SayOnce::default();
        for container in 0..2 * MAX_SUBJECTS {
            said.news(container, vec!["why"]);
            said.news(usize::MAX, vec!["why"]);
        }
        assert_eq!(said.0.len(), MAX_SUBJECTS);
        assert!(said.news(usize::MAX, vec!["why"]).is_empty());
        assert_eq!(said.news(0, vec!["why"]), ["why"]);
    }
}
