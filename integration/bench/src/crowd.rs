//! A node with many mounts: binds of a tmpfs, in the node's mount namespace, in which containerd
//! and all shims live.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bindguard_integration::Node;
use bindguard_integration::mount_calls::{bind, tmpfs};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The mounts that were added.
#[derive(Debug)]
pub struct Crowd {
    folder: PathBuf,
    mounts: u64,
}

impl Crowd {
    pub fn gather(node: &Node) -> Result<Self> {
        let folder = node.disk().join("crowd");
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        tmpfs(&folder, "mode=755")?;
        mount(
            None::<&str>,
            &folder,
            None::<&str>,
            MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .context("make the crowd private")?;
        Ok(Self { folder, mounts: 0 })
    }

    /// Adds mounts until there are so many.
    pub fn grow_to(&mut self, mounts: u64) -> Result<()> {
        for number in self.mounts..mounts {
            let place = self.folder.join(number.to_string());
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
            bind(&self.folder, &place)?;
        }
        self.mounts = self.mounts.max(mounts);
        Ok(())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        if let Err(errno) = umount2(&self.folder, MntFlags::MNT_DETACH) {
            eprintln!("umount {}: {errno}", self.folder.display());
        }
    }
}
