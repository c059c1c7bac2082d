//! The changes that complete a tree of new mounts.

use std::path::PathBuf;

use bindguard_core::mount_table::MountAttributes;

use crate::replace::NewMount;

/// A change of a tree of new mounts, at a path below its top.
#[derive(Debug)]
pub struct TreePart {
    /// The path below the top.
    pub path: PathBuf,
    /// The change.
    pub change: TreeChange,
}

/// A change at a place of a tree.
#[derive(Debug)]
pub enum TreeChange {
    /// Adds attributes to the mount at this place.
    Restrict(MountAttributes),
    /// Attaches a new mount.
    Attach(NewMount),
    /// Attaches a new mount, if the tree has a place of the same type.
    TryAttach(NewMount),
}
