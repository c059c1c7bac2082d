//! Another root file system: of an image, or of a node as a pod sees it.
//!
//! `--root` uses chroot(2): links in the other root resolve inside it, and that root's own containerd is run.

use std::path::Path;

use anyhow::{Context, Result};

/// Makes `root` this process's root.
pub fn enter(root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root).with_context(|| format!("make {} the root directory", root.display()))?;
    rustix::process::chdir("/").with_context(|| format!("go to {}", root.display()))
}
