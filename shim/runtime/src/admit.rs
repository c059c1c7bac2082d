//! The guard of a create: checks the bundle's binds, records the result, and decides. And the proof
//! of a container at a runtime's `start`.
//!
//! bindguard's shim runs verbs of bindguard's own, each in a process of its own, because a file server
//! may hang. A runtime has no verbs of these names.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_config::{Config, Loaded};
use bindguard_core::error_chain;
use bindguard_core::handover::{DETACH_VERB, PROVE_VERB};
use bindguard_core::judge::{refusal_of_uncompared, refusal_of_unseen};
use bindguard_core::policy::{Alarm, Mode};
use bindguard_core::proof::EXPECTED_FILE;
use bindguard_core::report::{CreateLine, Report, Unchecked};
use bindguard_guard::{
    Admission, Attempt, Proved, admit_with_spec, bundle_and_pid, detach_below_emptydirs,
    prove_container, record, record_release, record_unchecked, uncompared_container, unless_absent,
    write_new_file,
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities};

use crate::argv::Invocation;
use crate::handover::{Messages, file_name};

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
    let has_no_spec = || {
        let found = fs::metadata(invocation.spec_file());
        unless_absent(found).is_ok_and(|found| found.is_none())
    };
    let may_mount = |sets: CapabilitySets| sets.effective.contains(CapabilitySet::SYS_ADMIN);
    if invocation.doubt.is_none() && has_no_spec() || !capabilities(None).is_ok_and(may_mount) {
        return Admission::default();
    }
    let config = &loaded.config;
    let admit = || admit_and_record(invocation, config, &mistakes, attempt, messages);
    if let Ok(admission) = catch_unwind(admit) {
        return admission;
    }
    // The panic's own message is on stderr.
    let why = "the guard panicked";
    let refusal = refusal_of_unseen(why, config.policy());
    if refusal.is_none() {
        messages.problem("the guard panicked; the container is created as it is");
    }
    let container = (&*invocation.bundle, invocation.id.as_deref());
    messages.record(config, |journal| {
        let cause = (Unchecked::Died, why);
        record_unchecked(journal, container, attempt, cause, refusal.as_deref())
    });
    Admission {
        refusal,
        ..Admission::default()
    }
}

/// `mistakes`: the log has the new mistakes of the config already.
fn admit_and_record(
    invocation: &Invocation,
    config: &Config,
    mistakes: &Mistakes,
    attempt: u32,
    messages: &Messages,
) -> Admission {
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
    let runtime = file_name(config.runtime());
    policy.words_recurse = runtime.as_bytes().starts_with(b"crun");
    // youki 0.7 makes every bind a slave of the host's mount, whatever the spec requests. youki
    // creates no container whose spec sets `linux.rootfsPropagation` to rslave
    // (`libcontainer::rootfs`), the value that a host-root bind needs with crun.
    if runtime.as_bytes().starts_with(b"youki") {
        policy.host_root = Mode::Off;
    }
    let bundle = &invocation.bundle;
    let which = match attempt {
        0 => Attempt::First,
        _ => Attempt::Again,
    };
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
            let spec = invocation.spec_file();
            let mut admission = admit_with_spec(bundle, &spec, &policy, places, which);
            admission.report.problems.extend(doubt.clone());
            admission
        }
    };
    let report = &mut admission.report;
    if !is_provable {
        report.unproven = report.binds.len() + report.foreign;
    }
    let own_problems = report.problems.len();
    report.problems.extend_from_slice(&mistakes.new);
    // First of all: the journal gets the line whatever happens later.
    let mut line = CreateLine::new(&*report);
    line.refused.clone_from(&admission.refusal);
    line.id.clone_from(&invocation.id);
    line.attempt = attempt;
    messages.record(config, |journal| record(journal, line));
    mistakes.are_reported();
    report.problems.truncate(own_problems);
    messages.report_findings(report);
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
        if !self.new.is_empty() {
            let _ = write_new_file(Path::new(REPORTED), self.hash.as_bytes(), 0o600);
        }
    }
}

// The verbs of bindguard's own, and the proof of a new container.

/// Proves the mounts of a container that these arguments start. True if policy refuses the
/// container.
pub fn is_start_refused(args: &[OsString], config: &Config) -> bool {
    let refused = catch_unwind(|| {
        let invocation = Invocation::of_verbs(args, &["start"])?;
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

/// The runtimes. If the caller names no folder for their state, the folder has the runtime's name.
const RUNTIMES: [&str; 3] = ["runc", "crun", "youki"];

/// Runs a verb of bindguard's own. `None` for any other verb.
pub fn run_own_verb(args: &[OsString], config: &Config) -> Option<ExitCode> {
    let (verb, call, more) = Invocation::of_own_verb(args)?;
    let messages = Messages::for_invocation(&call, true);
    if verb == PROVE_VERB {
        prove(call, &more, config, &messages)?;
    } else if verb == DETACH_VERB {
        detach(&call, config, &messages);
    } else {
        record_no_check(&call, &more, config, &messages)?;
    }
    Some(ExitCode::SUCCESS)
}

/// `bindguard-runtime [RUNTIME FLAGS] bindguard-prove --bundle BUNDLE ID PID [WHY]`, which the shim
/// runs if it found a difference. A reason to refuse the container is printed. With `WHY`, the
/// journal gets the reason why an earlier comparison came to no end.
fn prove(call: Invocation, more: &[&OsStr], config: &Config, messages: &Messages) -> Option<()> {
    let [pid, why @ ..] = more else { return None };
    let container = NewContainer {
        pid: pid.to_str()?.parse().ok()?,
        id: call.id,
        bundle: call.bundle,
    };
    if let [why] = why {
        let why = why.to_string_lossy();
        let proved = uncompared_container(&container.bundle, &why, config.policy());
        container.record(&proved, config, messages);
    } else if let Some(refusal) = container.prove(config, messages) {
        println!("{refusal}");
    }
    Some(())
}

/// `bindguard-runtime bindguard-detach --bundle BUNDLE ID`: at the end of a pod's sandbox.
fn detach(call: &Invocation, config: &Config, messages: &Messages) {
    let id = call.id.as_deref().unwrap_or_default();
    match detach_below_emptydirs(&call.bundle, id, config.places()) {
        Ok(lines) => {
            for line in lines {
                messages.record(config, |journal| record_release(journal, line));
            }
        }
        Err(error) => messages.remark(&format!(
            "the mounts below the pod's emptyDirs stay: {}",
            error_chain(&error)
        )),
    }
}

/// `bindguard-runtime [RUNTIME FLAGS] bindguard-unchecked --bundle BUNDLE ID ATTEMPT HOW WHY
/// [REFUSAL]`: records a create whose guard did not come to an end. The shim runs this verb after
/// killing a late guard, or finding a dead guard.
fn record_no_check(
    call: &Invocation,
    more: &[&OsStr],
    config: &Config,
    messages: &Messages,
) -> Option<()> {
    let [attempt, how, why, more @ ..] = more else {
        return None;
    };
    let attempt = attempt.to_str()?.parse().ok()?;
    let how = how.to_str()?.parse().ok()?;
    let refusal = more.first().map(|refusal| refusal.to_string_lossy());
    messages.record(config, |journal| {
        let container = (&*call.bundle, call.id.as_deref());
        let cause = (how, &*why.to_string_lossy());
        record_unchecked(journal, container, attempt, cause, refusal.as_deref())
    });
    Some(())
}

/// A new container whose program does not run yet. Its mounts are compared with the record that the
/// guard left in its bundle.
struct NewContainer {
    id: Option<String>,
    bundle: PathBuf,
    pid: u32,
}

impl NewContainer {
    /// The container that a call starts under other shims and engines, if the guard left a record
    /// for it.
    fn of_start(invocation: Invocation) -> Option<Self> {
        let id = invocation.id?;
        let mut folders = Vec::new();
        if let Some(root) = invocation.root {
            folders.push(root.join(&id));
        } else {
            // crun and rootless runtimes prefer the folder of this variable.
            let own = env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
            for parent in own.into_iter().chain(["/run".into()]) {
                for runtime in RUNTIMES {
                    folders.push(Path::new(&parent).join(runtime).join(&id));
                }
            }
        }
        let (bundle, pid) = folders.iter().find_map(|folder| bundle_and_pid(folder))?;
        bundle.join(EXPECTED_FILE).symlink_metadata().ok()?;
        Some(Self {
            id: Some(id),
            bundle,
            pid,
        })
    }

    /// Compares, and reports what differs. Returns the reason if policy refuses the container.
    fn prove(&self, config: &Config, messages: &Messages) -> Option<String> {
        let proved = prove_container(&self.bundle, self.pid, config.policy(), config.places());
        self.record(&proved, config, messages);
        proved.refusal
    }

    /// Writes the line of the journal, unless all binds are as the spec says, and the log.
    fn record(&self, proved: &Proved, config: &Config, messages: &Messages) {
        let report = &proved.report;
        messages.report_findings(report);
        let is_worth_a_line =
            !report.binds.is_empty() || report.unproven > 0 || !report.problems.is_empty();
        if is_worth_a_line {
            let mut line = CreateLine::new(report);
            line.refused.clone_from(&proved.refusal);
            line.id.clone_from(&self.id);
            line.pid = Some(self.pid);
            messages.record(config, |journal| record(journal, line));
        }
    }
}
