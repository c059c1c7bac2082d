//! Kubelets that bindguard's config does not name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountTable};

use bindguard_core::kubelet::VolumeSubpath;

/// The unknown kubelet roots below which volume-subpaths are mounted: no check covers their pods. A
/// known root that is bound from another folder, as on minikube, has two names.
pub fn other_roots<'a>(
    table: &MountTable,
    known: impl IntoIterator<Item = &'a Path>,
) -> BTreeSet<PathBuf> {
    let known: BTreeSet<&Path> = known.into_iter().collect();
    let roots = table
        .entries()
        .iter()
        .filter_map(|entry| root_of_subpath(&entry.mount_point));
    let mut others: BTreeSet<PathBuf> = roots
        .filter(|root| !known.contains(root.as_path()))
        .collect();
    others.retain(|root| {
        let place = place_in(table, root);
        !known
            .iter()
            .any(|known| place.is_some() && place_in(table, known) == place)
    });
    others
}

/// The filesystem and the folder in it that a path shows. A subpath's place is no clue: it has the
/// same file at both names of a root.
pub(crate) fn place_in(table: &MountTable, path: &Path) -> Option<(Device, PathBuf)> {
    let mount = table.mount_over(path)?;
    Some((mount.device, mount.place_in_filesystem(path)?))
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

    /// minikube binds `/var/lib/kubelet` from its disk.
    #[test]
    fn another_name_of_a_known_root_is_no_other_root() {
        let text = "\
267 47 0:46 / /var/lib rw shared:186 - tmpfs v rw
269 47 0:74 / /mnt rw shared:187 - tmpfs d rw
270 267 0:74 /d/kubelet /var/lib/kubelet rw shared:187 - tmpfs d rw
271 270 0:74 /d/kubelet/pods/u/f /var/lib/kubelet/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
280 269 0:74 /d/kubelet/pods/u/f /mnt/d/kubelet/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
281 269 0:74 /d/kubelet/pods/u/f /mnt/d/other/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
";
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let others = other_roots(&table, [Path::new("/var/lib/kubelet")]);
        assert_eq!(others, BTreeSet::from([PathBuf::from("/mnt/d/other")]));
    }
}
