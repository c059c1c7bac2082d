//! Limits on what the agent does again and again: pauses before a thread repeats its work, rates,
//! messages that are news, and the memory that remains after work.
//!
//! A thread that ended would leave a part of the node without repairs while `/healthz` is OK. So a
//! panic costs a pause, as an error does.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{io, thread};

use anyhow::{Context, Result};
use bindguard_sys::trim_heap;
use lru::LruCache;
use prometheus_client::metrics::counter::Counter;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{error, warn};

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

// Remembers the last message about each subject. Surveys and retries find the same faults again; only
// news are logged, journaled or written as events.

/// Limit of findings, of all subjects together: containers come and go, and each can have thousands.
/// Beyond the limit the subject with the most findings is forgotten: a pod with many findings makes
/// the agent repeat no message about other pods.
const MAX_FINDINGS: usize = 32 * 1024;

/// The findings about each subject at its last check. Their hashes: a pod chooses how long the paths in
/// them are.
#[derive(Debug)]
pub struct SayOnce<K: Hash + Eq = ()> {
    known: LruCache<K, HashSet<u64>>,
    findings: usize,
    hasher: RandomState,
}

impl<K: Hash + Eq> Default for SayOnce<K> {
    fn default() -> Self {
        // A bounded cache would reserve memory for all subjects.
        let known = LruCache::unbounded();
        Self {
            known,
            findings: 0,
            hasher: RandomState::new(),
        }
    }
}

impl<K: Hash + Eq + Clone> SayOnce<K> {
    /// The findings about a subject that its last check did not have.
    pub fn news<T: Hash>(&mut self, about: K, mut found: Vec<T>) -> Vec<T> {
        let before = self.known.pop(&about).unwrap_or_default();
        let mut now = HashSet::new();
        found.retain(|finding| {
            let hash = self.hasher.hash_one(finding);
            now.insert(hash);
            !before.contains(&hash)
        });
        self.findings = self.findings - before.len() + now.len();
        if !now.is_empty() {
            self.known.push(about, now);
        }
        while self.findings > MAX_FINDINGS
            && let Some((most, _)) = self.known.iter().max_by_key(|(_, known)| known.len())
        {
            let most = most.clone();
            self.findings -= self.known.pop(&most).map_or(0, |forgotten| forgotten.len());
        }
        found
    }

    #[cfg(test)]
    pub fn findings(&self) -> usize {
        self.findings
    }

    /// Logs the failures that are news; the work is done again.
    pub fn warn_of_retry(&mut self, failures: impl IntoIterator<Item = String>)
    where
        K: Default,
    {
        let failures = failures.into_iter();
        let tried_again = failures.map(|why| format!("{why}; trying again"));
        self.warn(K::default(), tried_again);
    }

    /// Logs the warnings about a subject that are news.
    pub fn warn(&mut self, about: K, warnings: impl IntoIterator<Item = String>) {
        for warning in self.news(about, Vec::from_iter(warnings)) {
            warn!("{warning}");
        }
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

/// Such a time in UTC, as RFC 3339; `None` past the year 9999.
pub fn time_of(since_epoch: Duration) -> Option<String> {
    let nanos = i128::try_from(since_epoch.as_nanos()).ok()?;
    let time = OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()?;
    time.format(&Rfc3339).ok()
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

#[cfg(test)]
mod say_once_tests {
    use super::*;

    #[test]
    fn only_a_change_is_news() {
        let mut said = SayOnce::default();
        assert_eq!(said.news(1, vec!["a"]), ["a"]);
        assert_eq!(said.news(1, vec!["a", "b"]), ["b"]);
        assert_eq!(said.news(2, vec!["a"]), ["a"], "another subject");
        assert!(said.news(1, vec!["b"]).is_empty());
        assert_eq!(said.news(1, vec!["a"]), ["a"], "it was gone in between");
    }

    /// A pod with thousands of mounts that restarts its container again and again cannot fill the
    /// agent's memory.
    #[test]
    fn findings_about_subjects_that_are_gone_are_forgotten() {
        let mut said = SayOnce::default();
        let of_a_container = Vec::from_iter(0..2000);
        said.news(usize::MAX, vec![1]);
        for container in 0..100 {
            said.news(container, of_a_container.clone());
            assert!(said.findings <= MAX_FINDINGS);
        }
        let counted = said.known.iter().map(|(_, known)| known.len());
        assert_eq!(counted.sum::<usize>(), said.findings);
        assert!(said.news(usize::MAX, vec![1]).is_empty(), "of others");
        assert!(said.news(99, of_a_container.clone()).is_empty());
        assert_eq!(said.news(0, of_a_container.clone()), of_a_container);
        for container in 100..MAX_FINDINGS + 50 {
            said.news(container, vec![1]);
            assert!(said.findings <= MAX_FINDINGS);
        }
    }
}
