//! Containers that run in the background, under any engine.

use std::process::Command;

use anyhow::Result;

use crate::process::{Finished, run};

/// Podman or Docker.
pub trait ContainerEngine {
    /// A command of the engine's command line.
    fn command(&self, words: &[&str]) -> Result<Command>;

    /// The command that starts a container of busybox in the background.
    fn start_command(&self, flags: &[&str], words: &[&str]) -> Result<Command>;

    /// Starts a container in the background, and returns its id.
    fn start(&self, flags: &[&str], words: &[&str]) -> Result<String> {
        Ok(run(self.start_command(flags, words)?)?
            .success()?
            .trim()
            .to_owned())
    }

    /// Runs a verb of the engine, such as `restart`, `pause` or `logs`.
    fn verb(&self, words: &[&str]) -> Result<Finished> {
        run(self.command(words)?)
    }

    /// The content that a file has for a container.
    fn read(&self, id: &str, path: &str) -> Result<String> {
        self.verb(&["exec", id, "cat", path])?.success()
    }

    /// Ends and removes a container.
    fn remove(&self, id: &str) -> Result<()> {
        self.verb(&["rm", "--force", id])?.success().map(drop)
    }
}
