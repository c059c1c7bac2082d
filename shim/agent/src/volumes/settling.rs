//! The time of the next look at the mounts of the host.
//!
//! Mounts come in groups: a pod start makes a dozen. The changes of a moment are one, and a node on
//! which mounts change all the time must not cost more than a small share of a processor.

use std::time::{Duration, Instant};

/// Changes within this time are one.
const SETTLE_INTERVAL: Duration = Duration::from_millis(10);

/// The pause after a look, as a multiple of the time that the look took: looks need at most one
/// percent of a processor.
const PAUSE_FACTOR: u32 = 100;

/// Limit of the pause. A look that a busy node delayed says nothing about the next one.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The last look, and the change since.
#[derive(Debug, Default)]
pub struct Settling {
    not_before: Option<Instant>,
    due: Option<Instant>,
}

impl Settling {
    /// The mounts have changed. Later changes do not delay the look.
    pub fn changed(&mut self, now: Instant) {
        let settled = now + SETTLE_INTERVAL;
        let due = self.not_before.map_or(settled, |it| it.max(settled));
        self.due.get_or_insert(due);
    }

    /// The time of the next look; `None` without a change.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// A look began and ended at these times.
    pub fn looked(&mut self, began: Instant, ended: Instant) {
        let pause = ended.saturating_duration_since(began) * PAUSE_FACTOR;
        self.not_before = Some(ended + pause.min(MAX_PAUSE));
        self.due = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_moment_are_one_look() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        assert_eq!(settling.due(), None);
        for millis in [0, 5, 9] {
            settling.changed(start + Duration::from_millis(millis));
        }
        assert_eq!(settling.due(), Some(start + SETTLE_INTERVAL));
        settling.looked(start, start);
        assert_eq!(settling.due(), None);
    }

    #[test]
    fn looks_take_one_percent_of_the_time() {
        let (mut settling, start) = (Settling::default(), Instant::now());
        let ended = start + Duration::from_millis(2);
        settling.looked(start, ended);
        settling.changed(ended);
        assert_eq!(settling.due(), Some(ended + Duration::from_millis(200)));
        settling.looked(start, start + Duration::from_secs(60));
        settling.changed(start + Duration::from_secs(60));
        assert_eq!(settling.due(), Some(start + Duration::from_secs(61)));
        let late = start + Duration::from_secs(600);
        settling.looked(start, ended);
        settling.changed(late);
        assert_eq!(settling.due(), Some(late + SETTLE_INTERVAL));
    }
}
