//! `bindguard-runtime [RUNTIME FLAGS] bindguard-unchecked --bundle BUNDLE ID ATTEMPT HOW WHY
//! [REFUSAL]`: records a create whose guard did not come to an end.
//!
//! The shim runs this verb after killing a late guard, or finding a dead guard. The shim writes no
//! journal: the file may lie on a server that does not answer. A runtime has no verb of that name.

use std::ffi::OsString;
use std::process::ExitCode;

use bindguard_config::Config;
use bindguard_core::handover::UNCHECKED_VERB;
use bindguard_core::report::Unchecked;
use bindguard_guard::record_unchecked;

use crate::argv::Invocation;
use crate::messages::Messages;

/// The create to record.
pub struct UncheckedCreate {
    invocation: Invocation,
    attempt: u32,
    how: Unchecked,
    why: String,
    refusal: Option<String>,
}

impl UncheckedCreate {
    /// `None` if the verb is not [`UNCHECKED_VERB`].
    pub fn from_args(args: &[OsString]) -> Option<Self> {
        let (invocation, more) = Invocation::of_own_verb(args, UNCHECKED_VERB)?;
        let [attempt, how, why, ref more @ ..] = more[..] else {
            return None;
        };
        Some(Self {
            invocation,
            attempt: attempt.to_str()?.parse().ok()?,
            how: how.to_str()?.parse().ok()?,
            why: why.to_string_lossy().into_owned(),
            refusal: more
                .first()
                .map(|refusal| refusal.to_string_lossy().into_owned()),
        })
    }

    /// Appends the line to the journal.
    pub fn record(&self, config: &Config) -> ExitCode {
        let Some(journal) = config.journal() else {
            return ExitCode::SUCCESS;
        };
        let recorded = record_unchecked(
            journal,
            (&self.invocation.bundle, self.invocation.id.as_deref()),
            self.attempt,
            (self.how, &self.why),
            self.refusal.as_deref(),
        );
        Messages::for_invocation(&self.invocation, true).recorded(recorded);
        ExitCode::SUCCESS
    }
}
