//! The wall clock, for time stamps alone.
//!
//! An operator or NTP can set it back or forward. Every interval, limit and cache of the agent uses
//! the monotonic clock (`Instant`), which no step changes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time since 1970.
pub fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
