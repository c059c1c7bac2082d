//! Reports the guard's progress to the shim.
//!
//! The shim gives the guard the write end of a pipe and a deadline. One line reports that the
//! runtime begins now, or that nothing was repaired; a pipe that closes without a line means that
//! the guard died. A second line, which an older shim does not read, explains a failure of the
//! runtime. Without a shim, or under another shim, the pipe does not exist.

use std::env;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;

use bindguard_core::handover::{
    ATTEMPT_VARIABLE, HANDOVER, MAX_LINE, PIPE_VARIABLE, PROVE, REFUSED, UNCHANGED, UNREPAIRED,
};
use bindguard_core::text::cut;
use bindguard_guard::inherited_pipe;

/// With the word before it, much less than a line.
const MAX_REASON: usize = MAX_LINE / 2;

/// The variables that the shim sets for the guard, and that the runtime does not need.
pub const VARIABLES: [&str; 2] = [PIPE_VARIABLE, ATTEMPT_VARIABLE];

/// The pipe to the shim, if there is one, and the attempt.
#[derive(Debug)]
pub struct Handover {
    pipe: Option<OwnedFd>,
    attempt: u32,
}

impl Handover {
    /// From the environment. A value that is not a pipe's number counts as missing.
    pub fn from_environment() -> Self {
        Self {
            pipe: number(PIPE_VARIABLE).and_then(inherited_pipe),
            attempt: number(ATTEMPT_VARIABLE).unwrap_or(0),
        }
    }

    /// The number of this create of the container, counted from 0.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// True if a shim of bindguard's reads the pipe.
    pub fn has_reader(&self) -> bool {
        self.pipe.is_some()
    }

    /// The runtime begins now. `prove`: the mounts of its container should be compared with the
    /// record afterwards. `unrepaired`: why it may fail.
    pub fn hand_over(&self, prove: bool, unrepaired: Option<&str>) {
        let line = if prove {
            format!("{HANDOVER} {PROVE}")
        } else {
            HANDOVER.to_owned()
        };
        self.write_with_reason(&line, unrepaired);
    }

    /// Nothing was repaired that could make a create fail, so it would fail again. `unrepaired`:
    /// why.
    pub fn unchanged(&self, unrepaired: Option<&str>) {
        self.write_with_reason(UNCHANGED, unrepaired);
    }

    /// Policy refuses the container.
    pub fn refuse(&self, reason: &str) {
        self.write(&format!("{REFUSED} {}\n", in_one_line(reason)));
    }

    fn write_with_reason(&self, answer: &str, unrepaired: Option<&str>) {
        let second = unrepaired
            .map(|reason| format!("{UNREPAIRED} {}\n", in_one_line(reason)))
            .unwrap_or_default();
        self.write(&format!("{answer}\n{second}"));
    }

    fn write(&self, line: &str) {
        if let Some(pipe) = self.pipe.as_ref().and_then(|pipe| pipe.try_clone().ok()) {
            // A shim that no longer reads has given up on the guard, and has ended this process or
            // is about to.
            let _ = fs::File::from(pipe).write_all(line.as_bytes());
        }
    }
}

/// The pod chooses the paths in it.
fn in_one_line(reason: &str) -> String {
    cut(reason, MAX_REASON).replace(char::is_control, " ")
}

fn number(name: &str) -> Option<u32> {
    env::var(name).ok()?.parse().ok()
}
