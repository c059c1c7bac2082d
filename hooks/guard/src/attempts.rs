//! The budget and the retry rule of a replacement, the same on the host and in a container.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Limit of rounds. Updates every 2 ms needed at most 2 rounds, updates without a pause 12.
pub(crate) const MAX_ROUNDS: u32 = 64;

/// Limit of rounds in which a mount could not be replaced. Rounds that an update of the volume
/// ended do not count.
pub(crate) const MAX_FAILURES: u32 = 3;

/// Time limit of the replacements in a place.
pub(crate) const REPLACE_TIMEOUT: Duration = Duration::from_secs(20);

/// The end of the rounds of a replacement.
#[derive(Debug)]
pub(crate) enum Ended<T> {
    /// A round had this result.
    Done(T),
    /// There were [`MAX_ROUNDS`] rounds, or the time is over.
    Unfinished {
        /// The number of rounds.
        rounds: u32,
    },
}

/// Runs rounds until a round breaks with a result or an error, for at most [`MAX_ROUNDS`]. No round
/// begins after `until`.
pub(crate) fn repeat<T, E>(
    until: Instant,
    mut round: impl FnMut() -> Result<ControlFlow<T>, E>,
) -> Result<Ended<T>, E> {
    for rounds in 0..MAX_ROUNDS {
        if Instant::now() >= until {
            return Ok(Ended::Unfinished { rounds });
        }
        if let ControlFlow::Break(result) = round()? {
            return Ok(Ended::Done(result));
        }
    }
    Ok(Ended::Unfinished { rounds: MAX_ROUNDS })
}
