//! The times of the next surveys and refreshes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sources::watch::Completeness;
use crate::threads::Backoff;
use crate::token_bucket::TokenBucket;

/// The time for which a new file may stay open for writing. A new link has no event for a close.
const WRITTEN: Duration = Duration::from_secs(1);

/// Limit of refreshes of a container or pod without a pause. Further refreshes are paced, because a
/// container may be able to replace the file all the time.
const REFRESH_BURST: u32 = 5;

/// The interval of paced refreshes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// The times after the start of a pod's container at which the runtime lists it. Containers that
/// start all the time cause one pod list a second.
pub const AFTER_START: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

/// The first pause before a survey that failed is tried again, and the longest.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// A refresh that is planned.
#[derive(Debug, PartialEq, Eq)]
struct PlannedRefresh {
    due: Instant,
    id: String,
    completeness: Completeness,
}

/// The planned surveys and refreshes.
#[derive(Debug)]
pub struct Schedule {
    interval: Duration,
    after_start: &'static [Duration],
    start: Instant,
    /// Sorted.
    surveys: Vec<Instant>,
    retries: Backoff,
    refreshes: Vec<PlannedRefresh>,
    /// The buckets that are not full.
    buckets: HashMap<String, TokenBucket>,
}

impl Schedule {
    /// The first survey is due now. Further surveys follow at this interval, and at these times
    /// after the start of a container.
    pub fn new(interval: Duration, after_start: &'static [Duration], now: Instant) -> Self {
        Self {
            interval,
            after_start,
            start: now,
            surveys: vec![now],
            retries: Backoff::new(RETRY_INTERVAL, MAX_RETRY_INTERVAL),
            refreshes: Vec::new(),
            buckets: HashMap::new(),
        }
    }

    /// A container started or ended. The earliest survey stays: containers that come and go all the
    /// time cannot delay it.
    pub fn plan_surveys(&mut self, now: Instant) {
        let mut planned: Vec<Instant> = self.after_start.iter().map(|after| now + *after).collect();
        if let (Some(first), Some(earliest)) = (planned.first_mut(), self.surveys.first()) {
            *first = (*first).min(*earliest);
        }
        self.surveys = planned;
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

    /// A survey ended. If something could not be read, a further survey follows soon.
    pub fn surveyed(&mut self, is_complete: bool, now: Instant) {
        if is_complete {
            self.retries = Backoff::new(RETRY_INTERVAL, MAX_RETRY_INTERVAL);
            return;
        }
        let again = now + self.retries.after(Duration::ZERO);
        let index = self.surveys.partition_point(|survey| *survey < again);
        self.surveys.insert(index, again);
    }

    /// Plans the refresh of a container whose file was made.
    pub fn plan_refresh_of_made(&mut self, id: &str, now: Instant) {
        let is_same = |planned: &PlannedRefresh| {
            planned.id == id && planned.completeness == Completeness::Made
        };
        self.refreshes.retain(|planned| !is_same(planned));
        self.plan(now + WRITTEN, id, Completeness::Made);
    }

    /// Plans the refresh of a container whose file is complete.
    pub fn plan_refresh(&mut self, id: &str, now: Instant) {
        let is_same = |planned: &PlannedRefresh| {
            planned.id == id && planned.completeness == Completeness::Complete
        };
        if !self.refreshes.iter().any(is_same) {
            self.plan(now, id, Completeness::Complete);
        }
    }

    fn plan(&mut self, due: Instant, id: &str, completeness: Completeness) {
        self.refreshes.push(PlannedRefresh {
            due,
            id: id.to_owned(),
            completeness,
        });
    }

    /// Removes and returns the containers whose refresh is due. A refresh too early after earlier
    /// refreshes is planned again.
    pub fn due(&mut self, now: Instant) -> Vec<String> {
        let due = self
            .refreshes
            .extract_if(.., |planned| planned.due <= now)
            .map(|planned| planned.id);
        let mut due: Vec<String> = due.collect();
        due.sort_unstable();
        due.dedup();
        let since_start = now.saturating_duration_since(self.start);
        self.buckets
            .retain(|_, bucket| !bucket.is_full(since_start));
        let mut paced = Vec::new();
        for id in due {
            let new = || TokenBucket::new(REFRESH_BURST, REFRESH_INTERVAL, since_start);
            let bucket = self.buckets.entry(id.clone()).or_insert_with(new);
            if bucket.take(since_start) {
                paced.push(id);
            } else {
                let later = now + bucket.wait(since_start);
                self.plan(later, &id, Completeness::Complete);
            }
        }
        paced
    }

    /// The time at which something is due.
    pub fn next(&self) -> Instant {
        let refreshes = self.refreshes.iter().map(|planned| planned.due);
        let next = self.surveys.iter().copied().chain(refreshes).min();
        next.unwrap_or_else(|| Instant::now() + self.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER_START: [Duration; 3] = [
        Duration::from_millis(200),
        Duration::from_secs(1),
        Duration::from_secs(5),
    ];

    fn schedule(start: Instant) -> Schedule {
        Schedule::new(Duration::from_secs(300), &AFTER_START, start)
    }

    #[test]
    fn containers_that_come_and_go_do_not_delay_the_survey() {
        let start = Instant::now();
        let mut schedule = schedule(start);
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
    fn a_survey_that_failed_is_tried_again_with_growing_pauses() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let (mut now, mut pauses) = (start, Vec::new());
        for _ in 0..8 {
            assert!(schedule.is_survey_due(now));
            schedule.surveyed(false, now);
            pauses.push((schedule.next() - now).as_secs());
            now = schedule.next();
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(schedule.is_survey_due(now));
        schedule.surveyed(true, now);
        schedule.surveys.clear();
        assert!(!schedule.is_survey_due(now));
        assert_eq!(schedule.next(), now + Duration::from_secs(300));
    }

    #[test]
    fn a_made_file_is_refreshed_a_moment_after_its_last_event() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let later = start + Duration::from_millis(500);
        schedule.plan_refresh_of_made("a", start);
        schedule.plan_refresh_of_made("a", later);
        assert!(schedule.due(start + WRITTEN).is_empty());
        assert_eq!(schedule.due(later + WRITTEN), ["a"]);
    }

    /// A container renames a file over its file a thousand times a second, and makes one as often.
    #[test]
    fn a_file_that_is_replaced_all_the_time_is_refreshed_once_a_second() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let mut refreshed = Vec::new();
        for millis in 0..10_000 {
            let now = start + Duration::from_millis(millis);
            schedule.plan_refresh("busy", now);
            schedule.plan_refresh_of_made("busy", now);
            if millis % 1_000 == 0 {
                schedule.plan_refresh("other", now);
            }
            refreshed.extend(schedule.due(now));
        }
        let count = |id: &str| refreshed.iter().filter(|it| *it == id).count();
        let paced = usize::try_from(REFRESH_BURST).unwrap_or_default() + 9;
        assert_eq!((count("busy"), count("other")), (paced, 10));
        // The last change is not lost.
        let later = start + Duration::from_secs(12);
        assert_eq!(schedule.due(later), ["busy"]);
        let idle = start + Duration::from_secs(60);
        assert!(schedule.due(idle).is_empty() && schedule.buckets.is_empty());
    }
}
