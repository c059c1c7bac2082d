//! `bindguard-runtime bindguard-detach --bundle BUNDLE ID`: bindguard's shim runs this at the end of a
//! pod's sandbox, in a process of its own, because a file server may hang.

use std::ffi::OsString;
use std::process::ExitCode;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::handover::DETACH_VERB;
use bindguard_guard::{detach_below_emptydirs, record_release};

use crate::argv::Invocation;
use crate::messages::Messages;

/// Runs `bindguard-detach`. `None` for any other verb.
pub fn run_own_verb(args: &[OsString], config: &Config) -> Option<ExitCode> {
    let (invocation, _) = Invocation::of_own_verb(args, DETACH_VERB)?;
    let messages = Messages::for_invocation(&invocation, true);
    let id = invocation.id.as_deref().unwrap_or_default();
    match detach_below_emptydirs(&invocation.bundle, id, config.places()) {
        Ok(lines) => {
            for line in lines {
                if let Some(journal) = config.journal() {
                    messages.recorded(record_release(journal, line));
                }
            }
        }
        Err(error) => messages.remark(&format!(
            "the mounts below the pod's emptyDirs stay: {}",
            error_chain(&error)
        )),
    }
    Some(ExitCode::SUCCESS)
}
