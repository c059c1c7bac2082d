//! `bindguard-runtime [RUNTIME FLAGS] bindguard-verify --bundle BUNDLE ID PID`: checks a new
//! container.
//!
//! The shim runs it, separately from the create and with its own time limit, when a host-root bind
//! was made rslave. Findings go to the log and the journal. A runtime has no verb of that name.

use std::ffi::OsString;
use std::process::ExitCode;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::handover::VERIFY_VERB;
use bindguard_core::judge::Verdict;
use bindguard_guard::{JournalEntry, record, verify_container};

use crate::argv::Invocation;
use crate::messages::Messages;

/// The container to check.
pub struct Verification {
    invocation: Invocation,
    pid: u32,
}

impl Verification {
    /// `None` if the arguments have another verb.
    pub fn from_args(args: &[OsString]) -> Option<Self> {
        let (invocation, more) = Invocation::of_own_verb(args, VERIFY_VERB)?;
        let [pid] = more[..] else { return None };
        Some(Self {
            invocation,
            pid: pid.to_str()?.parse().ok()?,
        })
    }

    /// Checks the container, and reports its findings.
    pub fn run(&self, config: &Config) -> ExitCode {
        let messages = Messages::for_invocation(&self.invocation, true);
        let report = verify_container(
            &self.invocation.bundle,
            self.pid,
            config.policy(),
            config.places(),
        );
        messages.report_findings(&report);
        let all_current = report
            .binds
            .iter()
            .all(|bind| bind.finding.verdict == Verdict::Current);
        if let Some(journal) = config.journal().filter(|_| !all_current) {
            let entry = JournalEntry {
                refused: None,
                unchecked: None,
                id: self.invocation.id.as_deref(),
                attempt: 0,
                pid: Some(self.pid),
                report: &report,
            };
            if let Err(problem) = record(journal, &entry) {
                messages.problem(&error_chain(&problem));
            }
        }
        ExitCode::SUCCESS
    }
}
