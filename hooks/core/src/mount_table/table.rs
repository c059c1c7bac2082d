//! Questions to a mount table.

use std::path::{Path, PathBuf};

use super::entry::{MountEntry, MountId};

/// All mounts of one mount namespace, in the kernel's order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MountTable {
    entries: Vec<MountEntry>,
}

impl MountTable {
    /// A table of these mounts.
    pub fn from_entries(entries: Vec<MountEntry>) -> Self {
        Self { entries }
    }

    /// The mounts, in the kernel's order.
    pub fn entries(&self) -> &[MountEntry] {
        &self.entries
    }

    /// The mount with this id.
    pub fn mount(&self, id: MountId) -> Option<&MountEntry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    /// The mounts at exactly this mount point, hidden ones included.
    pub fn stack_at<'a>(&'a self, mount_point: &'a Path) -> impl Iterator<Item = &'a MountEntry> {
        self.entries.iter().filter(move |entry| entry.mount_point == mount_point)
    }

    /// Whether another mount lies directly below this one at the same mount point.
    ///
    /// So it looks when a swap was cut off between attaching the new mount beneath the stale one and detaching the
    /// stale one.
    pub fn covers_its_equal(&self, entry: &MountEntry) -> bool {
        self.mount(entry.parent).is_some_and(|parent| parent.mount_point == entry.mount_point && parent.id != entry.id)
    }

    /// The place of `path` within the filesystem of the mount that it is on: the mount's root, then what of the path
    /// lies below the mount point.
    ///
    /// `path` has to be as the kernel would print it, without symlinks. `None` when it does not lie below `mount`.
    pub fn place_in_filesystem(mount: &MountEntry, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&mount.mount_point).ok()?;
        // Joining an empty path would leave a slash at the end.
        Some(if below.as_os_str().is_empty() { mount.root.path.clone() } else { mount.root.path.join(below) })
    }
}
