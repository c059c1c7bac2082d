//! Kubernetes events on the pods of this node.
//!
//! ```text
//! journal ─────┐
//! re-binds ────┼─► Events ─► recorder: names of the pod ─► objects ─► pace of the node ─► API server
//! refreshes ───┤   never     (CRI, cached)                (counted)                       create, patch
//! survey ──────┘   waits
//! ```
//!
//! Threads hand over occurrences and go on: an API server that is slow, down or hostile costs
//! events, and nothing else.

mod from_reports;
mod recorder;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::time::Duration;

use bindguard_core::identity::PodName;
use bindguard_core::text::cut;
use lru::LruCache;
use serde::Serialize;

use crate::log::SayOnce;

pub use crate::sinks::events::from_reports::{
    from_binds, from_ignored_request, from_journal, from_keeper, from_refresh, from_survey,
};
pub use crate::sinks::events::recorder::start;

// An occurrence that is worth an event on a pod.

/// The reason of an event: `reason` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Reason {
    /// A bind mount was repaired before a create, or by the agent.
    BindMountRepaired,
    /// Policy refused the container.
    ContainerRefused,
    /// A bind mount is stale and stays so.
    BindMountNotRepaired,
    /// The file server or FUSE daemon of a volume does not answer.
    BindSourceDead,
    /// A volume that must be mounted is not.
    VolumeNotMounted,
    /// A container keeps the host's mounts alive.
    HostMountsPinned,
    /// The kubelet will remove files of the host with the pod, or cannot delete the pod.
    MountBelowEmptyDir,
    /// The runtime mounted something else than the spec says.
    BindMountWrong,
    /// A running container got the current file.
    BindMountRefreshed,
    /// A running container still shows an old file.
    BindMountNotRefreshed,
    /// A running container got the current file, and its application does not know.
    ApplicationNotNotified,
    /// An annotation for live refresh has no effect.
    RefreshRequestIgnored,
}

/// The type of an event: `type` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EventType {
    /// Nothing is wrong any more.
    Normal,
    /// Something is.
    Warning,
}

impl Reason {
    /// The type of the event. True for what is over, false for a state: an event with an equal message
    /// later is a new occurrence.
    fn properties(self) -> (EventType, bool) {
        match self {
            Self::BindMountRepaired | Self::BindMountRefreshed => (EventType::Normal, true),
            Self::BindMountWrong | Self::ApplicationNotNotified | Self::ContainerRefused => {
                (EventType::Warning, true)
            }
            Self::BindMountNotRepaired
            | Self::BindSourceDead
            | Self::VolumeNotMounted
            | Self::HostMountsPinned
            | Self::BindMountNotRefreshed
            | Self::RefreshRequestIgnored
            | Self::MountBelowEmptyDir => (EventType::Warning, false),
        }
    }

    pub fn event_type(self) -> EventType {
        self.properties().0
    }
}

/// An occurrence on a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Occurrence {
    /// The pod, at least by its uid.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: Option<String>,
    pub reason: Reason,
    /// One or two sentences for the pod's owner.
    pub message: String,
}

/// The time since 1970, and a time that no step of the clock changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// For the API's objects.
    pub since_epoch: Duration,
    /// For intervals.
    pub uptime: Duration,
}

/// The occurrences of each place at its last check. Each survey finds them again.
pub type Standing<K = ()> = SayOnce<K>;

/// The occurrences that a place did not have before. An occurrence that is over is news each time.
pub fn news<K: Hash + Eq>(
    standing: &mut Standing<K>,
    place: K,
    mut occurrences: Vec<Occurrence>,
) -> Vec<Occurrence> {
    let mut states = occurrences.clone();
    states.retain(|occurrence| !occurrence.reason.properties().1);
    occurrences.retain(|occurrence| occurrence.reason.properties().1);
    occurrences.extend(standing.news(place, states));
    occurrences
}

// The event objects of this node's pods: plain data, with the time passed in.
//
// ```text
// occurrence ─► object of its container and reason: count, last time, last message ─► waits for a request
// ```
//
// A container that has the same trouble with ten files is one object with a count of ten and the
// newest message; `bindguard diagnose` names every file.

/// The limit of objects. A node has some hundred pods. Beyond the limit, the object that had no
/// occurrence for the longest time is forgotten.
const MAX_OBJECTS: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The limit of a message in bytes: the API's.
const MAX_MESSAGE: usize = 1000;

/// The time without a further occurrence after which an event is no news any more.
const EXPIRY: Duration = Duration::from_secs(600);

/// Occurrences with the same key share an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// The namespace of the pod.
    pub namespace: String,
    pub pod: String,
    pub pod_uid: String,
    pub container: Option<String>,
    pub reason: Reason,
}

/// An event as the API server is to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The key of its object.
    pub key: EventKey,
    /// The name of its object.
    pub name: String,
    /// The message of the last occurrence.
    pub message: String,
    /// The number of occurrences.
    pub count: u32,
    /// The time of the first occurrence, since 1970.
    pub first: Duration,
    /// The time of the last occurrence, since 1970.
    pub last: Duration,
    /// True if the API server has the object.
    pub exists: bool,
    /// The uptime at the last occurrence.
    last_uptime: Duration,
    /// The uptime since which the API server lacks the newest state.
    waits_since: Option<Duration>,
}

/// All objects that had an occurrence lately.
#[derive(Debug)]
pub struct EventObjects(LruCache<EventKey, Event>);

impl Default for EventObjects {
    fn default() -> Self {
        Self(LruCache::new(MAX_OBJECTS))
    }
}

impl EventObjects {
    /// Counts an occurrence. Returns true if a waiting event was forgotten to make room.
    pub fn add(&mut self, key: EventKey, message: &str, now: Moment) -> bool {
        let message = cut(message, MAX_MESSAGE).into_owned();
        if let Some(event) = self.0.get_mut(&key) {
            event.count = event.count.saturating_add(1);
            (event.message, event.last) = (message, now.since_epoch);
            event.last_uptime = now.uptime;
            event.waits_since.get_or_insert(now.uptime);
            return false;
        }
        let event = Event {
            key: key.clone(),
            name: name(&key),
            message,
            count: 1,
            first: now.since_epoch,
            last: now.since_epoch,
            exists: false,
            last_uptime: now.uptime,
            waits_since: Some(now.uptime),
        };
        let forgotten = self.0.push(key, event);
        forgotten.is_some_and(|(_, event)| event.waits_since.is_some())
    }

    /// True if the API server lacks the newest state of an object.
    pub fn is_any_waiting(&self) -> bool {
        let mut events = self.0.iter();
        events.any(|(_, event)| event.waits_since.is_some())
    }

    /// The event to write next: warnings first, then the event that has waited longest.
    pub fn next(&self) -> Option<Event> {
        let events = self.0.iter().map(|(_, event)| event);
        let waiting = events.filter(|event| event.waits_since.is_some());
        let next = waiting.min_by_key(|event| {
            let is_normal = event.key.reason.event_type() == EventType::Normal;
            (is_normal, event.waits_since)
        });
        next.cloned()
    }

    /// Notes that an event waits no longer: the API server refuses it.
    pub fn settle(&mut self, key: &EventKey) {
        if let Some(event) = self.0.peek_mut(key) {
            event.waits_since = None;
        }
    }

    /// Notes that the API server has the object of an event, with this count. The count goes on from
    /// that of an earlier start of the agent.
    pub fn written(&mut self, written: &Event, count: u32) {
        if let Some(event) = self.0.peek_mut(&written.key) {
            event.exists = true;
            if count >= written.count {
                event.count = event.count.saturating_add(count - written.count);
                event.waits_since = None;
            }
        }
    }

    /// Notes that the API server lacks the object of an event.
    pub fn gone(&mut self, key: &EventKey) {
        if let Some(event) = self.0.peek_mut(key) {
            event.exists = false;
        }
    }

    /// Drops waiting events that are no news any more, and returns their number.
    pub fn expire(&mut self, now: Duration) -> usize {
        let mut expired = 0;
        for (_, event) in self.0.iter_mut() {
            let is_old = now.saturating_sub(event.last_uptime) > EXPIRY;
            if is_old && event.waits_since.take().is_some() {
                expired += 1;
            }
        }
        expired
    }
}

/// Every start of the agent finds the same name.
fn name(key: &EventKey) -> String {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    format!("{}.{:016x}", key.pod, hasher.finish())
}

#[cfg(test)]
mod standing_tests {
    use bindguard_core::identity::PodName;

    use super::*;
    use Reason;

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
        assert_eq!(news(&mut standing, 1, vec![dead("a")]), [dead("a")]);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a"), dead("b")]),
            [dead("b")]
        );
        assert_eq!(news(&mut standing, 2, vec![dead("a")]), [dead("a")]);
        assert_eq!(news(&mut standing, 1, vec![dead("b")]), []);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a")]),
            [dead("a")],
            "it was gone in between"
        );
        let repaired = Occurrence {
            reason: Reason::BindMountRepaired,
            ..dead("r")
        };
        assert!(
            (0..2).all(|_| news(&mut standing, 3, vec![repaired.clone()]).len() == 1),
            "a repair is new each time"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::prelude::*;

    use super::*;

    fn key(uid: &str, reason: Reason) -> EventKey {
        EventKey {
            namespace: "default".to_owned(),
            pod: "web".to_owned(),
            pod_uid: uid.to_owned(),
            container: Some("app".to_owned()),
            reason,
        }
    }

    fn at(seconds: u64) -> Moment {
        let uptime = Duration::from_secs(seconds);
        Moment {
            since_epoch: uptime + Duration::from_secs(1_800_000_000),
            uptime,
        }
    }

    fn add(objects: &mut EventObjects, uid: &str, reason: Reason, message: &str, now: Moment) {
        objects.add(key(uid, reason), message, now);
    }

    /// Takes what waits, as a recorder whose requests all succeed.
    fn write_all(objects: &mut EventObjects) -> Vec<Event> {
        let written = std::iter::from_fn(|| {
            let event = objects.next()?;
            objects.written(&event, event.count);
            Some(event)
        });
        written.collect()
    }

    #[test]
    fn a_container_has_one_object_for_each_reason() {
        let mut objects = EventObjects::default();
        for number in 0..200 {
            let message = format!("file {number}");
            let now = at(number);
            add(&mut objects, "u", Reason::BindMountRefreshed, &message, now);
        }
        let written = write_all(&mut objects);
        assert_eq!((written.len(), written[0].count), (1, 200));
        assert_eq!(written[0].message, "file 199");
        assert_eq!(written[0].last - written[0].first, Duration::from_secs(199));
        add(
            &mut objects,
            "u",
            Reason::BindMountRefreshed,
            "again",
            at(200),
        );
        add(&mut objects, "u", Reason::BindSourceDead, "dead", at(201));
        add(
            &mut objects,
            "v",
            Reason::BindMountRefreshed,
            "other",
            at(202),
        );
        let later = write_all(&mut objects);
        let counts: Vec<_> = later
            .iter()
            .map(|event| (event.count, event.exists))
            .collect();
        assert_eq!(counts, [(1, false), (201, true), (1, false)]);
        assert_eq!(later[1].name, written[0].name);
    }

    #[test]
    fn an_object_of_an_earlier_start_is_counted_on() {
        let mut objects = EventObjects::default();
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(0));
        let first = objects.next().unwrap();
        let mut objects = EventObjects::default();
        add(&mut objects, "v", Reason::BindSourceDead, "m", at(9));
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(10));
        let other = objects.next().unwrap();
        objects.settle(&key("v", Reason::BindSourceDead));
        let again = objects.next().unwrap();
        assert_eq!(again.name, first.name);
        assert_ne!(other.name, first.name);
        objects.written(&again, 7);
        assert!(!objects.is_any_waiting());
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(11));
        assert_eq!(objects.next().unwrap().count, 8);
        // The answer to the create was lost.
        objects.written(&objects.next().unwrap(), 1);
        assert!(objects.next().unwrap().exists && objects.next().unwrap().count == 8);
    }

    #[test]
    fn warnings_go_first_then_the_oldest() {
        let mut objects = EventObjects::default();
        for (seconds, (uid, reason)) in [
            ("a", Reason::BindMountRepaired),
            ("b", Reason::BindMountRepaired),
            ("c", Reason::BindSourceDead),
            ("a", Reason::BindMountRepaired),
        ]
        .into_iter()
        .enumerate()
        {
            add(&mut objects, uid, reason, "m", at(seconds as u64));
        }
        let pods = write_all(&mut objects)
            .into_iter()
            .map(|event| event.key.pod_uid);
        assert_eq!(pods.collect::<Vec<_>>(), ["c", "a", "b"]);
        assert!(!objects.is_any_waiting());
    }

    #[test]
    fn an_event_without_news_for_ten_minutes_is_dropped() {
        let mut objects = EventObjects::default();
        add(&mut objects, "old", Reason::BindSourceDead, "m", at(0));
        add(&mut objects, "new", Reason::BindSourceDead, "m", at(0));
        add(&mut objects, "new", Reason::BindSourceDead, "m", at(60));
        let at = Duration::from_secs;
        assert_eq!((objects.expire(at(600)), objects.expire(at(601))), (0, 1));
        assert_eq!(objects.next().unwrap().key.pod_uid, "new");
    }

    /// The wall clock steps back and forth by an hour. Only the time stamps follow it.
    #[test]
    fn a_step_of_the_wall_clock_changes_no_order() {
        let mut objects = EventObjects::default();
        for (uptime, (uid, since_epoch)) in [("a", 7200), ("b", 3600), ("c", 10_800)]
            .into_iter()
            .enumerate()
        {
            let now = Moment {
                since_epoch: Duration::from_secs(since_epoch),
                uptime: Duration::from_secs(uptime as u64),
            };
            add(&mut objects, uid, Reason::BindSourceDead, "m", now);
        }
        let written = write_all(&mut objects);
        let seen = written
            .iter()
            .map(|event| (event.key.pod_uid.as_str(), event.last.as_secs()));
        let expected = [("a", 7200), ("b", 3600), ("c", 10_800)];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_long_message_is_cut_to_what_the_api_accepts() {
        let (mut objects, long) = (EventObjects::default(), "x".repeat(5000));
        add(&mut objects, "u", Reason::BindSourceDead, &long, at(0));
        assert!(objects.next().unwrap().message.len() <= 1024);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No occurrence is lost or counted twice as long as its object is remembered, and no more
        /// objects are remembered than the limit.
        #[test]
        fn all_occurrences_are_counted(uids in prop::collection::vec(0_u32..600, 1..3000)) {
            let (mut objects, mut lost) = (EventObjects::default(), 0);
            for (seconds, uid) in uids.iter().enumerate() {
                let key = key(&uid.to_string(), Reason::BindSourceDead);
                let forgot = objects.add(key, "", at(seconds as u64));
                lost += usize::from(forgot);
            }
            let written = write_all(&mut objects);
            prop_assert!(written.len() <= MAX_OBJECTS.get());
            let counted: usize = written.iter().map(|event| event.count as usize).sum();
            prop_assert!(counted <= uids.len() && (lost > 0 || counted == uids.len()));
        }
    }
}
