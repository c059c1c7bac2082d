//! Kubelets that bindguard's config does not name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountTable;

use bindguard_core::kubelet::VolumeSubpath;

/// The unknown kubelet roots below which volume-subpaths are mounted: no check covers their pods.
pub fn other_roots<'a>(
    table: &MountTable,
    known: impl IntoIterator<Item = &'a Path>,
) -> BTreeSet<PathBuf> {
    let known: BTreeSet<&Path> = known.into_iter().collect();
    let roots = table
        .entries()
        .iter()
        .filter_map(|entry| root_of_subpath(&entry.mount_point));
    roots
        .filter(|root| !known.contains(root.as_path()))
        .collect()
}

/// Six names below its root: `pods/<uid>/volume-subpaths/<volume>/<container>/<index>`.
fn root_of_subpath(path: &Path) -> Option<PathBuf> {
    let root = path.ancestors().nth(6)?;
    VolumeSubpath::from_path(path, [root]).map(|_| root.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unconfigured_roots_are_reported() {
        let line = |root: &str| {
            format!("1 0 8:1 /x {root}/pods/u/volume-subpaths/v/c/0 rw - ext4 /dev/sda1 rw\n")
        };
        let text = [
            line("/var/lib/kubelet"),
            line("/data/kubelet"),
            line("/data/kubelet"),
        ]
        .concat();
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let others = other_roots(&table, [Path::new("/var/lib/kubelet")]);
        assert_eq!(others, BTreeSet::from([PathBuf::from("/data/kubelet")]));
    }
}
