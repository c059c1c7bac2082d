//! A runc that does what a story wants at a verb: wait, be killed, kill the shim that called it,
//! leave a broken log.
//!
//! Real faults come at a bad moment, and waiting for luck makes flaky tests. So the runtime on
//! containerd's `PATH` becomes a script (`runc.sh`) that checks if anything is laid out for this
//! verb, does it, and becomes the real runc. It also keeps the arguments of every call.

mod gate;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

pub use self::gate::Gate;
use crate::process::write_program;

/// The fault for the next call of a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The runtime is killed this long after the call.
    Killed(Duration),
    /// The runtime is killed between the end of its work and its answer.
    KilledAfterwards,
    /// The shim is killed this long after the call of the runtime.
    ShimKilled(Duration),
    /// The shim is killed when the runtime has done its work.
    ShimKilledAfterwards,
    /// The runtime fails, and its log ends in the middle of a line.
    GarbledLog,
    /// The runtime records the arguments and fails at once.
    OnlyRecord,
    /// The runtime uses a copy of the spec, edited by this sed(1) expression; the spec is
    /// unchanged.
    ReadsAnotherSpec(&'static str),
    /// The runtime edits the spec by this sed(1) expression, as nvidia-container-runtime does.
    RewritesSpec(&'static str),
}

impl Fault {
    fn line(self) -> String {
        let seconds = |delay: Duration| format!("{:.3}", delay.as_secs_f64());
        match self {
            Self::Killed(delay) => format!("kill-it {}\n", seconds(delay)),
            Self::KilledAfterwards => "kill-it-after\n".to_owned(),
            Self::ShimKilled(delay) => format!("kill-shim {}\n", seconds(delay)),
            Self::ShimKilledAfterwards => "kill-shim-after\n".to_owned(),
            Self::GarbledLog => "garble-the-log\n".to_owned(),
            Self::OnlyRecord => "only-record\n".to_owned(),
            Self::ReadsAnotherSpec(edit) => format!("edit-spec {edit}\n"),
            Self::RewritesSpec(edit) => format!("rewrite-spec {edit}\n"),
        }
    }
}

/// The runtime of a node that was set up with `obedient_runtime`.
#[derive(Clone, Debug)]
pub struct ObedientRuntime(PathBuf);

impl ObedientRuntime {
    /// The runtime of the node with this folder of programs.
    pub fn of(programs: &Path) -> Self {
        Self(programs.join("runc.d"))
    }

    /// Puts the script in the place of `runc`.
    pub(crate) fn install(&self, oci: &Path) -> Result<()> {
        fs::create_dir(&self.0).with_context(|| format!("create {}", self.0.display()))?;
        let quoted = |path: &Path| format!("'{}'", path.display());
        let script = include_str!("runc.sh")
            .replace("@REAL@", &quoted(oci))
            .replace("@FOLDER@", &quoted(&self.0));
        let program = self.0.with_file_name("runc");
        write_program(&program, &script)
    }

    /// Lays out what happens to the next call of a verb.
    pub fn next(&self, verb: &str, fault: Fault) -> Result<()> {
        self.lay_out(verb, &fault.line())
    }

    /// Removes the fault for a verb. Returns true if the fault was unused: the runtime was not
    /// called.
    pub fn take_back(&self, verb: &str) -> bool {
        fs::remove_file(self.0.join(verb)).is_ok()
    }

    /// The arguments of every call so far, a line for each call.
    pub fn calls(&self) -> Result<Vec<String>> {
        let file = self.0.join("calls");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// The arguments of the last call of a verb.
    pub fn last_call(&self, verb: &str) -> Result<String> {
        let calls = self.calls()?;
        let call = calls
            .iter()
            .rfind(|call| call.split(' ').any(|word| word == verb));
        call.cloned()
            .with_context(|| format!("find a call of {verb} in {calls:?}"))
    }

    fn lay_out(&self, name: &str, content: &str) -> Result<()> {
        // whole at once: a call may be looking
        let (beside, file) = (self.0.join("beside"), self.0.join(name));
        fs::write(&beside, content).with_context(|| format!("write {}", beside.display()))?;
        fs::rename(&beside, &file)
            .with_context(|| format!("rename {} to {}", beside.display(), file.display()))
    }
}
