//! What containers leave on a node when something goes wrong: nothing, says every story that counts it.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::mounts;
use crate::node::Node;

/// A shim ends a moment after its last container, and containerd answers its client before that.
const SETTLING: Duration = Duration::from_secs(10);

/// The number of things on a node that come and go with containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leftovers {
    mounts: usize,
    sockets: usize,
    runc: usize,
    bundles: usize,
    shims: usize,
}

impl Leftovers {
    /// What is there now.
    pub fn of(node: &Node) -> Result<Self> {
        let entries = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        let name = node.name();
        Ok(Self {
            mounts: mounts::table()?.len(),
            sockets: entries("/run/containerd/s"),
            runc: entries(&format!("/run/containerd/runc/{name}")),
            bundles: entries(&format!("/run/containerd/io.containerd.runtime.v2.task/{name}")),
            shims: node.shims()?.len(),
        })
    }

    /// Waits until no more is there than was at the time of `self`.
    pub fn are_all(&self, node: &Node) -> Result<()> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let now = Self::of(node)?;
            if now == *self {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "something is left\nbefore: {self:?}\nafter: {now:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
