//! A temporary folder in which a test mounts things.

use std::path::Path;

use bindguard_sys::read_mount_table;
use nix::mount::{MntFlags, umount2};

/// A folder that is removed with all mounts in it.
pub struct Folder(tempfile::TempDir);

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        self.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What a mount covers cannot be removed, even where only a namespace that is about to end
        // has the mount.
        let table = read_mount_table().unwrap();
        let inside = table
            .entries()
            .iter()
            .rev()
            .filter(|mount| mount.mount_point.starts_with(self.path()));
        for mount in inside {
            let _ = umount2(
                &mount.mount_point,
                MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW,
            );
        }
    }
}
