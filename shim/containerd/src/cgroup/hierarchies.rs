//! The mount points of a node's cgroup hierarchies, without reading the mount table: all are below
//! [`ROOT`].

use std::fs;
use std::path::{Path, PathBuf};

/// The folder with one folder for each v1 hierarchy, or the mount point of v2 itself.
pub(super) const ROOT: &str = "/sys/fs/cgroup";

/// The hierarchies of this node.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    hierarchies_in(Path::new(ROOT))
}

/// The hierarchies with the controllers of this node. Beside v1 hierarchies the unified hierarchy
/// has no controllers, and containerd does not use it.
pub(crate) fn hierarchies_with_controllers() -> Vec<PathBuf> {
    with_controllers(Path::new(ROOT))
}

fn with_controllers(root: &Path) -> Vec<PathBuf> {
    let mut all = hierarchies_in(root);
    if all != [root] {
        all.retain(|hierarchy| !is_unified(hierarchy));
    }
    all
}

/// True for a mount of cgroup v2.
pub(super) fn is_unified(hierarchy: &Path) -> bool {
    fs::metadata(hierarchy.join("cgroup.controllers")).is_ok()
}

fn hierarchies_in(root: &Path) -> Vec<PathBuf> {
    if is_unified(root) {
        return vec![root.to_owned()];
    }
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    // Links such as `cpu` name the same hierarchy as `cpu,cpuacct`.
    let directories = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories
        .map(|entry| entry.path())
        .filter(|path| fs::metadata(path.join("cgroup.procs")).is_ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_two_has_one_hierarchy_and_version_one_many() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu", "memory"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
        }
        assert_eq!(hierarchies_in(dir.path()).len(), 2);
        fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(hierarchies_in(dir.path()), [dir.path()]);
    }

    #[test]
    fn the_unified_hierarchy_of_a_hybrid_node_has_no_controllers() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| dir.path().join(name);
        for name in ["memory", "unified"] {
            fs::create_dir(folder(name)).unwrap();
            fs::write(folder(name).join("cgroup.procs"), "").unwrap();
        }
        fs::write(folder("unified").join("cgroup.controllers"), "").unwrap();
        assert_eq!(hierarchies_in(dir.path()).len(), 2);
        assert_eq!(with_controllers(dir.path()), [folder("memory")]);
        fs::write(folder("cgroup.controllers"), "cpu").unwrap();
        assert_eq!(with_controllers(dir.path()), [dir.path()]);
    }
}
