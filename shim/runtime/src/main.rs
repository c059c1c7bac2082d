//! `bindguard-runtime`: an OCI runtime that admits the bundle and then becomes the real runtime.
//!
//! For `create`, `run` and `restore` this program checks the bundle's binds, repairs them if
//! possible, and calls execve(2): exit code, stderr and everything else are the real runtime's. For
//! other verbs this program calls execve at once. Only a policy of `refuse` rejects a container
//! that the real runtime would create.
#![forbid(unsafe_code)]

mod admit;
mod argv;
mod exec_runtime;
mod messages;
mod verbs;

use std::env;
use std::ffi::OsString;
use std::panic::catch_unwind;
use std::process::ExitCode;

use bindguard_config::{Config, load_by};
use bindguard_core::handover::GuardAnswer;
use bindguard_core::plan::refusal_of_uncompared;
use bindguard_core::program_names::{SELF_TEST, WRAPPER};
use bindguard_guard::read_file;

use admit::admit_safely;
use argv::Invocation;
use exec_runtime::Handover;
use messages::Messages;
use verbs::NewContainer;

fn main() -> ExitCode {
    let args: Vec<OsString> = env::args_os().skip(1).collect();
    if let [only] = args.as_slice()
        && only == SELF_TEST
    {
        println!("{WRAPPER} {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let handover = Handover::from_environment();
    let loaded = load_by(read_file);
    if let Some(code) = verbs::run(&args, &loaded.config) {
        return code;
    }
    let runtime = loaded.config.runtime();
    let Some(invocation) = Invocation::creating(&args) else {
        if is_start_refused(&args, &loaded.config) {
            return ExitCode::FAILURE;
        }
        return exec_runtime::exec(&args, runtime, &Messages::default());
    };
    let invocation = invocation.with_absolute_paths();
    let messages = Messages::for_invocation(&invocation, handover.pipe.is_some());
    let admission = admit_safely(&invocation, &loaded, handover.attempt, &messages);
    if let Some(reason) = &admission.refusal {
        messages.fatal(&format!("refused: {reason}"));
        handover.answer(&GuardAnswer::Refused(reason.clone()), None);
        return ExitCode::FAILURE;
    }
    let unrepaired = admission.unrepaired.as_deref();
    if handover.attempt > 0 && !admission.worth_another_try {
        handover.answer(&GuardAnswer::Unchanged, unrepaired);
        return ExitCode::SUCCESS;
    }
    let prove = admission.is_provable;
    handover.answer(&GuardAnswer::Handover { prove }, unrepaired);
    exec_runtime::exec(&args, runtime, &messages)
}

/// Proves the mounts of a container that these arguments start. True if policy refuses the
/// container.
fn is_start_refused(args: &[OsString], config: &Config) -> bool {
    let refused = catch_unwind(|| {
        let invocation = Invocation::of_start(args)?;
        let messages = Messages::for_invocation(&invocation, false);
        let doubt = invocation.doubt.as_deref();
        let in_doubt = doubt.and_then(|doubt| refusal_of_uncompared(doubt, config.policy()));
        let refusal = match in_doubt {
            Some(refusal) => refusal,
            None => NewContainer::of_start(invocation)?.prove(config, &messages)?,
        };
        messages.fatal(&format!("refused: {refusal}"));
        Some(())
    });
    match refused {
        Ok(refused) => refused.is_some(),
        // The panic's own message is on stderr.
        Err(_) => refusal_of_uncompared("the guard panicked", config.policy()).is_some(),
    }
}
