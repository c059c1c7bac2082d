//! The verbs of bindguard's own, which bindguard's shim runs each in a process of its own, because a
//! file server may hang, and the proof of a container at a runtime's `start`. A runtime has no verbs
//! of these names.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::handover::{DETACH_VERB, PROVE_VERB, UNCHECKED_VERB};
use bindguard_core::proof::EXPECTED_FILE;
use bindguard_guard::{
    JournalEntry, Proved, bundle_and_pid, detach_below_emptydirs, prove_container, record,
    record_release, record_unchecked, uncompared_container,
};

use crate::argv::Invocation;
use crate::messages::Messages;

/// The runtimes. If the caller names no folder for their state, the folder has the runtime's name.
const RUNTIMES: [&str; 3] = ["runc", "crun", "youki"];

/// Runs a verb of bindguard's own. `None` for any other verb.
pub fn run(args: &[OsString], config: &Config) -> Option<ExitCode> {
    prove(args, config)
        .or_else(|| detach(args, config))
        .or_else(|| record_no_check(args, config))
        .map(|()| ExitCode::SUCCESS)
}

/// `bindguard-runtime [RUNTIME FLAGS] bindguard-prove --bundle BUNDLE ID PID [WHY]`, which the shim
/// runs if it found a difference. A reason to refuse the container is printed. With `WHY`, the
/// journal gets the reason why an earlier comparison came to no end.
fn prove(args: &[OsString], config: &Config) -> Option<()> {
    let (invocation, more) = Invocation::of_own_verb(args, PROVE_VERB)?;
    let [pid, ref why @ ..] = more[..] else {
        return None;
    };
    let messages = Messages::for_invocation(&invocation, true);
    let container = NewContainer {
        pid: pid.to_str()?.parse().ok()?,
        id: invocation.id,
        bundle: invocation.bundle,
    };
    if let [why] = why {
        let why = why.to_string_lossy();
        let proved = uncompared_container(&container.bundle, &why, config.policy());
        container.record(&proved, config, &messages);
    } else if let Some(refusal) = container.prove(config, &messages) {
        println!("{refusal}");
    }
    Some(())
}

/// `bindguard-runtime bindguard-detach --bundle BUNDLE ID`: at the end of a pod's sandbox.
fn detach(args: &[OsString], config: &Config) -> Option<()> {
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
    Some(())
}

/// `bindguard-runtime [RUNTIME FLAGS] bindguard-unchecked --bundle BUNDLE ID ATTEMPT HOW WHY
/// [REFUSAL]`: records a create whose guard did not come to an end. The shim runs this verb after
/// killing a late guard, or finding a dead guard.
fn record_no_check(args: &[OsString], config: &Config) -> Option<()> {
    let (invocation, more) = Invocation::of_own_verb(args, UNCHECKED_VERB)?;
    let [attempt, how, why, ref more @ ..] = more[..] else {
        return None;
    };
    let attempt = attempt.to_str()?.parse().ok()?;
    let how = how.to_str()?.parse().ok()?;
    let refusal = more.first().map(|refusal| refusal.to_string_lossy());
    if let Some(journal) = config.journal() {
        let recorded = record_unchecked(
            journal,
            (&invocation.bundle, invocation.id.as_deref()),
            attempt,
            (how, &why.to_string_lossy()),
            refusal.as_deref(),
        );
        Messages::for_invocation(&invocation, true).recorded(recorded);
    }
    Some(())
}

/// A new container whose program does not run yet. Its mounts are compared with the record that the
/// guard left in its bundle.
pub struct NewContainer {
    id: Option<String>,
    bundle: PathBuf,
    pid: u32,
}

impl NewContainer {
    /// The container that a call starts under other shims and engines, if the guard left a record
    /// for it.
    pub fn of_start(invocation: Invocation) -> Option<Self> {
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
    pub fn prove(&self, config: &Config, messages: &Messages) -> Option<String> {
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
        if let Some(journal) = config.journal().filter(|_| is_worth_a_line) {
            let entry = JournalEntry {
                refused: proved.refusal.as_deref(),
                unchecked: None,
                id: self.id.as_deref(),
                attempt: 0,
                pid: Some(self.pid),
                report,
            };
            messages.recorded(record(journal, &entry));
        }
    }
}
