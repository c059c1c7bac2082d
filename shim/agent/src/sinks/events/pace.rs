//! The bound on the requests of a node: plain data, with the time and random numbers passed in.
//!
//! | | with `requests-per-minute = 6` |
//! |---|---|
//! | the first request after a rest | after 0 to 5 s |
//! | the next requests | every 10 s |
//! | after a failure | 5 s, 10 s, ... 5 min, each times 0.5 to 1 |
//!
//! The random parts spread the requests of many nodes that notice the same thing at the same time.

use std::time::Duration;

const FIRST_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// Decides when the next request may be sent.
#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    earliest: Duration,
    failures: u32,
}

impl Pace {
    /// A pace for this number of requests in a minute.
    pub fn new(per_minute: u32) -> Self {
        Self {
            interval: Duration::from_secs(60) / per_minute.max(1),
            earliest: Duration::ZERO,
            failures: 0,
        }
    }

    /// An event waits where none waited before.
    pub fn begin(&mut self, now: Duration, random: f64) {
        self.earliest = self.earliest.max(now + self.interval.mul_f64(random / 2.0));
    }

    /// The time until the next request may be sent.
    pub fn wait(&self, now: Duration) -> Duration {
        self.earliest.saturating_sub(now)
    }

    /// A request is sent, after the wait.
    pub fn requested(&mut self, now: Duration) {
        self.earliest = now + self.interval;
    }

    /// The API server answered it.
    pub fn answered(&mut self) {
        self.failures = 0;
    }

    /// It did not, or demands a pause.
    pub fn failed(&mut self, now: Duration, requested_pause: Option<Duration>, random: f64) {
        let pause = FIRST_PAUSE
            .saturating_mul(1 << self.failures.min(10))
            .min(MAX_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let pause = pause.mul_f64((1.0 + random) / 2.0);
        let pause = pause.max(requested_pause.unwrap_or_default().min(MAX_PAUSE));
        self.earliest = self.earliest.max(now + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// The number of requests that a node which always has an event sends in an hour.
    fn requests_in_an_hour(fails: bool) -> u32 {
        let (mut pace, mut now, mut requests) = (Pace::new(6), Duration::ZERO, 0);
        pace.begin(now, 0.5);
        loop {
            now += pace.wait(now);
            if now >= HOUR {
                return requests;
            }
            pace.requested(now);
            requests += 1;
            match fails {
                true => pace.failed(now, None, 0.0),
                false => pace.answered(),
            }
        }
    }

    #[test]
    fn the_bound_is_kept() {
        assert_eq!(requests_in_an_hour(false), 360);
    }

    #[test]
    fn an_hour_without_an_api_server_costs_few_requests() {
        let requests = requests_in_an_hour(true);
        assert!((12..=32).contains(&requests), "{requests}");
    }

    #[test]
    fn a_requested_pause_is_kept_up_to_the_longest() {
        let mut pace = Pace::new(600);
        pace.failed(Duration::ZERO, Some(Duration::from_secs(60)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), Duration::from_secs(60));
        pace.failed(Duration::ZERO, Some(Duration::from_secs(100_000)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), MAX_PAUSE);
    }
}
