//! Compares the mounts of a new container with the record that the guard left in its bundle, before
//! the container's program runs.
//!
//! Under bindguard's shim: `bindguard-runtime [RUNTIME FLAGS] bindguard-prove --bundle BUNDLE ID
//! PID [WHY]`, which the shim runs if it found a difference. A reason to refuse the container is
//! printed. With `WHY`, the journal gets the reason why an earlier comparison came to no end. Under
//! other shims and engines: at the runtime's verb `start`, before the runtime runs.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_config::Config;
use bindguard_core::handover::PROVE_VERB;
use bindguard_core::proof::EXPECTED_FILE;
use bindguard_guard::{
    JournalEntry, Proved, bundle_and_pid, prove_container, record, uncompared_container,
};

use crate::argv::Invocation;
use crate::messages::Messages;

/// The runtimes. If the caller names no folder for their state, the folder has the runtime's name.
const RUNTIMES: [&str; 3] = ["runc", "crun", "youki"];

/// A new container whose program does not run yet.
pub struct NewContainer {
    id: Option<String>,
    bundle: PathBuf,
    pid: u32,
}

/// Runs `bindguard-prove`. `None` for any other verb.
pub fn run_own_verb(args: &[OsString], config: impl FnOnce() -> Config) -> Option<ExitCode> {
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
    let config = config();
    if let [why] = why {
        let why = why.to_string_lossy();
        let proved = uncompared_container(&container.bundle, &why, config.policy());
        container.record(&proved, &config, &messages);
    } else if let Some(refusal) = container.prove(&config, &messages) {
        println!("{refusal}");
    }
    Some(ExitCode::SUCCESS)
}

impl NewContainer {
    /// The container that a call starts, if the guard left a record for it.
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
        let is_recorded = bundle.join(EXPECTED_FILE).symlink_metadata().is_ok();
        let container = Self {
            id: Some(id),
            bundle,
            pid,
        };
        is_recorded.then_some(container)
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
