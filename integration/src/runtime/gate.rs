//! A gate before the runtime: holds a call back until the story lets it go on.
//!
//! kubernetes#127602 needs an update to land after everything was checked and before runc mounts; a
//! restart of containerd in the middle of a call needs a call that is in its middle.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::ObedientRuntime;
use crate::waiting::until;

/// The gate before a node's OCI runtime. Open until it is closed.
#[derive(Clone, Debug)]
pub struct Gate(ObedientRuntime);

impl Gate {
    /// The gate of the node with this folder of programs.
    pub fn of(programs: &Path) -> Self {
        Self(ObedientRuntime::of(programs))
    }

    /// Delays only the next `create`.
    pub fn close(&self) -> Result<()> {
        self.close_before("create")
    }

    /// Holds back the next call of a verb before the runtime has done anything.
    pub fn close_before(&self, verb: &str) -> Result<()> {
        self.hold(verb, "hold\n")
    }

    /// Holds back the next call of a verb when the runtime has done its work, and before the shim
    /// learns of it.
    pub fn close_after(&self, verb: &str) -> Result<()> {
        self.hold(verb, "hold-after\n")
    }

    /// Waits until a call waits at the gate.
    pub fn wait_for_call(&self) -> Result<()> {
        until("a call waits at the runtime's gate", || Ok(self.has_call()))
    }

    /// True if a call waits, or waited, at the gate since it was closed.
    pub fn has_call(&self) -> bool {
        self.0.0.join("called").exists()
    }

    /// Lets it go on.
    pub fn open(&self) -> Result<()> {
        self.0.lay_out("go", "")
    }

    /// Sends it back: the runtime is not called, and the call has failed.
    pub fn send_back(&self) -> Result<()> {
        self.0.lay_out("go", "back\n")
    }

    fn hold(&self, verb: &str, what: &str) -> Result<()> {
        for old in ["called", "go"] {
            let _ = fs::remove_file(self.0.0.join(old));
        }
        self.0.lay_out(verb, what)
    }
}
