//! The time at which the mounts of the host are listed next.
//!
//! Mounts come in groups: a pod start makes a dozen mounts. Changes within a moment are handled
//! together. A node on which mounts change all the time must cost only a small share of a
//! processor.

use std::time::{Duration, Instant};

/// The pause after work, as a multiple of the time that the work took.
const PAUSE_FACTOR: u32 = 100;

/// Limit of that pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Changes within this time cause a single list.
const SETTLE_INTERVAL: Duration = Duration::from_millis(10);

/// The pause after work that a container can cause all the time: the work then needs at most 1 % of a
/// processor. The limit is for a busy node, where short work can take long.
pub fn pause_after(work: Duration) -> Duration {
    (work * PAUSE_FACTOR).min(MAX_PAUSE)
}

/// The last list, and the change since.
#[derive(Debug, Default)]
pub struct Settling {
    not_before: Option<Instant>,
    due: Option<Instant>,
}

impl Settling {
    /// The mounts have changed. Later changes do not delay the list.
    pub fn changed(&mut self, now: Instant) {
        let settled = now + SETTLE_INTERVAL;
        let due = self.not_before.map_or(settled, |it| it.max(settled));
        self.due.get_or_insert(due);
    }

    /// The time of the next list; `None` without a change.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// A list began and ended at these times.
    pub fn listed(&mut self, began: Instant, ended: Instant) {
        // The places that are new cost about as much again as the list.
        let pause = pause_after(2 * ended.saturating_duration_since(began));
        self.not_before = Some(ended + pause);
        self.due = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_moment_are_one_list() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        assert_eq!(settling.due(), None);
        for millis in [0, 5, 9] {
            settling.changed(start + Duration::from_millis(millis));
        }
        assert_eq!(settling.due(), Some(start + SETTLE_INTERVAL));
        settling.listed(start, start);
        assert_eq!(settling.due(), None);
    }

    #[test]
    fn lists_take_half_a_percent_of_the_time() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        let ended = start + Duration::from_millis(2);
        settling.listed(start, ended);
        settling.changed(ended);
        assert_eq!(settling.due(), Some(ended + Duration::from_millis(400)));
        settling.listed(start, start + Duration::from_secs(60));
        settling.changed(start + Duration::from_secs(60));
        assert_eq!(settling.due(), Some(start + Duration::from_secs(61)));
        let late = start + Duration::from_secs(600);
        settling.listed(start, ended);
        settling.changed(late);
        assert_eq!(settling.due(), Some(late + SETTLE_INTERVAL));
    }
}
