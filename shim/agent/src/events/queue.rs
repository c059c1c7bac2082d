//! The events that wait for their request.
//!
//! Plain data with the time passed in. It is bounded in length and in time: when the API server was
//! down for an hour, only the events of the last minutes are written.

use std::collections::VecDeque;
use std::time::Duration;

use super::correlator::{Event, EventKey};
use super::occurrence::EventType;

/// The limit of events.
const CAPACITY: usize = 256;

/// The time after which an event is no news any more.
const EXPIRY: Duration = Duration::from_secs(600);

/// The events, in the order of their first occurrence. Each key is there once.
#[derive(Debug, Default)]
pub struct Queue(VecDeque<Waiting>);

#[derive(Debug)]
struct Waiting {
    event: Event,
    since: Duration,
}

impl Queue {
    /// Adds an event, or replaces the earlier state of the same one. Returns one that has no room:
    /// the oldest of type Normal, else the new one.
    pub fn push(&mut self, event: Event, now: Duration) -> Option<Event> {
        if let Some(waiting) = self
            .0
            .iter_mut()
            .find(|waiting| waiting.event.key == event.key)
        {
            *waiting = Waiting { event, since: now };
            return None;
        }
        if self.0.len() < CAPACITY {
            self.0.push_back(Waiting { event, since: now });
            return None;
        }
        let Some(normal) = self.0.iter().position(|waiting| !waiting.is_warning()) else {
            return Some(event);
        };
        let dropped = self.0.remove(normal);
        self.0.push_back(Waiting { event, since: now });
        dropped.map(|waiting| waiting.event)
    }

    /// Puts an event back whose request failed, unless a newer state of it came meanwhile.
    pub fn put_back(&mut self, event: Event, now: Duration) -> Option<Event> {
        match self.contains(&event.key) {
            true => None,
            false if self.0.len() >= CAPACITY => Some(event),
            false => {
                self.0.push_front(Waiting { event, since: now });
                None
            }
        }
    }

    /// The next event: warnings first.
    pub fn pop(&mut self) -> Option<(Event, Duration)> {
        let next = self.0.iter().position(Waiting::is_warning).unwrap_or(0);
        self.0
            .remove(next)
            .map(|waiting| (waiting.event, waiting.since))
    }

    /// Removes the events that have waited too long.
    pub fn expire(&mut self, now: Duration) -> usize {
        let before = self.0.len();
        self.0
            .retain(|waiting| now.saturating_sub(waiting.since) <= EXPIRY);
        before - self.0.len()
    }

    /// True if there is no event.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn contains(&self, key: &EventKey) -> bool {
        self.0.iter().any(|waiting| waiting.event.key == *key)
    }
}

impl Waiting {
    fn is_warning(&self) -> bool {
        self.event.key.reason.event_type() == EventType::Warning
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::super::occurrence::{PodIdentity, Reason};
    use super::*;

    fn event(reason: Reason, message: usize, count: u32) -> Event {
        let pod = PodIdentity {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            uid: "u".to_owned(),
        };
        let key = EventKey {
            pod_uid: "u".to_owned(),
            container: None,
            reason,
            message: Some(message.to_string()),
        };
        let (first, last) = Default::default();
        Event {
            key,
            pod,
            name: "e".to_owned(),
            message: String::new(),
            count,
            first,
            last,
            exists: false,
        }
    }

    #[test]
    fn a_newer_state_replaces_the_one_that_waits() {
        let mut queue = Queue::default();
        (1..=100).for_each(|count| {
            drop(queue.push(event(Reason::BindMountRepaired, 0, count), Duration::ZERO))
        });
        assert_eq!(queue.pop().unwrap().0.count, 100);
        assert!(queue.is_empty());
        queue.push(event(Reason::BindMountRepaired, 0, 3), Duration::ZERO);
        queue.put_back(event(Reason::BindMountRepaired, 0, 2), Duration::ZERO);
        assert_eq!(queue.pop().unwrap().0.count, 3);
        assert!(queue.is_empty());
    }

    #[test]
    fn warnings_go_first_and_stay_when_there_is_no_room() {
        let (mut queue, normal, warning) = (
            Queue::default(),
            Reason::BindMountRepaired,
            Reason::BindSourceDead,
        );
        assert!((0..CAPACITY).all(|message| {
            queue
                .push(event(normal, message, 1), Duration::ZERO)
                .is_none()
        }));
        for message in 0..CAPACITY {
            assert_eq!(
                queue
                    .push(event(warning, message, 1), Duration::ZERO)
                    .unwrap()
                    .key
                    .reason,
                normal
            );
        }
        let last = queue
            .push(event(warning, CAPACITY, 1), Duration::ZERO)
            .unwrap();
        assert_eq!(last, event(warning, CAPACITY, 1));
        assert_eq!(queue.pop().unwrap().0, event(warning, 0, 1));
        queue.push(event(normal, 0, 1), Duration::ZERO);
        assert_eq!(queue.pop().unwrap().0, event(warning, 1, 1));
    }

    #[test]
    fn old_events_are_dropped() {
        let mut queue = Queue::default();
        queue.push(event(Reason::BindSourceDead, 0, 1), Duration::ZERO);
        queue.push(event(Reason::BindSourceDead, 1, 1), Duration::from_secs(60));
        assert_eq!(
            (
                queue.expire(Duration::from_secs(600)),
                queue.expire(Duration::from_secs(601))
            ),
            (0, 1)
        );
        assert_eq!(queue.pop().unwrap().0, event(Reason::BindSourceDead, 1, 1));
    }
}
