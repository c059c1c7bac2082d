//! The guard of a create: checks the bundle's binds, records the result, and decides.

use std::fs::{self, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::catch_unwind;

use bindguard_config::{Config, Loaded};
use bindguard_core::plan::{refusal_of_uncompared, refusal_of_unseen};
use bindguard_core::policy::{Alarm, Mode};
use bindguard_core::report::{Report, Unchecked};
use bindguard_guard::{
    Admission, Attempt, JournalEntry, admit, admit_with_spec, record, record_unchecked,
};
use rustix::thread::{CapabilitySet, capabilities};

use crate::argv::Invocation;
use crate::exec_runtime;
use crate::messages::Messages;

/// The hash of the file whose mistakes were reported last. It goes with a reboot.
const REPORTED: &str = "/run/bindguard/config-mistakes";

/// Checks and repairs the binds of the bundle that this call creates a container from.
pub fn admit_safely(
    invocation: &Invocation,
    loaded: &Loaded,
    attempt: u32,
    messages: &Messages,
) -> Admission {
    let mistakes = Mistakes::of(loaded);
    for mistake in &mistakes.new {
        messages.remark(mistake);
    }
    // The runtime itself reports a missing spec, and a user who may not mount cannot repair binds.
    // Without that right, and without access to the node's journal, the guard has no work.
    let is_worth_checking = invocation.doubt.is_some() || !has_no_spec(invocation);
    let may_mount =
        || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if !is_worth_checking || !may_mount() {
        return Admission::default();
    }
    let config = &loaded.config;
    let admitted =
        catch_unwind(|| admit_and_record(invocation, config, &mistakes, attempt, messages));
    if let Ok(admission) = admitted {
        return admission;
    }
    // The panic's own message is on stderr.
    let why = "the guard panicked";
    let refusal = refusal_of_unseen(why, config.policy());
    if refusal.is_none() {
        messages.problem("the guard panicked; the container is created as it is");
    }
    if let Some(journal) = config.journal() {
        messages.recorded(record_unchecked(
            journal,
            (&*invocation.bundle, invocation.id.as_deref()),
            attempt,
            (Unchecked::Died, why),
            refusal.as_deref(),
        ));
    }
    Admission {
        refusal,
        ..Admission::default()
    }
}

fn has_no_spec(invocation: &Invocation) -> bool {
    let found = match &invocation.spec {
        Some(spec) => fs::metadata(spec),
        None => fs::metadata(invocation.bundle.join("config.json")),
    };
    found.is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
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
    // `run` starts the container at once, `restore` mounts what the checkpoint had, and a proof
    // reads the bundle's own spec.
    let is_provable = invocation.is_create && invocation.spec.is_none();
    let mut policy = *config.policy();
    let uncompared = match &invocation.spec {
        Some(spec) if invocation.is_create => refusal_of_uncompared(
            &format!("the spec is not the bundle's own, but {}", spec.display()),
            &policy,
        ),
        Some(_) | None => None,
    };
    if !is_provable {
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
    let bundle = &invocation.bundle;
    let mut admission = match &invocation.doubt {
        _ if uncompared.is_some() => Admission {
            report: Report::about_bundle(bundle),
            refusal: uncompared,
            ..Admission::default()
        },
        Some(doubt)
            if invocation.is_verb_in_doubt || refusal_of_unseen(doubt, &policy).is_some() =>
        {
            Admission::of_unseen(bundle, doubt, &policy)
        }
        doubt => {
            let places = config.places();
            let mut admission = match &invocation.spec {
                Some(spec) => admit_with_spec(bundle, spec, &policy, places, which),
                None => admit(bundle, &policy, places, which),
            };
            admission.report.problems.extend(doubt.clone());
            admission
        }
    };
    if !is_provable {
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

/// The mistakes in the node's config, which are reported once per version of the file: not with each
/// of thousands of creates.
#[derive(Debug)]
struct Mistakes {
    /// Empty if they were reported before.
    new: Vec<String>,
    /// The hash of the config file with these mistakes.
    hash: String,
}

impl Mistakes {
    fn of(loaded: &Loaded) -> Self {
        let mut new = loaded.remarks();
        let mut hasher = DefaultHasher::new();
        (&new, &loaded.text).hash(&mut hasher);
        let hash = format!("{:x}", hasher.finish());
        if !new.is_empty() && fs::read_to_string(REPORTED).is_ok_and(|old| old == hash) {
            new.clear();
        }
        Self { new, hash }
    }

    /// Remembers that they were reported. If this fails, the next create reports them again.
    fn are_reported(&self) {
        if self.new.is_empty() {
            return;
        }
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(REPORTED);
        if let Ok(mut file) = file {
            let _ = file.write_all(self.hash.as_bytes());
        }
    }
}
