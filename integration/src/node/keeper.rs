//! The keeper: a small process beside the test that ends the node when the test does, however it
//! ends.
//!
//! `Drop` alone would not do: a test runner that is SIGKILLed drops nothing, and containers, shims
//! and loop devices would stay on the developer's machine. The keeper waits for the end of its
//! stdin instead. All processes of a node are in cgroups with the node's name, so no process can
//! hide from the keeper in other namespaces or sessions.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

/// The owner of the process that ends a node: when this is dropped, the node ends.
#[derive(Debug)]
pub(crate) struct Keeper(KeeperHandle);

/// A way to end the node early, from any thread.
#[derive(Clone, Debug)]
pub struct KeeperHandle(Arc<Mutex<Option<Child>>>);

impl Keeper {
    /// Starts the keeper of the node `name` with the `folders` to remove. Must be called in the
    /// host's namespace.
    pub(crate) fn start(name: &str, folders: &[&Path]) -> Result<Self> {
        let mut command = Command::new("sh");
        command
            .args(["-c", include_str!("keeper.sh"), "keeper", name])
            .args(folders)
            .stdin(Stdio::piped());
        // a separate process group: a Ctrl-C for the test must not end the keeper
        let child = command
            .process_group(0)
            .spawn()
            .context("start the keeper")?;
        Ok(Self(KeeperHandle(Arc::new(Mutex::new(Some(child))))))
    }

    /// Calls `make`, whose result the keeper will remove. After the keeper has begun to clean up,
    /// fails without the call: the result would stay.
    pub(super) fn while_it_waits<T>(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let place = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_some() {
            make()
        } else {
            Err(io::Error::other("the node has ended"))
        }
    }

    /// A handle for a thread that waits for signals.
    pub(super) fn handle(&self) -> KeeperHandle {
        self.0.clone()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.finish();
    }
}

impl KeeperHandle {
    /// Lets the keeper do its work and waits for it. The second caller finds it done.
    pub fn finish(&self) {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut child) = place.take() {
            drop(child.stdin.take());
            if let Err(error) = child.wait() {
                eprintln!("wait for the keeper of a node: {error}");
            }
        }
    }
}
