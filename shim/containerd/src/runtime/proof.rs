//! Proves that the runtime mounted what the spec says, before `Create` is answered: until `Start`
//! no program of the container runs.
//!
//! The shim compares the container's mount table with the record that the guard left in the bundle.
//! The kernel prints the table without a call to any filesystem, and without a lock that a process
//! of the container can hold. If the shim finds a difference, or the table is long,
//! `bindguard-runtime` compares in full in a process of its own: it opens the sources again,
//! writes the journal, and knows the policy.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use bindguard_core::handover::PROVE_VERB;
use bindguard_core::mount_table::MountEntry;
use bindguard_core::plan::refusal_of_uncompared;
use bindguard_core::proof::{Comparison, EXPECTED_FILE, ExpectedBinds};
use bindguard_sys::bundle::record;

use super::Runtime;
use super::guard::{GuardSettings, guard_program};
use super::invoke::RuntimeError;

/// A longer table is compared by a process of its own, so that the shim's memory stays small.
const MAX_MOUNTS: usize = 300;
/// The size limit of the table and of the record, in bytes.
const MAX_TEXT: u64 = 256 << 10;

impl Runtime {
    /// Compares the mounts of the new container with this init with the record in its bundle. The
    /// comparison in full takes at most as long as a guard may.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub(crate) async fn prove(
        &self,
        id: &str,
        pid: u32,
        settings: &GuardSettings,
    ) -> Result<(), RuntimeError> {
        if shows_all_expected_binds(self.bundle.path(), pid).is_ok_and(|shows_all| shows_all) {
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
        let compared = self.compare_in_full(&guard, id, pid, limit).await;
        compared.inspect_err(|why| self.spawn_unproven_record(&guard, id, pid, why))
    }

    async fn compare_in_full(
        &self,
        guard: &Path,
        id: &str,
        pid: u32,
        limit: Duration,
    ) -> Result<Option<String>, String> {
        let running = self
            .spawn_besides(guard, PROVE_VERB, id, [pid.to_string().into()])
            .map_err(|error| error.to_string())?;
        let finished = running.finish_within(limit).await;
        let printed = finished
            .ok_or_else(|| format!("no answer within {limit:?}"))?
            .map_err(|error| error.to_string())?;
        let reason = String::from_utf8_lossy(&printed).trim().to_owned();
        Ok(Some(reason).filter(|reason| !reason.is_empty()))
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
