//! The pending calls, for the dump of the shim's state.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The pending calls, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    last: u64,
    calls: BTreeMap<u64, Call>,
}

#[derive(Debug)]
struct Call {
    method: &'static str,
    id: String,
    exec_id: String,
    since: Instant,
}

impl Calls {
    /// Begins a call; it is pending until the result is dropped.
    pub(super) fn begin(
        self: &Arc<Self>,
        method: &'static str,
        id: &str,
        exec_id: &str,
    ) -> PendingCall {
        let call = Call {
            method,
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            since: Instant::now(),
        };
        let mut pending = self.pending();
        pending.last += 1;
        let number = pending.last;
        pending.calls.insert(number, call);
        PendingCall {
            calls: Arc::clone(self),
            method,
            number,
        }
    }

    /// A line for each call, the oldest first.
    pub(super) fn describe(&self) -> Vec<String> {
        let line = |call: &Call| {
            let Call {
                method,
                id,
                exec_id,
                since,
            } = call;
            let exec_id = if exec_id.is_empty() {
                String::new()
            } else {
                format!(" exec {exec_id}")
            };
            format!(
                "pending call: {method} {id}{exec_id}, for {:.1} s",
                since.elapsed().as_secs_f64()
            )
        };
        self.pending().calls.values().map(line).collect()
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that is not answered yet.
#[derive(Debug)]
pub(super) struct PendingCall {
    calls: Arc<Calls>,
    method: &'static str,
    number: u64,
}

impl PendingCall {
    /// Its method.
    pub(super) fn method(&self) -> &'static str {
        self.method
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.calls.pending().calls.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_pending_until_it_is_answered() {
        let calls = Arc::new(Calls::default());
        let (wait, kill) = (
            calls.begin("wait", "web", "e"),
            calls.begin("kill", "web", ""),
        );
        let lines = calls.describe();
        assert!(
            lines[0].starts_with("pending call: wait web exec e, for 0."),
            "{lines:?}"
        );
        assert!(
            lines[1].starts_with("pending call: kill web, for 0."),
            "{lines:?}"
        );
        drop((wait, kill));
        assert!(calls.describe().is_empty());
    }
}
