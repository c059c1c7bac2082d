//! Remembers the known occurrences: each survey finds them again, and only a change is an event.

use std::hash::Hash;

use lru::LruCache;

use super::objects::MAX_OBJECTS;
use super::occurrence::Occurrence;

/// The occurrences of each place at the last check.
#[derive(Debug)]
pub struct Standing<K: Hash + Eq>(LruCache<K, Vec<Occurrence>>);

impl<K: Hash + Eq> Default for Standing<K> {
    fn default() -> Self {
        Self(LruCache::new(MAX_OBJECTS))
    }
}

impl<K: Hash + Eq> Standing<K> {
    /// The occurrences that this place did not have before. An occurrence that is over is new each
    /// time.
    pub fn changed(&mut self, place: K, occurrences: Vec<Occurrence>) -> Vec<Occurrence> {
        let known = self.0.pop(&place).unwrap_or_default();
        let new = occurrences
            .iter()
            .filter(|occurrence| !known.contains(occurrence))
            .cloned()
            .collect();
        let standing: Vec<_> = occurrences
            .into_iter()
            .filter(|occurrence| !occurrence.is_over())
            .collect();
        if !standing.is_empty() {
            self.0.push(place, standing);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use bindguard_core::identity::PodName;

    use super::super::occurrence::Reason;
    use super::*;

    fn dead(message: &str) -> Occurrence {
        Occurrence {
            pod: PodName::of_uid("u"),
            container: None,
            reason: Reason::BindSourceDead,
            message: message.to_owned(),
        }
    }

    #[test]
    fn only_a_change_is_new() {
        let mut standing = Standing::default();
        assert_eq!(standing.changed(1, vec![dead("a")]), [dead("a")]);
        assert_eq!(standing.changed(1, vec![dead("a"), dead("b")]), [dead("b")]);
        assert_eq!(standing.changed(2, vec![dead("a")]), [dead("a")]);
        assert_eq!(standing.changed(1, vec![dead("b")]), []);
        assert_eq!(
            standing.changed(1, vec![dead("a")]),
            [dead("a")],
            "it was gone in between"
        );
        let repaired = Occurrence {
            reason: Reason::BindMountRepaired,
            ..dead("r")
        };
        assert!(
            (0..2).all(|_| standing.changed(3, vec![repaired.clone()]).len() == 1),
            "a repair is new each time"
        );
    }
}
