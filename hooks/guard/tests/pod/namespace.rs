//! A mount namespace of the calling thread's own, and what is bound in it.

#[path = "../../../sys/tests/folder/mod.rs"]
mod folder;
#[path = "../../../sys/tests/namespace/mod.rs"]
mod own;

use std::path::Path;

use serde_json::{Value, json};

#[allow(unused_imports, reason = "not every test file needs all of them")]
pub use {
    folder::Folder,
    own::{bind, skipped},
};

/// A shared `/`, as systemd sets it up, invisible to the host. `false`, with a printed reason, without privilege.
pub fn own_namespace() -> bool {
    own::enter(true)
}

/// A bind as the CRI writes it.
pub fn mount_of(source: &Path, destination: &str, propagation: &str) -> Value {
    json!({"type": "bind", "source": source, "destination": destination, "options": ["rbind", propagation, "ro"]})
}
