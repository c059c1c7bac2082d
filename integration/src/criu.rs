//! Stories with criu, and a container that shows whether it was restored or started anew.
//!
//! All generations use the newest generation's criu: Debian 12's criu does not know the vdso of
//! Linux 6.18. If criu does not work on the kernel, the story is skipped aloud.

use std::os::unix::fs::symlink;

use anyhow::{Context, Result};

use crate::node::{Node, Setup};
use crate::privilege::skipped;
use crate::process::run;
use crate::programs::{Generation, Matrix};
use crate::waiting::until;

/// Counts in memory: after a start without a restore the count begins at 1.
pub const COUNTER: [&str; 3] = [
    "sh",
    "-c",
    "n=0; while :; do n=$((n + 1)); echo $n > /count; sleep 0.01; done",
];

impl Setup {
    /// Runs a story on this node, with criu on containerd's `PATH`.
    pub fn story_with_criu(self, story: impl FnOnce(&Node) -> Result<()>) {
        self.story(|node| {
            let criu = Matrix::locate()?.program(Generation::NEWEST, "criu");
            // On the node: it writes its findings about the kernel to `/run`.
            let mut check = node.command(&criu)?;
            check.arg("check");
            if !run(check)?.status.success() {
                skipped("no criu that works with this kernel");
                return Ok(());
            }
            symlink(&criu, node.programs().join("criu"))
                .context("put criu on containerd's PATH")?;
            story(node)
        });
    }
}

/// Waits until a container that runs [`COUNTER`] has counted so far, and returns its count.
pub fn wait_for_count(node: &Node, id: &str, least: u64) -> Result<u64> {
    let mut count = 0;
    until(&format!("{id} counts up to {least}"), || {
        // Empty in the moment between its truncation and the next line.
        count = node.ctr().read(id, "/count")?.trim().parse().unwrap_or(0);
        Ok(count >= least)
    })?;
    Ok(count)
}
