//! The mount points of a node's cgroup hierarchies, without reading the mount table: all below one folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The folder that holds one folder a v1 hierarchy, or is itself the one of v2.
const ROOT: &str = "/sys/fs/cgroup";

/// The hierarchies of this node.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    hierarchies_in(Path::new(ROOT))
}

fn hierarchies_in(root: &Path) -> Vec<PathBuf> {
    if fs::metadata(root.join("cgroup.controllers")).is_ok() {
        return vec![root.to_owned()];
    }
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    // Links such as `cpu` name the same hierarchy as `cpu,cpuacct`.
    let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.map(|entry| entry.path()).filter(|path| fs::metadata(path.join("cgroup.procs")).is_ok()).collect()
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
}
