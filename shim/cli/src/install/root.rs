//! Another root file system, and one installer at a time.
//!
//! `--root` is chroot(2), so that a link in the other root leads where it leads there, and the containerd that is asked is
//! that root's own.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use super::record::FOLDER;

/// Makes `root` this process's root.
pub fn enter(root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root).with_context(|| format!("make {} the root directory", root.display()))?;
    rustix::process::chdir("/").with_context(|| format!("go to {}", root.display()))
}

/// Waits until no other installer is at work here.
pub fn lock() -> Result<File> {
    let place = Path::new("/run/bindguard");
    fs::create_dir_all(place).with_context(|| format!("create {}", place.display()))?;
    let path = place.join("install.lock");
    let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("lock {} for {FOLDER}", path.display()))?;
    Ok(file)
}
