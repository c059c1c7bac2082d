//! Finds the umounts here that reach the mounts of other namespaces.
//!
//! A umount propagates from the parent of the unmounted mount: to the parent's peers, to their
//! slaves, and to the slaves of those. The kernel unmounts the mount at the same place on each. The
//! propagation of the mount itself does not matter: a shared or slave copy stays if the mount below
//! it is private. See mount_namespaces(7) and `propagate_umount` in the kernel's `fs/pnode.c`.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};

/// The umounts of some mounts of the reader's own namespace.
#[derive(Debug, Default)]
pub(super) struct Spread<'t> {
    /// The key is a peer group that the umount reaches, and the place within the group's
    /// filesystem.
    reached: HashMap<(u32, PathBuf), &'t MountEntry>,
}

impl<'t> Spread<'t> {
    /// The umounts of `mounts`. `tables`: those of all namespaces, the reader's `own` included.
    pub(super) fn of<'o>(
        mounts: &[&'t MountEntry],
        own: &MountIndex<'_>,
        tables: impl Iterator<Item = &'o MountTable>,
    ) -> Self {
        let slaves = Slaves::in_tables(tables);
        let (mut spread, mut known) = (Self::default(), HashMap::new());
        for mount in mounts {
            let Some(parent) = own.parent(mount) else {
                continue;
            };
            let (Some(group), Some(place)) = (
                parent.propagation.peer_group,
                parent.place_in_filesystem(&mount.mount_point),
            ) else {
                continue;
            };
            for reached in known
                .entry(group)
                .or_insert_with(|| slaves.reached_from(group))
                .iter()
            {
                spread
                    .reached
                    .entry((*reached, place.clone()))
                    .or_insert(mount);
            }
        }
        spread
    }

    /// The mount here whose umount also unmounts `entry`. `table`: that of the entry's own
    /// namespace.
    pub(super) fn reaching(
        &self,
        entry: &MountEntry,
        table: &MountIndex<'_>,
    ) -> Option<&'t MountEntry> {
        let parent = table.parent(entry)?;
        let place = parent.place_in_filesystem(&entry.mount_point)?;
        let groups = [parent.propagation.peer_group, parent.propagation.master];
        groups
            .into_iter()
            .flatten()
            .find_map(|group| self.reached.get(&(group, place.clone())).copied())
    }
}

/// The peer groups that receive mounts, by their master group.
struct Slaves(HashMap<u32, HashSet<u32>>);

impl Slaves {
    fn in_tables<'o>(tables: impl Iterator<Item = &'o MountTable>) -> Self {
        let mut slaves: HashMap<u32, HashSet<u32>> = HashMap::new();
        for propagation in tables
            .flat_map(MountTable::entries)
            .map(|entry| &entry.propagation)
        {
            if let (Some(master), Some(group)) = (propagation.master, propagation.peer_group) {
                slaves.entry(master).or_default().insert(group);
            }
        }
        Self(slaves)
    }

    /// The group and all groups that receive from the group, directly or indirectly.
    fn reached_from(&self, group: u32) -> HashSet<u32> {
        let (mut reached, mut next) = (HashSet::from([group]), vec![group]);
        while let Some(group) = next.pop() {
            next.extend(
                self.0
                    .get(&group)
                    .into_iter()
                    .flatten()
                    .filter(|slave| reached.insert(**slave)),
            );
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::path::Path;

    use super::*;

    const HOST: &str = "\
1 0 8:1 / / rw shared:1 - ext4 a rw
2 1 0:40 / /mnt/p rw shared:2 - tmpfs p rw
3 2 0:41 / /mnt/p/c rw shared:3 - tmpfs c rw
4 1 0:42 / /mnt/q rw - tmpfs q rw
5 4 0:43 / /mnt/q/c rw shared:5 - tmpfs d rw
";

    /// The umount on the host that also unmounts the mount with this id in another namespace.
    fn reaching(elsewhere: &str, id: u32) -> Option<String> {
        let [host, other] =
            [HOST, elsewhere].map(|text| MountTable::from_mountinfo(text.as_bytes()).unwrap());
        let mounts: Vec<_> = host
            .entries()
            .iter()
            .filter(|it| it.mount_point.starts_with("/mnt"))
            .collect();
        let spread = Spread::of(&mounts, &MountIndex::of(&host), [&host, &other].into_iter());
        let entry = other
            .entries()
            .iter()
            .find(|entry| entry.id.0 == id)
            .unwrap();
        let found = spread
            .reaching(entry, &MountIndex::of(&other))
            .map(|mount| mount.mount_point.as_path());
        found.map(|point: &Path| point.display().to_string())
    }

    #[test]
    fn the_mount_below_decides_and_not_the_mount_itself() {
        let slave_of = |p: &str, c: &str| {
            format!(
                "11 0 8:1 / / rw master:1 - ext4 a rw\n12 11 0:40 / /mnt/p rw{p} - tmpfs p rw\n13 12 0:41 / /mnt/p/c rw{c} - tmpfs c rw\n"
            )
        };
        assert_eq!(
            reaching(&slave_of(" master:2", " master:3"), 13).as_deref(),
            Some("/mnt/p/c")
        );
        assert_eq!(
            reaching(&slave_of("", " master:3"), 13),
            None,
            "its parent is private"
        );
        assert_eq!(
            reaching(&slave_of(" master:2", ""), 13).as_deref(),
            Some("/mnt/p/c"),
            "it is private itself"
        );
        assert_eq!(reaching(&slave_of("", ""), 12).as_deref(), Some("/mnt/p"));
        let below_private =
            "11 0 0:42 / / rw - tmpfs q rw\n12 11 0:43 / /c rw master:5 - tmpfs d rw\n";
        assert_eq!(
            reaching(below_private, 12),
            None,
            "the host's own parent is private"
        );
    }

    #[test]
    fn a_umount_goes_on_through_slaves_that_are_shared_and_to_other_names() {
        let through = "11 0 8:1 / / rw shared:9 master:1 - ext4 a rw\n20 0 8:1 /mnt /host rw master:9 - ext4 a rw\n21 20 0:40 / /host/p rw - tmpfs p rw\n";
        assert_eq!(reaching(through, 21).as_deref(), Some("/mnt/p"));
        let elsewhere = "20 0 8:1 /srv /host rw master:1 - ext4 a rw\n21 20 0:40 / /host/p rw master:2 - tmpfs p rw\n";
        assert_eq!(
            reaching(elsewhere, 21),
            None,
            "it is mounted at another place"
        );
    }
}
