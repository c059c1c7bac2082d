//! Work for `bindguard-runtime` besides a create: the comparison of a new container's mounts in
//! full, and the journal's lines about a guard or a comparison that was late or died.
//!
//! The shim has no code for binds. The shim's event loop writes no journal, because the journal's
//! file server may hang. If there is no guard, a thread writes the line.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::handover::{DETACH_VERB, PROVE_VERB, UNCHECKED_VERB};
use bindguard_core::identity::Identity;
use bindguard_core::plan::refusal_of_unseen;
use bindguard_core::report::{CreateLine, Report, Unchecked};
use bindguard_core::spec::SpecView;
use bindguard_sys::bundle::read_spec;
use bindguard_sys::journal::append;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Semaphore;

use super::Runtime;
use super::guard::{NewContainer, guard_program};
use super::invoke::{RunStreams, Running, RuntimeCall, RuntimeError};
use crate::blocking::spawn_thread;

/// Time limit of the process that writes a line of the journal.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);

/// The threads that write lines: a hanging write keeps its thread.
static LINES: Semaphore = Semaphore::const_new(8);

/// Time limit of the process that detaches mounts. containerd gives up after ten seconds.
const DETACH_TIMEOUT: Duration = Duration::from_secs(7);

impl Runtime {
    /// Detaches the mounts below the emptyDirs of the pod whose sandbox this was.
    pub(crate) async fn detach_below_emptydirs(&self, id: &str) {
        let Some(guard) = guard_program().await else {
            return;
        };
        let running = match self.spawn_besides(&guard, DETACH_VERB, id, []) {
            Ok(running) => running,
            Err(error) => return tracing::warn!(id, %error, "cannot run {DETACH_VERB}"),
        };
        if running.finish_within(DETACH_TIMEOUT).await.is_none() {
            tracing::warn!(id, "{DETACH_VERB} did not end in time");
        }
    }

    /// Starts to record that this create has no guard.
    pub(super) fn record_missing_guard(&self, container: &NewContainer<'_>, why: &str) {
        let (Some(journal), Ok(slot)) = (container.settings.journal.clone(), LINES.try_acquire())
        else {
            return;
        };
        let bundle = self.bundle.path().to_owned();
        let refused = refusal_of_unseen(why, &container.settings.policy);
        let (id, problem) = (
            container.id.to_owned(),
            format!("no guard checked this create: {why}"),
        );
        let write = move || {
            let mut report = Report::about_bundle(&bundle);
            report.problems.push(problem);
            let bytes = read_spec(&bundle).unwrap_or_default();
            if let Ok(spec) = SpecView::from_bytes(&bytes) {
                report.container = Identity::from_spec(&spec);
            }
            let mut line = CreateLine::new(&report);
            line.time = OffsetDateTime::now_utc().format(&Rfc3339).ok();
            line.id = Some(id);
            line.refused = refused;
            line.unchecked = Some(Unchecked::Missing);
            let text = serde_json::to_string(&line).unwrap_or_default();
            if let Err(error) = append(&journal, &text) {
                tracing::warn!("{}", error_chain(&error));
            }
            drop(slot);
        };
        if let Err(error) = spawn_thread(write) {
            tracing::warn!(%error, "cannot start a thread for a line of the journal");
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
