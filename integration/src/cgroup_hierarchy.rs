//! The cgroup hierarchy that tracks the processes of a node.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// The folder of the cgroup hierarchy in which a node's own processes are tracked, if a hierarchy
/// is writable.
///
/// A single v1 hierarchy is enough to follow a process's descendants; the containers are in all v1
/// hierarchies.
pub fn tracking_hierarchy() -> Option<PathBuf> {
    let places = [
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup/freezer",
        "/sys/fs/cgroup/systemd",
        "/sys/fs/cgroup",
    ];
    let place = places
        .iter()
        .map(Path::new)
        .find(|place| place.join("cgroup.procs").exists())?;
    access(place, AccessFlags::W_OK)
        .is_ok()
        .then(|| place.to_path_buf())
}
