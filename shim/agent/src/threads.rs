//! Starts the agent's threads.

use std::thread;

use anyhow::{Context, Result};

/// Starts a thread of the agent.
///
/// # Errors
/// If there are too many.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .with_context(|| format!("start the thread {name}"))?;
    Ok(())
}
