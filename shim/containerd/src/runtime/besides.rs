//! Work for `bindguard-runtime` besides a create: the comparison of a new container's mounts in
//! full, and the journal's lines about a guard or a comparison that was late or died.
//!
//! The shim has no code for binds. The shim writes no journal, because the journal's file server
//! may hang.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use bindguard_core::handover::{DETACH_VERB, PROVE_VERB, UNCHECKED_VERB};
use bindguard_core::plan::refusal_of_unseen;
use bindguard_core::report::Unchecked;

use super::Runtime;
use super::guard::{NewContainer, guard_program};
use super::invoke::{RunStreams, Running, RuntimeCall, RuntimeError};

/// Time limit of the process that writes a line of the journal.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of the process that detaches mounts. containerd gives up after ten seconds.
const DETACH_TIMEOUT: Duration = Duration::from_secs(7);

impl Runtime {
    /// Detaches the mounts below the emptyDirs of the pod whose sandbox this was.
    pub(crate) async fn detach_below_emptydirs(&self, id: &str) {
        let Some(guard) = guard_program().await else {
            return;
        };
        let ended = match self.spawn_besides(&guard, DETACH_VERB, id, []) {
            Ok(running) => running.finish_within(DETACH_TIMEOUT).await.is_some(),
            Err(error) => return tracing::warn!(id, %error, "cannot run {DETACH_VERB}"),
        };
        if !ended {
            tracing::warn!(
                id,
                "mounts below the pod's emptyDirs may be left: no answer in time"
            );
        }
    }

    /// Starts to record that no guard checked this create.
    pub(super) fn spawn_unchecked_record(
        &self,
        guard: &Path,
        container: &NewContainer<'_>,
        attempt: u32,
        how: Unchecked,
        why: &str,
    ) {
        let mut more: Vec<OsString> =
            vec![attempt.to_string().into(), how.as_str().into(), why.into()];
        // In a retry the create fails with the runtime's own error.
        if attempt == 0 {
            more.extend(refusal_of_unseen(why, &container.settings.policy).map(OsString::from));
        }
        self.spawn_record(guard, UNCHECKED_VERB, container.id, more);
    }

    /// Starts to record that no comparison proved the mounts of this new container.
    pub(super) fn spawn_unproven_record(&self, guard: &Path, id: &str, pid: u32, why: &str) {
        self.spawn_record(guard, PROVE_VERB, id, [pid.to_string().into(), why.into()]);
    }

    /// Starts a verb that writes a line of the journal. A verb that hangs is killed.
    fn spawn_record(
        &self,
        guard: &Path,
        verb: &'static str,
        id: &str,
        more: impl IntoIterator<Item = OsString>,
    ) {
        let running = match self.spawn_besides(guard, verb, id, more) {
            Ok(running) => running,
            Err(error) => return tracing::warn!(id, %error, "cannot run {verb} of the guard"),
        };
        tokio::spawn(async move {
            let _ = running.finish_within(RECORD_TIMEOUT).await;
        });
    }

    /// Starts a verb of bindguard's own for this bundle.
    pub(super) fn spawn_besides(
        &self,
        guard: &Path,
        verb: &'static str,
        id: &str,
        more: impl IntoIterator<Item = OsString>,
    ) -> Result<Running, RuntimeError> {
        let mut args: Vec<OsString> = vec!["--bundle".into(), self.bundle.path().into(), id.into()];
        args.extend(more);
        let mut call = RuntimeCall::new(self, guard.to_owned(), verb, args);
        call.lead_group();
        call.spawn(RunStreams::CapturedStdout)
    }
}
