//! The share of each container in the agent's lines of the journal.
//!
//! A container can make its files stale in a loop, and each refresh is a line. The journal has a
//! fixed size: without a limit the lines about all other containers would be lost in minutes.

use std::num::NonZeroUsize;
use std::time::Duration;

use lru::LruCache;

use crate::token_bucket::TokenBucket;

/// Lines about one container that are written at once, and the interval of further lines.
const BURST: u32 = 30;
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Limit of containers and volumes that are remembered.
const MAX_SHARES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Decides which lines are written. The time is passed in.
#[derive(Debug)]
pub(super) struct Shares(LruCache<String, Share>);

#[derive(Debug)]
struct Share {
    bucket: TokenBucket,
    left_out: u64,
}

impl Default for Shares {
    fn default() -> Self {
        Self(LruCache::new(MAX_SHARES))
    }
}

impl Shares {
    /// `None` if the line is to be left out. Otherwise the number of lines about this container or
    /// volume that were left out since the last line.
    pub(super) fn admit(&mut self, about: &str, now: Duration) -> Option<u64> {
        let new = || Share {
            bucket: TokenBucket::new(BURST, LINE_INTERVAL, now),
            left_out: 0,
        };
        let share = self.0.get_or_insert_mut(about.to_owned(), new);
        if share.bucket.take(now) {
            return Some(std::mem::take(&mut share.left_out));
        }
        share.left_out += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_many_lines_costs_no_other_container_a_line() {
        let (mut shares, now) = (Shares::default(), Duration::from_secs(1));
        let written = (0..1_000).filter(|_| shares.admit("loud", now).is_some());
        assert_eq!(written.count(), 30);
        assert_eq!(shares.admit("quiet", now), Some(0));
        let later = now + LINE_INTERVAL;
        let answers = [(); 3].map(|()| shares.admit("loud", later));
        assert_eq!(answers, [Some(970), None, None]);
        assert_eq!(shares.admit("loud", later + LINE_INTERVAL), Some(2));
    }
}
