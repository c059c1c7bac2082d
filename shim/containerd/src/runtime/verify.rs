//! Work for `bindguard-runtime` besides a create, which no call waits for.
//!
//! A check of a new container, at the guard's request: is a host-root bind that the guard made
//! rslave a slave? And the journal's line about a guard that was late or died.
//!
//! `bindguard-runtime` does both, in its own process: the shim has no code for binds, and the walk
//! to a destination, or the journal's server, may hang.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use bindguard_core::handover::{UNCHECKED_VERB, VERIFY_VERB};
use bindguard_core::plan::refusal_of_unseen;
use bindguard_core::report::Unchecked;

use super::Runtime;
use super::guard::{GuardedCall, guard_program};
use super::invoke::{Call, RunStreams};

/// Time limit of the process that writes one line of the journal.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);

impl Runtime {
    /// Starts a check of the container with this init, for at most `limit`.
    pub(crate) fn spawn_verification(&self, id: &str, pid: u32, limit: Duration) {
        let Some(guard) = guard_program() else { return };
        self.spawn_besides(&guard, VERIFY_VERB, id, [pid.to_string().into()], limit);
    }

    /// Starts to record that no guard checked this create.
    pub(super) fn spawn_unchecked_record(
        &self,
        guard: &Path,
        call: &GuardedCall<'_>,
        attempt: u32,
        how: Unchecked,
        why: &str,
    ) {
        let mut more: Vec<OsString> =
            vec![attempt.to_string().into(), how.as_str().into(), why.into()];
        // In a retry the create fails with the runtime's own error.
        if attempt == 0 {
            more.extend(refusal_of_unseen(why, &call.settings.policy).map(OsString::from));
        }
        self.spawn_besides(guard, UNCHECKED_VERB, call.id, more, RECORD_TIMEOUT);
    }

    fn spawn_besides(
        &self,
        guard: &Path,
        verb: &'static str,
        id: &str,
        more: impl IntoIterator<Item = OsString>,
        limit: Duration,
    ) {
        let mut args: Vec<OsString> = vec!["--bundle".into(), self.bundle.path().into(), id.into()];
        args.extend(more);
        let mut call = Call::new(self, guard.to_owned(), verb, args);
        call.lead_group();
        let running = match call.spawn(RunStreams::Captured) {
            Ok(running) => running,
            Err(error) => {
                return tracing::warn!(id, %error, "cannot run {verb} of the guard");
            }
        };
        tokio::spawn(async move {
            if tokio::time::timeout(limit, running.ended()).await.is_err() {
                running.kill_group();
                running.ended().await;
            }
            running.forward_log();
        });
    }
}
