//! Merges occurrences into events, as the kubelet's recorder does (client-go,
//! `tools/record/events_cache.go`):
//!
//! ```text
//! occurrence ─► similar ones become one ─► equal ones are counted ─► too many of one pod are dropped ─► event
//!               10 messages in 10 min      by a patch of `count`     burst 25, then one in 5 min
//! ```
//!
//! Plain data with the time passed in. Every cache has a limit: the events of a pod that is gone
//! leave with the oldest ones.

mod similar;
mod spam;

use std::num::NonZeroUsize;
use std::time::Duration;

use bindguard_core::text::cut;
use lru::LruCache;

use self::similar::SimilarEvents;
use self::spam::SpamFilter;
use super::occurrence::{Moment, Occurrence, PodIdentity, Reason};

/// The limit of each cache. client-go has 4096 for a whole cluster's controller; a node has some
/// hundred pods.
pub(super) const CAPACITY: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The limit of a message in bytes: the API's.
const LONGEST: usize = 1000;

/// An event as the API server is to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The key of its object.
    pub key: EventKey,
    /// Its pod.
    pub pod: PodIdentity,
    /// The name of its object.
    pub name: String,
    /// Its message.
    pub message: String,
    /// The number of occurrences.
    pub count: u32,
    /// The first one, since 1970.
    pub first: Duration,
    /// The last one, since 1970.
    pub last: Duration,
    /// True if the API server has the object.
    pub exists: bool,
}

/// Events with the same key share an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// The pod's uid.
    pub pod_uid: String,
    /// The container.
    pub container: Option<String>,
    /// The reason.
    pub reason: Reason,
    /// The message; `None` for similar events.
    pub message: Option<String>,
}

/// The object of a key, as it was last.
#[derive(Debug)]
struct Observed {
    name: String,
    count: u32,
    first: Duration,
    exists: bool,
}

/// The state of all merging.
#[derive(Debug)]
pub struct Correlator {
    similar: SimilarEvents,
    observed: LruCache<EventKey, Observed>,
    spam: SpamFilter,
    /// Makes two names of one nanosecond differ.
    named: u64,
}

impl Default for Correlator {
    fn default() -> Self {
        let (similar, spam) = Default::default();
        Self {
            similar,
            observed: LruCache::new(CAPACITY),
            spam,
            named: 0,
        }
    }
}

impl Correlator {
    /// The event that an occurrence becomes; `None` if its pod has too many.
    pub fn correlate(
        &mut self,
        occurrence: Occurrence,
        pod: PodIdentity,
        now: Moment,
    ) -> Option<Event> {
        let message = cut(&occurrence.message, LONGEST).into_owned();
        let reason = occurrence.reason;
        let (message, key) = match self
            .similar
            .are_many(&pod.uid, reason, &message, now.uptime)
        {
            false => {
                let key = EventKey {
                    pod_uid: pod.uid.clone(),
                    container: occurrence.container,
                    reason,
                    message: Some(message.clone()),
                };
                (message, key)
            }
            true => {
                let key = EventKey {
                    pod_uid: pod.uid.clone(),
                    container: None,
                    reason,
                    message: None,
                };
                (
                    cut(
                        &format!("(combined from similar events): {message}"),
                        LONGEST,
                    )
                    .into_owned(),
                    key,
                )
            }
        };
        let event = self.observe(key, pod, message, now);
        self.spam
            .admits(&event.pod.uid, now.uptime)
            .then_some(event)
    }

    fn observe(&mut self, key: EventKey, pod: PodIdentity, message: String, now: Moment) -> Event {
        let last = now.since_epoch;
        if let Some(known) = self.observed.get_mut(&key) {
            known.count = known.count.saturating_add(1);
            let (name, count, first, exists) =
                (known.name.clone(), known.count, known.first, known.exists);
            return Event {
                key,
                pod,
                name,
                message,
                count,
                first,
                last,
                exists,
            };
        }
        self.named += 1;
        let name = format!(
            "{}.{:x}",
            pod.name,
            last.as_nanos().wrapping_add(u128::from(self.named))
        );
        let observed = Observed {
            name: name.clone(),
            count: 1,
            first: last,
            exists: false,
        };
        self.observed.push(key.clone(), observed);
        Event {
            key,
            pod,
            name,
            message,
            count: 1,
            first: last,
            last,
            exists: false,
        }
    }

    /// Remembers whether the API server has the object of an event.
    pub fn set_exists(&mut self, key: &EventKey, exists: bool) {
        if let Some(known) = self.observed.get_mut(key) {
            known.exists = exists;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::super::occurrence::Subject;
    use super::*;

    fn pod(uid: &str) -> PodIdentity {
        PodIdentity {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            uid: uid.to_owned(),
        }
    }

    fn at(seconds: u64) -> Moment {
        let uptime = Duration::from_secs(seconds);
        Moment {
            since_epoch: uptime + Duration::from_secs(1_800_000_000),
            uptime,
        }
    }

    fn occurrence(uid: &str, message: &str) -> Occurrence {
        Occurrence {
            subject: Subject::Uid(uid.to_owned()),
            container: Some("app".to_owned()),
            reason: Reason::BindMountRepaired,
            message: message.to_owned(),
        }
    }

    fn correlate(
        correlator: &mut Correlator,
        uid: &str,
        message: &str,
        seconds: u64,
    ) -> Option<Event> {
        correlator.correlate(occurrence(uid, message), pod(uid), at(seconds))
    }

    #[test]
    fn equal_occurrences_are_counted_in_one_object() {
        let mut correlator = Correlator::default();
        let first = correlate(&mut correlator, "u", "a", 0).unwrap();
        correlator.set_exists(&first.key, true);
        let second = correlate(&mut correlator, "u", "a", 5).unwrap();
        assert_eq!(
            (first.count, first.exists, second.count, second.exists),
            (1, false, 2, true)
        );
        assert_eq!((&first.name, first.first), (&second.name, second.first));
        assert_eq!(second.last - second.first, Duration::from_secs(5));
        let other = correlate(&mut correlator, "u", "b", 5).unwrap();
        assert_ne!(other.name, first.name);
        assert_eq!(other.count, 1);
    }

    #[test]
    fn the_tenth_similar_one_in_ten_minutes_is_combined() {
        let mut correlator = Correlator::default();
        for number in 0..9 {
            let event = correlate(&mut correlator, "u", &number.to_string(), number).unwrap();
            assert_eq!(event.message, number.to_string());
        }
        let tenth = correlate(&mut correlator, "u", "9", 9).unwrap();
        let eleventh = correlate(&mut correlator, "u", "10", 10).unwrap();
        assert_eq!(tenth.message, "(combined from similar events): 9");
        assert_eq!(
            (tenth.count, eleventh.count, &eleventh.name),
            (1, 2, &tenth.name)
        );
        let of_another_pod = correlate(&mut correlator, "v", "10", 10).unwrap();
        assert_eq!(of_another_pod.message, "10");
        let later = correlate(&mut correlator, "u", "11", 10 + 601).unwrap();
        assert_eq!(
            later.message, "11",
            "the similar ones are forgotten after ten minutes"
        );
    }

    #[test]
    fn a_pod_has_25_events_and_one_more_every_five_minutes() {
        let mut correlator = Correlator::default();
        let admitted = (0..100)
            .filter(|_| correlate(&mut correlator, "u", "a", 0).is_some())
            .count();
        assert_eq!(admitted, 25);
        assert!(
            correlate(&mut correlator, "v", "a", 0).is_some(),
            "another pod has its own"
        );
        assert!(correlate(&mut correlator, "u", "a", 299).is_none());
        assert_eq!(
            correlate(&mut correlator, "u", "a", 301).unwrap().count,
            102,
            "dropped ones are counted"
        );
    }

    /// The wall clock steps forward and back by an hour: no limit ends early or late, and every
    /// event has its own object.
    #[test]
    fn steps_of_the_wall_clock_change_no_limit() {
        let mut correlator = Correlator::default();
        let (mut names, start) = (HashSet::new(), Duration::from_secs(1_800_000_000));
        let hour = Duration::from_secs(3600);
        let mut admitted = 0;
        for (number, since_epoch) in [start, start + hour, start, start - hour, start]
            .into_iter()
            .cycle()
            .take(100)
            .enumerate()
        {
            let occurrence = occurrence("u", &(number % 5).to_string());
            let event = correlator.correlate(
                occurrence,
                pod("u"),
                Moment {
                    since_epoch,
                    uptime: Duration::from_secs(1),
                },
            );
            let Some(event) = event else { continue };
            admitted += 1;
            assert_eq!(
                event.count as usize,
                number / 5 + 1,
                "an occurrence is lost or counted twice"
            );
            assert_eq!(
                event.last, since_epoch,
                "the time stamp is the wall clock's"
            );
            names.insert(event.name);
        }
        assert_eq!((admitted, names.len()), (25, 5));
    }

    #[test]
    fn similar_events_are_combined_across_steps_of_the_wall_clock() {
        let mut correlator = Correlator::default();
        let clocks = [1_800_000_000, 1_800_003_600, 1_799_996_400].map(Duration::from_secs);
        let messages =
            (0..10)
                .zip(clocks.into_iter().cycle())
                .filter_map(|(number, since_epoch)| {
                    let now = Moment {
                        since_epoch,
                        uptime: Duration::from_secs(number),
                    };
                    correlator
                        .correlate(occurrence("u", &number.to_string()), pod("u"), now)
                        .map(|event| event.message)
                });
        assert_eq!(
            messages.last().as_deref(),
            Some("(combined from similar events): 9")
        );
    }

    #[test]
    fn a_long_message_is_cut_to_what_the_api_accepts() {
        let event = correlate(&mut Correlator::default(), "u", &"x".repeat(5000), 0).unwrap();
        assert!(event.message.len() <= 1024);
    }

    proptest! {
        /// A day of any occurrences: memory is bounded, and no pod gets more than its bucket has.
        #[test]
        fn caches_stay_within_their_limits(steps in prop::collection::vec((0_u32..40, 0_u32..50, 0_u64..60), 1..2000)) {
            let mut correlator = Correlator::default();
            let (mut now, mut admitted) = (0, std::collections::HashMap::<u32, u64>::new());
            for (uid, message, pause) in steps {
                now += pause;
                if correlate(&mut correlator, &uid.to_string(), &message.to_string(), now).is_some() {
                    *admitted.entry(uid).or_default() += 1;
                }
                prop_assert!(correlator.observed.len() <= CAPACITY.get());
            }
            for count in admitted.values() {
                prop_assert!(*count <= 25 + now / 300 + 1);
            }
        }
    }
}
