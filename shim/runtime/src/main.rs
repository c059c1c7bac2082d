//! `bindguard-runtime`: an OCI runtime that admits the bundle and then becomes the real runtime.
//!
//! For `create`, `run` and `restore` this program checks the bundle's binds, repairs them if
//! possible, and calls execve(2): exit code, stderr and everything else are the real runtime's. For
//! other verbs this program calls execve at once. Only a policy of `refuse` rejects a container
//! that the real runtime would create.
#![forbid(unsafe_code)]

mod argv;
mod detach;
mod exec_runtime;
mod handover;
mod messages;
mod mistakes;
mod privilege;
mod prove;
mod stderr;
mod unchecked;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::process::ExitCode;

use bindguard_config::{Config, Loaded, load_by};
use bindguard_core::handover::GuardAnswer;
use bindguard_core::plan::{refusal_of_uncompared, refusal_of_unseen};
use bindguard_core::policy::{Alarm, Mode};
use bindguard_core::program_names::{SELF_TEST, WRAPPER};
use bindguard_core::report::{Report, Unchecked};
use bindguard_guard::{
    Admission, Attempt, JournalEntry, admit, admit_with_spec, read_file, record, record_unchecked,
};

use argv::Invocation;
use handover::Handover;
use messages::Messages;
use mistakes::Mistakes;
use prove::NewContainer;
use unchecked::UncheckedCreate;

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
    if let Some(code) = prove::run_own_verb(&args, || loaded.config.clone()) {
        return code;
    }
    if let Some(code) = detach::run_own_verb(&args, &loaded.config) {
        return code;
    }
    if let Some(unchecked) = UncheckedCreate::from_args(&args) {
        return unchecked.record(&loaded.config);
    }
    let creating = Invocation::creating(&args).map(Invocation::with_absolute_paths);
    let Some(invocation) = creating else {
        if let Err(code) = prove_before_start(&args, &loaded.config) {
            return code;
        }
        return exec_runtime::exec(&args, loaded.config.runtime(), &Messages::on_stderr());
    };
    let messages = Messages::for_invocation(&invocation, handover.has_reader());
    let mistakes = Mistakes::of(&loaded);
    mistakes
        .new
        .iter()
        .for_each(|mistake| messages.remark(mistake));
    // The runtime itself reports a missing spec, and a user who may not mount cannot repair binds.
    let is_worth_checking = invocation.doubt.is_some() || !has_no_spec(&invocation);
    let admission = if is_worth_checking && privilege::may_mount() {
        admit_safely(
            &invocation,
            &loaded,
            &mistakes,
            handover.attempt(),
            &messages,
        )
    } else {
        Admission::default()
    };
    if let Some(reason) = &admission.refusal {
        messages.fatal(&format!("refused: {reason}"));
        handover.answer(&GuardAnswer::Refused(reason.clone()), None);
        return ExitCode::FAILURE;
    }
    let unrepaired = admission.unrepaired.as_deref();
    if handover.attempt() > 0 && !admission.worth_another_try {
        handover.answer(&GuardAnswer::Unchanged, unrepaired);
        return ExitCode::SUCCESS;
    }
    let prove = admission.is_provable;
    handover.answer(&GuardAnswer::Handover { prove }, unrepaired);
    exec_runtime::exec(&args, loaded.config.runtime(), &messages)
}

fn has_no_spec(invocation: &Invocation) -> bool {
    let found = match &invocation.spec {
        Some(spec) => fs::metadata(spec),
        None => fs::metadata(invocation.bundle.join("config.json")),
    };
    found.is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

/// Proves the mounts of a container that these arguments start.
///
/// # Errors
/// If policy refuses the container.
fn prove_before_start(args: &[OsString], config: &Config) -> Result<(), ExitCode> {
    let proved = catch_unwind(|| {
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
    match proved {
        Ok(Some(())) => Err(ExitCode::FAILURE),
        Ok(None) => Ok(()),
        // The panic's own message is on stderr.
        Err(_) => match refusal_of_uncompared("the guard panicked", config.policy()) {
            Some(_) => Err(ExitCode::FAILURE),
            None => Ok(()),
        },
    }
}

fn admit_safely(
    invocation: &Invocation,
    loaded: &Loaded,
    mistakes: &Mistakes,
    attempt: u32,
    messages: &Messages,
) -> Admission {
    let config = &loaded.config;
    catch_unwind(|| admit_and_record(invocation, config, mistakes, attempt, messages))
        .unwrap_or_else(|_| {
            // The panic's own message is on stderr.
            let refusal = refusal_of_unseen("the guard panicked", config.policy());
            if refusal.is_none() {
                messages.problem("the guard panicked; the container is created as it is");
            }
            if let Some(journal) = config.journal() {
                let bundle = (&*invocation.bundle, invocation.id.as_deref());
                let how = (Unchecked::Died, "the guard panicked");
                messages.recorded(record_unchecked(
                    journal,
                    bundle,
                    attempt,
                    how,
                    refusal.as_deref(),
                ));
            }
            Admission {
                refusal,
                ..Admission::default()
            }
        })
}

/// `mistakes`: the log has the new mistakes of the config already.
fn admit_and_record(
    invocation: &Invocation,
    config: &Config,
    mistakes: &Mistakes,
    attempt: u32,
    messages: &Messages,
) -> Admission {
    let which = if attempt == 0 {
        Attempt::First
    } else {
        Attempt::Again
    };
    let mut policy = *config.policy();
    let uncompared = match &invocation.spec {
        Some(spec) if invocation.is_create => refusal_of_uncompared(
            &format!("the spec is not the bundle's own, but {}", spec.display()),
            &policy,
        ),
        Some(_) | None => None,
    };
    if !invocation.is_create || invocation.spec.is_some() {
        policy.proof = Alarm::Off;
    }
    let runtime = exec_runtime::file_name(config.runtime());
    policy.words_recurse = runtime.as_bytes().starts_with(b"crun");
    // youki 0.7 makes every bind a slave of the host's mount, whatever the spec requests. youki
    // creates no container whose spec sets `linux.rootfsPropagation` to rslave
    // (`libcontainer::rootfs`), the value that a host-root bind needs with crun.
    if runtime.as_bytes().starts_with(b"youki") {
        policy.host_root = Mode::Off;
    }
    let mut admission = match &invocation.doubt {
        _ if uncompared.is_some() => Admission {
            report: Report::about_bundle(&invocation.bundle),
            refusal: uncompared,
            ..Admission::default()
        },
        Some(doubt)
            if invocation.is_verb_in_doubt || refusal_of_unseen(doubt, &policy).is_some() =>
        {
            Admission::of_unseen(&invocation.bundle, doubt, &policy)
        }
        doubt => {
            let (bundle, places) = (&invocation.bundle, config.places());
            let mut admission = match &invocation.spec {
                Some(spec) => admit_with_spec(bundle, spec, &policy, places, which),
                None => admit(bundle, &policy, places, which),
            };
            admission.report.problems.extend(doubt.clone());
            admission
        }
    };
    if !invocation.is_create || invocation.spec.is_some() {
        // `run` starts the container at once, `restore` mounts what the checkpoint had, and a proof
        // reads the bundle's own spec.
        admission.report.unproven = admission.report.binds.len() + admission.report.foreign;
    }
    let own_problems = admission.report.problems.len();
    admission.report.problems.extend_from_slice(&mistakes.new);
    // First of all: the journal gets the line whatever happens later.
    if let Some(journal) = config.journal() {
        let entry = JournalEntry {
            refused: admission.refusal.as_deref(),
            unchecked: None,
            id: invocation.id.as_deref(),
            attempt,
            pid: None,
            report: &admission.report,
        };
        messages.recorded(record(journal, &entry));
    }
    mistakes.are_reported();
    admission.report.problems.truncate(own_problems);
    messages.report_findings(&admission.report);
    admission
}
