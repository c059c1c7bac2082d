//! Reports the guard's progress to the shim.
//!
//! The shim gives the guard the write end of a pipe and a deadline. The first line reports that the
//! runtime begins now, or that nothing was repaired; a pipe that closes without a line means that
//! the guard died. A second line, which an older shim does not read, explains a failure of the
//! runtime. Without bindguard's shim the pipe does not exist.

use std::env;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;

use bindguard_core::handover::{ATTEMPT_VARIABLE, GuardAnswer, PIPE_VARIABLE};
use bindguard_guard::inherited_pipe;

/// The variables that the shim sets for the guard, and that the runtime does not need.
pub const VARIABLES: [&str; 2] = [PIPE_VARIABLE, ATTEMPT_VARIABLE];

/// The pipe to the shim, if the shim passed a pipe, and the attempt.
#[derive(Debug)]
pub struct Handover {
    pipe: Option<OwnedFd>,
    attempt: u32,
}

impl Handover {
    /// From the environment. A value that is not a pipe's number counts as missing.
    pub fn from_environment() -> Self {
        let pipe = number(PIPE_VARIABLE).and_then(inherited_pipe);
        // A later attempt may end without a container, which only a shim understands.
        let attempt = pipe.as_ref().and(number(ATTEMPT_VARIABLE)).unwrap_or(0);
        Self { pipe, attempt }
    }

    /// The number of this create of the container, counted from 0; 0 without a shim of bindguard's.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// True if a shim of bindguard's reads the pipe.
    pub fn has_reader(&self) -> bool {
        self.pipe.is_some()
    }

    /// Sends the answer. `unrepaired`: the reason for which the runtime may fail.
    pub fn answer(&self, answer: &GuardAnswer, unrepaired: Option<&str>) {
        if let Some(pipe) = self.pipe.as_ref().and_then(|pipe| pipe.try_clone().ok()) {
            // A shim that no longer reads has given up on the guard, and has ended this process or
            // is about to.
            let _ = fs::File::from(pipe).write_all(answer.text(unrepaired).as_bytes());
        }
    }
}

fn number(name: &str) -> Option<u32> {
    env::var(name).ok()?.parse().ok()
}
