//! A token bucket: plain data, with the time passed in. The crates for it read the clock
//! themselves.

use std::time::Duration;

/// A bucket that is full at first. It remembers the time at which it will be full again (GCRA,
/// ITU-T I.371): no rounding error gives a token away.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenBucket {
    interval: Duration,
    /// The time that an empty bucket, but for one token, takes to be full.
    room: Duration,
    full: Duration,
}

impl TokenBucket {
    /// A bucket of `burst` tokens, which gets a token in each `interval`.
    pub fn new(burst: u32, interval: Duration, now: Duration) -> Self {
        Self {
            interval,
            room: interval * burst.saturating_sub(1),
            full: now,
        }
    }

    /// Takes a token; false if the bucket is empty.
    pub fn take(&mut self, now: Duration) -> bool {
        let is_there = self.wait(now).is_zero();
        if is_there {
            self.full = self.full.max(now) + self.interval;
        }
        is_there
    }

    /// True if the bucket gets no further token.
    pub fn is_full(&self, now: Duration) -> bool {
        self.full <= now
    }

    /// The time until there is a token.
    pub fn wait(&self, now: Duration) -> Duration {
        self.full.max(now).saturating_sub(now + self.room)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_wait_is_as_long_as_it_takes() {
        let mut bucket = TokenBucket::new(1, SECOND * 10, SECOND);
        assert!(bucket.take(SECOND) && !bucket.take(SECOND * 2));
        let wait = bucket.wait(SECOND * 2);
        assert!(!bucket.take(SECOND * 2 + wait - Duration::from_millis(1)));
        assert!(bucket.take(SECOND * 2 + wait));
        assert!(!bucket.is_full(SECOND * 20) && bucket.is_full(SECOND * 30));
    }

    proptest! {
        #[test]
        fn no_more_than_the_burst_and_the_rate(pauses in prop::collection::vec(0_u64..30_000, 1..200), burst in 1_u32..30) {
            let (mut now, mut taken) = (Duration::ZERO, 0_u32);
            let mut bucket = TokenBucket::new(burst, SECOND * 10, now);
            for pause in pauses {
                now += Duration::from_millis(pause);
                taken += u32::from(bucket.take(now));
                prop_assert!(f64::from(taken) <= f64::from(burst) + now.as_secs_f64() / 10.0);
            }
        }
    }
}
