//! A mount namespace of the calling thread's own, and what is done in it.

use std::io::{self, Write};
use std::path::Path;

use bindguard_sys::read_mount_table;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

/// A shared `/`, as systemd sets it up, without the host seeing any of it. `false`, said aloud, without privilege.
pub fn own_namespace() -> bool {
    if let Err(errno) = unshare(CloneFlags::CLONE_NEWNS) {
        skipped(&format!("unshare(CLONE_NEWNS) says {errno}: this needs CAP_SYS_ADMIN"));
        return false;
    }
    for flags in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
        mount(None::<&str>, "/", None::<&str>, flags | MsFlags::MS_REC, None::<&str>).unwrap();
    }
    true
}

/// Says so past the test runner's capture of `eprintln!`.
pub fn skipped(why: &str) {
    let _ = writeln!(io::stderr(), "SKIPPED: {why}");
}

/// `mount --bind`
pub fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

/// A folder that goes with what was mounted in it.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What a mount covers cannot be removed, even where only a namespace that is about to end has the mount.
        let table = read_mount_table().unwrap();
        let inside = table.entries().iter().rev().filter(|mount| mount.mount_point.starts_with(self.path()));
        for mount in inside {
            let _ = umount2(&mount.mount_point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        }
    }
}

/// A bind as the CRI writes it.
pub fn mount_of(source: &Path, destination: &str, propagation: &str) -> Value {
    json!({"type": "bind", "source": source, "destination": destination, "options": ["rbind", propagation, "ro"]})
}
