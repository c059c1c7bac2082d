//! Mounts that must stay: the node or a container runs on them.
//!
//! bindguard never advises a command that unmounts such a mount, regardless of the holder.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountEntry, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;

use crate::host_mounts::is_of_the_kernel;

/// Directories of the node, in addition to those of the kubelet and the runtimes, whose mounts the
/// node needs.
const DIRECTORIES: [&str; 8] = [
    "/boot",
    "/boot/efi",
    "/etc",
    "/run/lock",
    "/tmp",
    "/usr",
    "/var/log",
    "/var/tmp",
];

/// The system mounts of a node.
#[derive(Debug)]
pub(super) struct SystemMounts<'p> {
    places: &'p Places,
    shown: HashSet<(Device, PathBuf)>,
}

impl<'p> SystemMounts<'p> {
    /// Finds them among the reader's own mounts.
    pub fn of(own: &MountTable, places: &'p Places) -> Self {
        let found = own
            .entries()
            .iter()
            .filter(|entry| is_system(&entry.mount_point, places));
        let shown = found
            .map(|entry| (entry.device, entry.root.path.clone()))
            .collect();
        Self { places, shown }
    }

    /// True for the path of a system mount, or of a directory in or below which the kubelet or a
    /// runtime mounts things.
    pub fn is_at(&self, path: &Path) -> bool {
        is_system(path, self.places)
    }

    /// True if a mount of any namespace is its root, a kernel mount, or shows the same as a system
    /// mount.
    pub fn must_stay(&self, entry: &MountEntry) -> bool {
        entry.mount_point == Path::new("/")
            || is_of_the_kernel(&entry.mount_point)
            || self
                .shown
                .contains(&(entry.device, entry.root.path.clone()))
    }
}

fn is_system(path: &Path, places: &Places) -> bool {
    let is_above = places
        .directories()
        .any(|directory| lies_in(directory, path));
    is_above
        || DIRECTORIES
            .iter()
            .any(|directory| path == Path::new(directory))
        || is_of_the_kernel(path)
}
