//! The mounts whose holders are searched, identified by shown directories and by covered places.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable};

/// The mounts at or below a path, or of a device, described in a way that is valid in every
/// namespace.
#[derive(Debug, Clone, Default)]
pub struct MountsToFind {
    /// A mount of a listed device matches if its root is a listed directory or a path below.
    shown: HashMap<Device, HashSet<PathBuf>>,
    /// A mount matches if it covers this place or a path below it.
    covered: Option<(Device, PathBuf)>,
}

impl MountsToFind {
    /// The mounts at or below `path` in this namespace's table. `path` is as the kernel prints it.
    pub fn at_or_below(path: &Path, own: &MountTable) -> Self {
        let mut shown: HashMap<Device, HashSet<PathBuf>> = HashMap::new();
        for entry in own
            .entries()
            .iter()
            .filter(|entry| entry.mount_point.starts_with(path))
        {
            shown
                .entry(entry.device)
                .or_default()
                .insert(entry.root.path.clone());
        }
        Self {
            shown,
            covered: place_under(path, own),
        }
    }

    /// All mounts of a device.
    pub fn of_device(device: Device) -> Self {
        Self {
            shown: HashMap::from([(device, HashSet::from([PathBuf::from("/")]))]),
            covered: None,
        }
    }

    /// True if `entry`, a mount of `table`, shows or covers a wanted place.
    pub fn is(&self, entry: &MountEntry, table: &MountIndex<'_>) -> bool {
        let shows = |roots: &HashSet<PathBuf>| {
            entry
                .root
                .path
                .ancestors()
                .any(|above| roots.contains(above))
        };
        let covers = |(device, place): &(Device, PathBuf)| {
            let covered = table
                .parent(entry)
                .filter(|parent| parent.device == *device);
            covered
                .and_then(|parent| parent.place_in_filesystem(&entry.mount_point))
                .is_some_and(|it| it.starts_with(place))
        };
        self.shown.get(&entry.device).is_some_and(shows)
            || self.covered.as_ref().is_some_and(covers)
    }
}

/// The directory of the filesystem that `path` names beneath the mounts on it.
fn place_under(path: &Path, own: &MountTable) -> Option<(Device, PathBuf)> {
    let under = match own.stack_at(path).next() {
        Some(bottom) => own
            .mount(bottom.parent)
            .filter(|parent| parent.id != bottom.id)?,
        None => own.mount_over(path)?,
    };
    Some((under.device, under.place_in_filesystem(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(lines: &str) -> MountTable {
        MountTable::from_mountinfo(lines.as_bytes()).unwrap()
    }

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 8:2 / /mnt/disk rw shared:2 - ext4 /dev/sdb rw\n";
    const CONTAINER: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n13 12 8:2 / /host/mnt/disk rw - ext4 /dev/sdb rw\n14 11 8:2 /sub /data rw - ext4 /dev/sdb rw\n";

    fn found(wanted: &MountsToFind, table: &MountTable) -> Vec<u32> {
        let index = MountIndex::of(table);
        table
            .entries()
            .iter()
            .filter(|entry| wanted.is(entry, &index))
            .map(|entry| entry.id.0)
            .collect()
    }

    #[test]
    fn a_copy_and_a_bind_of_a_part_show_the_same() {
        let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &table(HOST));
        assert_eq!(found(&wanted, &table(CONTAINER)), [13, 14]);
        assert_eq!(
            found(
                &MountsToFind::of_device(Device { major: 8, minor: 2 }),
                &table(CONTAINER)
            ),
            [13, 14]
        );
    }

    #[test]
    fn a_mount_that_is_unmounted_here_is_found_by_the_path_that_it_covers() {
        let unmounted = table("1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n");
        let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &unmounted);
        assert_eq!(found(&wanted, &table(CONTAINER)), [13]);
        let elsewhere = MountsToFind::at_or_below(Path::new("/mnt/other"), &unmounted);
        assert_eq!(found(&elsewhere, &table(CONTAINER)), Vec::<u32>::new());
    }
}
