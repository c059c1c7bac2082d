//! Starts the agent's threads, repeats work that failed, and limits the rate of work.
//!
//! A thread that ended would leave a part of the node without repairs while `/healthz` is OK. So a
//! panic costs a pause, as an error does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{io, thread};

use anyhow::{Context, Result};
use bindguard_sys::trim_heap;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::error;

/// The pauses before work that failed begins again.
const PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The first pause after a survey in which something could not be read.
const SURVEY_PAUSE: Duration = Duration::from_secs(5);

/// Starts a thread of the agent.
///
/// # Errors
/// If there are too many.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .with_context(|| format!("start the thread {name}"))?;
    Ok(())
}

/// Repeats work until it succeeds. Most work ends only by an error or a panic; each costs a pause,
/// and counts as a restart.
pub fn retry_with_backoff(
    what: &str,
    restarts: &Counter,
    mut work: impl FnMut() -> io::Result<()>,
) {
    let mut backoff = Backoff::new(PAUSE, MAX_PAUSE);
    loop {
        let began = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(&mut work));
        let pause = backoff.after(began.elapsed());
        match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error!("{what}: {error}; trying again in {pause:?}"),
            Err(_) => error!("{what}: the thread panicked; trying again in {pause:?}"),
        }
        restarts.inc();
        thread::sleep(pause);
    }
}

/// Pauses that double from the first to the longest.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses between these limits.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// Pauses after surveys in which something could not be read, up to the usual interval. A node
    /// that boots answers late.
    pub fn of_surveys(interval: Duration) -> Self {
        Self::new(SURVEY_PAUSE.min(interval), interval)
    }

    /// The next pause is the first again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// The pause after work that lasted so long, pauses not included. Work that lasted longer than
    /// the longest pause was healthy: the pauses begin with the first again.
    pub fn after(&mut self, lasted: Duration) -> Duration {
        if lasted > self.longest {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

/// Surveys for ever: at this interval, and sooner after a survey in which something could not be read.
pub fn survey_for_ever(interval: Duration, mut survey: impl FnMut() -> bool) -> ! {
    let mut pauses = Backoff::of_surveys(interval);
    loop {
        if survey() {
            pauses.reset();
            thread::sleep(interval);
        } else {
            thread::sleep(pauses.after(Duration::ZERO));
        }
    }
}

// A bound on the rate of something: plain data, with the time passed in. The crates for it read the
// clock themselves.

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

// Returns memory to the kernel after work: a survey or a burst of events frees more than the idle
// agent uses.
//
// glibc keeps freed memory for the next request, which may come five minutes later
// (docs/decisions/0014).

/// The pause after work: the rest of a burst is trimmed with its beginning.
const IDLE_MEMORY_PAUSE: Duration = Duration::from_secs(2);

/// Takes notice of work, from any thread.
#[derive(Debug, Clone, Default)]
pub struct IdleMemory(Arc<Notify>);

impl IdleMemory {
    /// Work may have freed memory.
    pub fn worked(&self) {
        self.0.notify_one();
    }

    /// Trims the heap a moment after work, for ever. Without work it does not wake up.
    pub async fn run(self) {
        loop {
            self.0.notified().await;
            // Work during the pause causes a second trim: the work may free memory after the first
            // trim.
            sleep(IDLE_MEMORY_PAUSE).await;
            trim_heap();
        }
    }
}

// The wall clock, for time stamps alone.
//
// An operator or NTP can set it back or forward. Every interval, limit and cache of the agent uses
// the monotonic clock (`Instant`), which no step changes.

/// The time since 1970.
pub fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_fails_at_once_keeps_the_longest_pause() {
        let mut backoff = Backoff::new(PAUSE, MAX_PAUSE);
        let pauses = [(); 9].map(|()| backoff.after(Duration::ZERO).as_secs());
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        let healthy = MAX_PAUSE + Duration::from_millis(1);
        assert_eq!(backoff.after(healthy), PAUSE);
        assert_eq!(backoff.after(MAX_PAUSE), 2 * PAUSE);
    }

    #[test]
    fn work_that_panics_is_repeated() {
        let (restarts, mut runs) = (Counter::default(), 0);
        retry_with_backoff("count", &restarts, || {
            runs += 1;
            assert!(runs > 1, "as expected by a test");
            Ok(())
        });
        assert_eq!((runs, restarts.get()), (2, 1));
    }
}

#[cfg(test)]
mod token_bucket_tests {
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
