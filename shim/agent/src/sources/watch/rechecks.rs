//! Things that are checked again a moment after an event.

use std::time::{Duration, Instant};

/// The checks that are due later.
#[derive(Debug)]
pub struct Rechecks<T> {
    /// The times after the event.
    after: &'static [Duration],
    planned: Vec<(Instant, T)>,
}

impl<T: PartialEq + Clone> Rechecks<T> {
    /// No check yet. Each event is followed by checks after these times.
    pub fn new(after: &'static [Duration]) -> Self {
        Self {
            after,
            planned: Vec::new(),
        }
    }

    /// Plans the checks after an event. An earlier plan for the same thing is replaced.
    pub fn plan(&mut self, thing: &T, now: Instant) {
        self.planned.retain(|(_, planned)| planned != thing);
        let due = self.after.iter().map(|after| now + *after);
        self.planned.extend(due.map(|due| (due, thing.clone())));
    }

    /// The time of the next check.
    pub fn next(&self) -> Option<Instant> {
        self.planned.iter().map(|(due, _)| *due).min()
    }

    /// Removes and returns the things that are due.
    pub fn due(&mut self, now: Instant) -> Vec<T> {
        self.planned
            .extract_if(.., |(due, _)| *due <= now)
            .map(|(_, thing)| thing)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

    #[test]
    fn a_thing_is_checked_twice_after_its_last_event() {
        let (mut rechecks, start) = (Rechecks::new(&AFTER), Instant::now());
        assert_eq!(rechecks.next(), None);
        (0..1000).for_each(|_| rechecks.plan(&"a", start));
        rechecks.plan(&"b", start + AFTER[0]);
        assert_eq!(rechecks.next(), Some(start + AFTER[0]));
        assert_eq!(rechecks.due(start + AFTER[0]), ["a"]);
        assert_eq!(rechecks.due(start + AFTER[1]), ["a", "b"]);
        assert_eq!(rechecks.due(start + AFTER[0] + AFTER[1]), ["b"]);
        assert_eq!(rechecks.next(), None);
    }
}
