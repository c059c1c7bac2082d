//! Work for `bindguard-runtime` besides a create, and the proof that the runtime mounted what the
//! spec says, before `Create` is answered: until `Start` no program of the container runs.
//!
//! The shim compares the container's mount table with the record that the guard left in the bundle.
//! The kernel prints the table without a call to any filesystem, and without a lock that a process
//! of the container can hold. If the shim finds a difference, or the table is long,
//! `bindguard-runtime` compares in full in a process of its own: it opens the sources again,
//! writes the journal, and knows the policy.
//!
//! The shim has no code for binds. The shim's event loop writes no journal, because the journal's
//! file server may hang. If there is no guard, a thread writes the line.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::handover::{DETACH_VERB, PROVE_VERB, UNCHECKED_VERB};
use bindguard_core::identity::Identity;
use bindguard_core::mount_table::MountEntry;
use bindguard_core::plan::{refusal_of_uncompared, refusal_of_unseen};
use bindguard_core::proof::{Comparison, EXPECTED_FILE, ExpectedBinds};
use bindguard_core::report::{CreateLine, Report, Unchecked};
use bindguard_core::spec::SpecView;
use bindguard_sys::bundle::{read_spec, record};
use bindguard_sys::journal::append;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Semaphore;

use super::Runtime;
use super::guard::{GuardSettings, NewContainer, guard_program};
use super::invoke::{RunStreams, Running, RuntimeCall, RuntimeError};
use crate::blocking::spawn_thread;

/// A longer table is compared by a process of its own, so that the shim's memory stays small.
const MAX_MOUNTS: usize = 300;
/// The size limit of the table and of the record, in bytes.
const MAX_TEXT: u64 = 256 << 10;

/// Time limit of the process that writes a line of the journal.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of the process that detaches mounts. containerd gives up after ten seconds.
const DETACH_TIMEOUT: Duration = Duration::from_secs(7);

/// The threads that write lines: a hanging write keeps its thread.
static LINES: Semaphore = Semaphore::const_new(8);

impl Runtime {
    /// Compares the mounts of the new container with this init with the record in its bundle. The
    /// comparison in full takes at most as long as a guard may.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub async fn prove(
        &self,
        id: &str,
        pid: u32,
        settings: &GuardSettings,
    ) -> Result<(), RuntimeError> {
        if shows_all_expected_binds(&self.bundle.path, pid).is_ok_and(|shows_all| shows_all) {
            return Ok(());
        }
        let reason = match self.prove_in_full(id, pid, settings.deadline).await {
            Ok(reason) => reason,
            Err(why) => {
                tracing::warn!(id, "the mounts of the container are not proven: {why}");
                refusal_of_uncompared(&why, &settings.policy)
            }
        };
        match reason {
            Some(reason) => Err(RuntimeError::Refused { reason }),
            None => Ok(()),
        }
    }

    /// The reason why policy refuses the container, if it does. A comparison that came to no end is
    /// recorded.
    async fn prove_in_full(
        &self,
        id: &str,
        pid: u32,
        limit: Duration,
    ) -> Result<Option<String>, String> {
        let guard = guard_program().await.ok_or("the guard is not installed")?;
        let compare = async {
            let running = self
                .spawn_besides(&guard, PROVE_VERB, id, vec![pid.to_string().into()])
                .map_err(|error| error.to_string())?;
            let printed = match running.finish_within(limit).await {
                Some(printed) => printed.map_err(|error| error.to_string())?,
                None => return Err(format!("no answer within {limit:?}")),
            };
            let reason = String::from_utf8_lossy(&printed).trim().to_owned();
            Ok(Some(reason).filter(|reason| !reason.is_empty()))
        };
        compare.await.inspect_err(|why| {
            let more = vec![pid.to_string().into(), why.into()];
            self.spawn_record(&guard, PROVE_VERB, id, more);
        })
    }

    /// Detaches the mounts below the emptyDirs of the pod whose sandbox this was.
    pub async fn detach_below_emptydirs(&self, id: &str) {
        let Some(guard) = guard_program().await else {
            return;
        };
        match self.spawn_besides(&guard, DETACH_VERB, id, vec![]) {
            Ok(running) => {
                if running.finish_within(DETACH_TIMEOUT).await.is_none() {
                    tracing::warn!(id, "{DETACH_VERB} did not end in time");
                }
            }
            Err(error) => tracing::warn!(id, %error, "cannot run {DETACH_VERB}"),
        }
    }

    /// Starts to record that this create has no guard.
    pub(super) fn record_missing_guard(&self, container: &NewContainer<'_>, why: &str) {
        let (Some(journal), Ok(slot)) = (container.settings.journal.clone(), LINES.try_acquire())
        else {
            return;
        };
        let bundle = self.bundle.path.clone();
        let refused = refusal_of_unseen(why, &container.settings.policy);
        let id = container.id.to_owned();
        let problem = format!("no guard checked this create: {why}");
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
        let mut more: Vec<OsString> = vec![
            attempt.to_string().into(),
            how.into_str().into(),
            why.into(),
        ];
        // In a retry the create fails with the runtime's own error.
        if attempt == 0 {
            more.extend(refusal_of_unseen(why, &container.settings.policy).map(OsString::from));
        }
        self.spawn_record(guard, UNCHECKED_VERB, container.id, more);
    }

    /// Starts a verb that writes a line of the journal. A verb that hangs is killed.
    fn spawn_record(&self, guard: &Path, verb: &'static str, id: &str, more: Vec<OsString>) {
        match self.spawn_besides(guard, verb, id, more) {
            Ok(running) => drop(tokio::spawn(async move {
                let _ = running.finish_within(RECORD_TIMEOUT).await;
            })),
            Err(error) => tracing::warn!(id, %error, "cannot run {verb} of the guard"),
        }
    }

    /// Starts a verb of bindguard's own for this bundle.
    fn spawn_besides(
        &self,
        guard: &Path,
        verb: &'static str,
        id: &str,
        more: Vec<OsString>,
    ) -> Result<Running, RuntimeError> {
        let mut args = vec!["--bundle".into(), (&self.bundle.path).into(), id.into()];
        args.extend(more);
        let mut call = RuntimeCall::new(self, guard.to_owned(), verb, args);
        call.leads_group = true;
        call.spawn(RunStreams::CapturedStdout)
    }
}

/// True if each bind of the record is in the container's mount table. An error if the table is too
/// long, or the container ended.
fn shows_all_expected_binds(bundle: &Path, pid: u32) -> io::Result<bool> {
    let mut record = Vec::new();
    File::open(bundle.join(EXPECTED_FILE))?
        .take(MAX_TEXT)
        .read_to_end(&mut record)?;
    let expected: ExpectedBinds = serde_json::from_slice(&record)?;
    drop(record);
    let mut comparison = Comparison::new(&expected);
    let table = File::open(format!("/proc/{pid}/mountinfo"))?;
    let mut table = BufReader::with_capacity(4 << 10, table.take(MAX_TEXT));
    let mut line = Vec::new();
    let mut mounts = 0;
    while table.read_until(b'\n', &mut line)? > 0 {
        mounts += 1;
        if mounts > MAX_MOUNTS || line.pop() != Some(b'\n') {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mount = MountEntry::from_line(&line).map_err(io::Error::other)?;
        comparison.add(&mount);
        line.clear();
    }
    // A program below the guard wrote config.json: the comparison in full counts what it added.
    let is_admitted = expected.spec == record::spec_version(bundle);
    let shows_all = is_admitted && comparison.differences().is_empty();
    if shows_all {
        record::add_mounts_before(bundle, expected);
    }
    Ok(shows_all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::Arc;

    use bindguard_core::policy::{Alarm, Policy};

    use super::*;
    use crate::bundle::Bundle;
    use crate::exits::Exits;
    use crate::options::Options;

    /// No guard is beside the test's program.
    #[tokio::test]
    async fn policy_refuses_a_container_that_no_program_can_compare() {
        let bundle = tempfile::tempdir().unwrap();
        let runtime = Runtime::new(
            &Options::default(),
            "default",
            Bundle::at(bundle.path()),
            Arc::new(Exits::default()),
        );
        let prove = |proof| {
            let settings = GuardSettings {
                deadline: Duration::from_secs(60),
                policy: Policy {
                    proof,
                    ..Policy::default()
                },
                journal: None,
            };
            let runtime = &runtime;
            async move { runtime.prove("c", std::process::id(), &settings).await }
        };
        assert!(prove(Alarm::Report).await.is_ok());
        let refused = prove(Alarm::Refuse).await.unwrap_err();
        assert!(matches!(refused, RuntimeError::Refused { .. }), "{refused}");
    }
}
