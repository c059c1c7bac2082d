//! mount(2) and umount(2), as mount(8) makes them.

use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mounts a tmpfs.
pub fn tmpfs(target: impl AsRef<Path>, options: &str) -> Result<()> {
    let target = target.as_ref();
    mount(Some("tmpfs"), target, Some("tmpfs"), MsFlags::empty(), Some(options))
        .with_context(|| format!("mount a tmpfs on {}", target.display()))
}

/// Binds `source` over `target`, one mount only.
pub fn bind(source: impl AsRef<Path>, target: impl AsRef<Path>) -> Result<()> {
    let (source, target) = (source.as_ref(), target.as_ref());
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("bind {} over {}", source.display(), target.display()))
}

/// Takes away the topmost mount on `target`, as umount(8) does: a busy one stays.
pub fn unmount(target: impl AsRef<Path>) -> Result<()> {
    let target = target.as_ref();
    umount2(target, MntFlags::UMOUNT_NOFOLLOW).with_context(|| format!("umount {}", target.display()))
}
