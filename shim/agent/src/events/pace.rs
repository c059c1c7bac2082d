//! The bound on the requests of a node: plain data, with the time and random numbers passed in.
//!
//! | | with `requests-per-minute = 6` |
//! |---|---|
//! | burst | 10 requests |
//! | afterwards | one in 10 s |
//! | between two requests of a burst | 2.5 to 5 s |
//! | before the first one | 0 to 5 s |
//! | after a failure | 5 s, 10 s, ... 5 min, each times 0.5 to 1 |
//!
//! The random parts spread the requests of many nodes that notice the same thing at the same time.

use std::time::Duration;

use super::token_bucket::TokenBucket;

const BURST: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Decides when the next request may be sent.
#[derive(Debug)]
pub struct Pace {
    bucket: TokenBucket,
    interval: Duration,
    earliest: Duration,
    failures: u32,
}

impl Pace {
    /// A pace for this number of requests in a minute.
    pub fn new(per_minute: u32, now: Duration) -> Self {
        let interval = Duration::from_secs(60) / per_minute.max(1);
        Self {
            bucket: TokenBucket::new(BURST, interval, now),
            interval,
            earliest: now,
            failures: 0,
        }
    }

    /// An event waits where none waited before.
    pub fn begin(&mut self, now: Duration, random: f64) {
        self.earliest = self.earliest.max(now + self.interval.mul_f64(random / 2.0));
    }

    /// The time until the next request may be sent.
    pub fn wait(&self, now: Duration) -> Duration {
        self.earliest.saturating_sub(now).max(self.bucket.wait(now))
    }

    /// A request is sent, after the wait.
    pub fn requested(&mut self, now: Duration, random: f64) {
        self.bucket.take(now);
        self.earliest = now + self.interval.mul_f64((1.0 + random) / 4.0);
    }

    /// The API server answered it.
    pub fn answered(&mut self) {
        self.failures = 0;
    }

    /// It did not, or demands a pause.
    pub fn failed(&mut self, now: Duration, requested_pause: Option<Duration>, random: f64) {
        let pause = FIRST_PAUSE
            .saturating_mul(1 << self.failures.min(10))
            .min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let pause = pause.mul_f64((1.0 + random) / 2.0);
        let pause = pause.max(requested_pause.unwrap_or_default().min(LONGEST_PAUSE));
        self.earliest = self.earliest.max(now + pause);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The times of the requests of a node that always has an event, until `end`.
    fn requests(
        pace: &mut Pace,
        end: Duration,
        mut random: impl FnMut() -> f64,
        fails: bool,
    ) -> Vec<Duration> {
        let (mut now, mut times) = (Duration::ZERO, Vec::new());
        pace.begin(now, random());
        loop {
            now += pace.wait(now);
            if now > end {
                return times;
            }
            pace.requested(now, random());
            times.push(now);
            if fails {
                pace.failed(now, None, random());
            } else {
                pace.answered();
            }
        }
    }

    #[test]
    fn an_hour_without_an_api_server_costs_few_requests() {
        let mut pace = Pace::new(6, Duration::ZERO);
        let times = requests(&mut pace, Duration::from_secs(3600), || 0.0, true);
        assert!((12..=32).contains(&times.len()), "{times:?}");
        pace.answered();
        pace.failed(Duration::ZERO, Some(Duration::from_secs(100_000)), 1.0);
        assert!(pace.failures == 1);
    }

    #[test]
    fn a_requested_pause_is_kept_up_to_the_longest() {
        let mut pace = Pace::new(600, Duration::ZERO);
        pace.failed(Duration::ZERO, Some(Duration::from_secs(60)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), Duration::from_secs(60));
        pace.failed(Duration::ZERO, Some(Duration::from_secs(100_000)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), LONGEST_PAUSE);
    }

    proptest! {
        #[test]
        fn the_bound_is_kept(per_minute in 1_u32..=600, seeds in prop::collection::vec(0.0_f64..1.0, 16)) {
            let mut seeds = seeds.into_iter().cycle();
            let end = Duration::from_secs(600);
            let times = requests(&mut Pace::new(per_minute, Duration::ZERO), end, || seeds.next().unwrap_or_default(), false);
            prop_assert!(times.len() as u32 <= BURST + per_minute * 10 + 1);
            let shortest = times.windows(2).map(|pair| pair[1] - pair[0]).min();
            prop_assert!(shortest.is_none_or(|shortest| shortest >= Duration::from_secs(15) / per_minute));
        }
    }
}
