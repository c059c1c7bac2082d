//! The budget and the retry rule of a replacement, the same on the host and in a container.

use std::time::{Duration, Instant};

/// Limit of rounds. Updates every 2 ms needed at most 2 rounds, updates without a pause 12.
pub(crate) const MAX_ROUNDS: u32 = 64;

/// Limit of rounds in which one mount could not be replaced, other than by an update of its volume.
pub(crate) const MAX_FAILURES: u32 = 3;

/// Time limit of the replacements in one place.
pub(crate) const REPLACE_TIMEOUT: Duration = Duration::from_secs(20);

/// The rounds of one replacement.
#[derive(Debug)]
pub(crate) struct Attempts {
    rounds: u32,
    until: Instant,
}

impl Attempts {
    /// Rounds until this time.
    pub(crate) fn until(until: Instant) -> Self {
        Self { rounds: 0, until }
    }

    /// Begins a round. False if there were [`MAX_ROUNDS`], or the time is over.
    pub(crate) fn begin(&mut self) -> bool {
        let may_begin = self.rounds < MAX_ROUNDS && !self.is_out_of_time();
        self.rounds += u32::from(may_begin);
        may_begin
    }

    /// The number of rounds that began.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds
    }

    /// True if the time is over.
    pub(crate) fn is_out_of_time(&self) -> bool {
        Instant::now() >= self.until
    }
}
