//! A mount namespace of the calling thread's own, and what is done in it.

use std::io::{self, Write};
use std::path::Path;

use nix::mount::{MsFlags, mount};
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

/// A bind as the CRI writes it.
pub fn mount_of(source: &Path, destination: &str, propagation: &str) -> Value {
    json!({"type": "bind", "source": source, "destination": destination, "options": ["rbind", propagation, "ro"]})
}
