//! An index of a mount table, for as many queries as the table has mounts. Each query is a look-up,
//! not a scan.

use std::collections::HashMap;
use std::path::Path;

use super::entry::{MountEntry, MountId};
use super::table::MountTable;

/// The mounts of a table by id and by mount point. Mounts at the same mount point are in the
/// kernel's order.
#[derive(Debug)]
pub struct MountIndex<'t> {
    by_id: HashMap<MountId, &'t MountEntry>,
    by_mount_point: HashMap<&'t Path, Vec<&'t MountEntry>>,
    table: &'t MountTable,
}

impl<'t> MountIndex<'t> {
    /// Indexes the table.
    pub fn of(table: &'t MountTable) -> Self {
        let mut index = Self {
            by_id: HashMap::new(),
            by_mount_point: HashMap::new(),
            table,
        };
        for entry in table.entries() {
            index.by_id.entry(entry.id).or_insert(entry);
            index
                .by_mount_point
                .entry(&entry.mount_point)
                .or_default()
                .push(entry);
        }
        index
    }

    /// The mount with this id.
    pub fn mount(&self, id: MountId) -> Option<&'t MountEntry> {
        self.by_id.get(&id).copied()
    }

    /// The mount below `entry`; `None` for the root of the namespace.
    pub fn parent(&self, entry: &MountEntry) -> Option<&'t MountEntry> {
        self.by_id
            .get(&entry.parent)
            .copied()
            .filter(|parent| parent.id != entry.id)
    }

    /// The mounts at exactly this mount point, hidden mounts included.
    pub fn stack_at(&self, mount_point: &Path) -> &[&'t MountEntry] {
        self.by_mount_point
            .get(mount_point)
            .map_or(&[], Vec::as_slice)
    }

    /// The topmost mount at the nearest mount point at or above `path`.
    pub fn mount_over(&self, path: &Path) -> Option<&'t MountEntry> {
        path.ancestors()
            .find_map(|above| self.stack_at(above).last().copied())
    }

    /// True if `mount` was made after `other`: see [`MountTable::is_listed_after`].
    pub fn is_listed_after(&self, mount: &MountEntry, other: &MountEntry) -> bool {
        self.table.is_listed_after(mount.id, other.id) == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_as_the_table_does() {
        let text = "1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /run rw - tmpfs b rw\n3 1 8:2 /x /run rw - tmpfs b rw\n4 9 8:1 / /gone rw - ext4 a rw\n";
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let index = MountIndex::of(&table);
        let [root, run, ..] = table.entries() else {
            panic!("four mounts");
        };
        assert!(index.is_listed_after(run, root));
        assert!(!index.is_listed_after(root, run));
        for path in ["/", "/run", "/run/deep/er", "/running", "/gone/x"].map(Path::new) {
            assert_eq!(
                index.mount_over(path),
                table.mount_over(path),
                "{}",
                path.display()
            );
            assert!(
                index
                    .stack_at(path)
                    .iter()
                    .copied()
                    .eq(table.stack_at(path)),
                "{}",
                path.display()
            );
        }
        let parents: Vec<_> = table
            .entries()
            .iter()
            .map(|entry| index.parent(entry).map(|parent| parent.id.0))
            .collect();
        assert_eq!(parents, [None, Some(1), Some(1), None]);
    }
}
