//! Checks a new container at the guard's request: is a host-root bind that the guard made rslave a
//! slave?
//!
//! `bindguard-runtime` checks it, in its own process: the shim has no code for binds, and the walk
//! to a destination may hang. No call waits for it; it writes its findings to the log and the
//! journal itself.

use std::ffi::OsString;
use std::time::Duration;

use bindguard_core::handover::VERIFY_VERB;

use super::Runtime;
use super::guard::guard_program;
use super::invoke::{Call, RunStreams};

impl Runtime {
    /// Starts a check of the container with this init, for at most `limit`.
    pub(crate) fn spawn_verification(&self, id: &str, pid: u32, limit: Duration) {
        let Some(guard) = guard_program() else { return };
        let args: Vec<OsString> = vec![
            "--bundle".into(),
            self.bundle.path().into(),
            id.into(),
            pid.to_string().into(),
        ];
        let mut call = Call::new(self, guard, VERIFY_VERB, args);
        call.lead_group();
        let running = match call.spawn(RunStreams::Captured) {
            Ok(running) => running,
            Err(error) => {
                return tracing::warn!(id, %error, "the container's mounts are not checked");
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
