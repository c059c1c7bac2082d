//! The times of the next surveys and refreshes.

use std::time::{Duration, Instant};

/// The times after the start of a container at which its state may be complete: its folder appears
/// first, then its spec, then its init process.
const AFTER_START: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(5),
];

/// The time for which a file that was made and not yet closed may be written. A link gets no other
/// event.
const WRITTEN: Duration = Duration::from_secs(1);

/// The planned surveys and refreshes.
#[derive(Debug)]
pub struct Schedule {
    interval: Duration,
    /// Sorted.
    surveys: Vec<Instant>,
    refreshes: Vec<(Instant, String)>,
}

impl Schedule {
    /// The first survey is due now; later ones follow at this interval.
    pub fn new(interval: Duration, now: Instant) -> Self {
        Self {
            interval,
            surveys: vec![now],
            refreshes: Vec::new(),
        }
    }

    /// A container started or ended. The earliest survey stays: containers that come and go all the
    /// time cannot delay it.
    pub fn plan_surveys(&mut self, now: Instant) {
        let planned = AFTER_START.map(|after| now + after);
        let earliest = self
            .surveys
            .first()
            .copied()
            .unwrap_or(planned[0])
            .min(planned[0]);
        self.surveys = vec![earliest, planned[1], planned[2]];
    }

    /// True once for each survey.
    pub fn is_survey_due(&mut self, now: Instant) -> bool {
        let before = self.surveys.len();
        self.surveys.retain(|survey| *survey > now);
        let is_due = self.surveys.len() < before;
        if self.surveys.is_empty() {
            self.surveys.push(now + self.interval);
        }
        is_due
    }

    /// Plans the refresh of a container whose file was made.
    pub fn plan_refresh(&mut self, container: &str, now: Instant) {
        self.refreshes.retain(|(_, planned)| planned != container);
        self.refreshes.push((now + WRITTEN, container.to_owned()));
    }

    /// Removes and returns the containers whose refresh is due.
    pub fn due(&mut self, now: Instant) -> Vec<String> {
        self.refreshes
            .extract_if(.., |(due, _)| *due <= now)
            .map(|(_, container)| container)
            .collect()
    }

    /// The time at which something is due.
    pub fn next(&self) -> Instant {
        let refreshes = self.refreshes.iter().map(|(due, _)| *due);
        let next = self.surveys.iter().copied().chain(refreshes).min();
        next.unwrap_or_else(|| Instant::now() + self.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_that_come_and_go_do_not_delay_the_survey() {
        let start = Instant::now();
        let mut schedule = Schedule::new(Duration::from_secs(300), start);
        assert!(schedule.is_survey_due(start) && !schedule.is_survey_due(start));
        for tenth in 0..10 {
            schedule.plan_surveys(start + Duration::from_millis(10 * tenth));
        }
        assert_eq!(schedule.next(), start + AFTER_START[0]);
        let late = start + Duration::from_secs(2);
        assert!(schedule.is_survey_due(late));
        assert_eq!(
            schedule.next(),
            start + Duration::from_millis(90) + AFTER_START[2]
        );
    }

    #[test]
    fn a_made_file_is_refreshed_a_moment_after_its_last_event() {
        let start = Instant::now();
        let mut schedule = Schedule::new(Duration::from_secs(300), start);
        let later = start + Duration::from_millis(500);
        schedule.plan_refresh("a", start);
        schedule.plan_refresh("a", later);
        assert!(schedule.due(start + WRITTEN).is_empty());
        assert_eq!(schedule.due(later + WRITTEN), ["a"]);
    }
}
