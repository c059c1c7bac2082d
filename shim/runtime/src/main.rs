//! `bindguard-runtime`: an OCI runtime that admits the bundle and then becomes the real runtime.
//!
//! For `create`, `run` and `restore` this program checks the bundle's binds, repairs them if
//! possible, and calls execve(2): exit code, stderr and everything else are the real runtime's. For
//! other verbs this program calls execve at once. Only a policy of `refuse` rejects a container
//! that the real runtime would create.
#![forbid(unsafe_code)]

mod admit;
mod argv;
mod handover;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use bindguard_config::load_by;
use bindguard_core::handover::{GuardAnswer, SELF_TEST, WRAPPER};
use bindguard_guard::read_file;

use admit::{admit_safely, is_start_refused, run_own_verb};
use argv::{CREATING, Invocation};
use handover::{Handover, Messages, exec};

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
    if let Some(code) = run_own_verb(&args, &loaded.config) {
        return code;
    }
    let runtime = loaded.config.runtime();
    let Some(invocation) = Invocation::of_verbs(&args, &CREATING) else {
        if is_start_refused(&args, &loaded.config) {
            return ExitCode::FAILURE;
        }
        return exec(&args, runtime, &Messages::default());
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
    exec(&args, runtime, &messages)
}
