//! The root file system of an image, or of a node as seen from a pod.
//!
//! `--root` uses chroot(2): links resolve inside the new root, and the root's own containerd is
//! run.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::attributes::identity;

/// Makes `root` this process's root.
pub fn enter(root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root)
        .with_context(|| format!("make {} the root directory", root.display()))?;
    rustix::process::chdir("/").with_context(|| format!("go to {}", root.display()))
}

/// Reads the node from here on: `root` is its root directory as a pod sees it. A pod has copies of
/// the node's mounts with a different propagation. So this function enters the mount namespace of
/// the node's first process, if this process has the given root. An image has no process:
/// `needs_mounts` fails there.
pub fn enter_node(root: &Path, needs_mounts: bool) -> Result<()> {
    let of_first_process = identity(Path::new("/proc/1/root/run"));
    if of_first_process.is_none() || of_first_process != identity(&root.join("run")) {
        ensure!(
            !needs_mounts,
            "{} is not the root of the first process here: give the pod the node's processes (hostPID), or run this on the node",
            root.display()
        );
        return enter(Some(root));
    }
    let namespace = File::open("/proc/1/ns/mnt").context("open the node's mount namespace")?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("enter the node's mount namespace")
}
