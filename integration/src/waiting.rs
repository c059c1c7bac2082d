//! Waiting for what happens sooner or later: how soon is the machine's affair, and no story is
//! about it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Far from what anything takes that a story waits for, also on a slow machine that has a lot else
/// to do.
pub const LIMIT: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(5);

/// A check that starts processes is repeated less often: parallel stories need the processor.
const MAX_PAUSE: Duration = Duration::from_millis(400);

/// Waits until a condition holds. Fails after [`LIMIT`].
pub fn until(what: &str, is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    until_within(LIMIT, what, is_so)
}

/// Checks that a condition holds for a while. Only time shows that an event does not come. A slow
/// machine weakens the check, and never makes the check fail.
pub fn stays(period: Duration, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + period;
    while Instant::now() < end {
        ensure!(is_so()?, "it ceased to be so that {what}");
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// As `until`, with a longer limit for conditions that take time.
pub fn until_within(
    limit: Duration,
    what: &str,
    mut is_so: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let start = Instant::now();
        if is_so()? {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "in {limit:?} it does not become so that {what}"
        );
        thread::sleep((4 * start.elapsed()).clamp(PAUSE, MAX_PAUSE));
    }
}
