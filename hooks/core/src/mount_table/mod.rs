//! The kernel's mount table, as `/proc/PID/mountinfo` prints it.
//!
//! Mirrors proc_pid_mountinfo(5) and `show_mountinfo` in the kernel's `fs/proc_namespace.c`. A line
//! that cannot be read makes the table incomplete, and the table names the line: "could not read"
//! must not pass for "not mounted". Most readers refuse such a table.

mod entry;
mod parse;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::text::{below, lies_in};

pub use crate::mount_table::entry::{
    Device, FsType, MountAttributes, MountEntry, MountId, MountRoot, Propagation,
};
pub use crate::mount_table::parse::{
    ExceededLimit, ParseError, StatmountEntry, StatmountError, TableError, TableLimits,
    TableParser, WrongField,
};

// Queries on a mount table.

/// All mounts of one mount namespace, in the kernel's order, but those of skipped lines. A table
/// with a skipped line proves no negative: that a path has no mount, that nothing covers a mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MountTable {
    entries: Vec<MountEntry>,
    skipped: Option<ParseError>,
}

impl MountTable {
    /// A table of these mounts.
    pub fn from_entries(entries: Vec<MountEntry>) -> Self {
        Self {
            entries,
            skipped: None,
        }
    }

    /// The first line that is not a mount, if the table is incomplete.
    pub fn skipped(&self) -> Option<&ParseError> {
        self.skipped.as_ref()
    }

    /// The same table.
    ///
    /// # Errors
    /// If a line was skipped.
    pub fn complete(self) -> Result<Self, ParseError> {
        match self.skipped {
            Some(skipped) => Err(skipped),
            None => Ok(self),
        }
    }

    /// The mounts, in the kernel's order.
    pub fn entries(&self) -> &[MountEntry] {
        &self.entries
    }

    /// The mount points, in the kernel's order.
    pub fn mount_points(&self) -> impl Iterator<Item = &Path> {
        self.entries.iter().map(|entry| entry.mount_point.as_path())
    }

    /// True if a mount is on `entry`: umount(2) would fail.
    pub fn has_mounts_on(&self, entry: &MountEntry) -> bool {
        let mut mounts = self.entries.iter();
        mounts.any(|it| it.parent == entry.id && it.id != entry.id)
    }

    /// Renames `real` and all paths below it to `named`, for a reader who sees them under that
    /// name.
    pub fn with_name(mut self, real: &Path, named: &Path) -> Self {
        for entry in &mut self.entries {
            if let Ok(below) = entry.mount_point.strip_prefix(real) {
                entry.mount_point = named.join(below);
            }
        }
        self
    }

    /// The mount with this id.
    pub fn mount(&self, id: MountId) -> Option<&MountEntry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    /// The topmost mount at the nearest mount point at or above `path`, a path of the namespace.
    pub fn mount_over(&self, path: &Path) -> Option<&MountEntry> {
        let mounts = self.entries.iter();
        mounts
            .filter(|entry| path.starts_with(&entry.mount_point))
            .max_by_key(|entry| entry.mount_point.components().count())
    }

    /// True if `mount` was made after `other`; `None` if the table lacks either mount. The kernel
    /// lists mounts in the order in which they were made, and the mounts of a copied namespace in
    /// the order of their places.
    pub fn is_listed_after(&self, mount: MountId, other: MountId) -> Option<bool> {
        let position = |id: MountId| self.entries.iter().position(|entry| entry.id == id);
        Some(position(mount)? > position(other)?)
    }

    /// The mounts at exactly this mount point, hidden mounts included.
    pub fn stack_at(&self, mount_point: &Path) -> impl Iterator<Item = &MountEntry> {
        self.entries
            .iter()
            .filter(move |entry| entry.mount_point == mount_point)
    }
}

// An index of a mount table, for as many queries as the table has mounts. Each query is a look-up,
// not a scan.

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
        let mut by_id = HashMap::new();
        let mut by_mount_point: HashMap<&Path, Vec<_>> = HashMap::new();
        for entry in table.entries() {
            by_id.entry(entry.id).or_insert(entry);
            let stack = by_mount_point.entry(&entry.mount_point);
            stack.or_default().push(entry);
        }
        Self {
            by_id,
            by_mount_point,
            table,
        }
    }

    /// The mount with this id.
    pub fn mount(&self, id: MountId) -> Option<&'t MountEntry> {
        self.by_id.get(&id).copied()
    }

    /// The mount below `entry`; `None` for the root of the namespace.
    pub fn parent(&self, entry: &MountEntry) -> Option<&'t MountEntry> {
        self.mount(entry.parent)
            .filter(|parent| parent.id != entry.id)
    }

    /// The mounts at exactly this mount point, hidden mounts included.
    pub fn stack_at(&self, mount_point: &Path) -> &[&'t MountEntry] {
        let stack = self.by_mount_point.get(mount_point);
        stack.map_or(&[], Vec::as_slice)
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

// The same directory on two mounts: mounts made on `other` appear here, see mount_namespaces(7).

impl MountEntry {
    /// Translates `path` on this mount to the same place on `other`, if mounts made on `other`
    /// appear on this mount. This mount is then a peer or slave of `other`. For a place above the
    /// root of `other`, the result is the mount point of `other`.
    ///
    /// `path` must be as the kernel would print it, without symlinks. `None` if `other` and this
    /// mount are the same.
    pub fn name_at_origin(&self, path: &Path, other: &MountEntry) -> Option<PathBuf> {
        let group = other.propagation.peer_group?;
        let receives =
            [self.propagation.peer_group, self.propagation.master].contains(&Some(group));
        if !receives || self.id == other.id {
            return None;
        }
        let place = self.place_in_filesystem(path)?;
        match below(&place, &other.root.path) {
            // Joining an empty path would leave a slash at the end.
            Some(rest) if !rest.as_os_str().is_empty() => Some(other.mount_point.join(rest)),
            _ => lies_in(&other.root.path, &place).then(|| other.mount_point.clone()),
        }
    }
}

#[cfg(test)]
mod table_tests {
    use super::*;

    const TABLE: &str = "1 1 8:1 / / rw - ext4 a rw\n2 1 8:2 / /run rw - tmpfs b rw\n3 2 8:2 /x /run/x rw - tmpfs b rw\n";

    #[test]
    fn a_mount_on_another_has_that_mount_as_its_parent() {
        let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        let found: Vec<bool> = table
            .entries()
            .iter()
            .map(|entry| table.has_mounts_on(entry))
            .collect();
        assert_eq!(found, [true, true, false]);
        // The root of a namespace may be its own parent.
        let root = MountTable::from_entries(table.entries()[..1].to_vec());
        assert!(!root.has_mounts_on(&root.entries()[0]));
    }

    #[test]
    fn a_mount_is_listed_after_earlier_mounts_only() {
        let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        for (mount, other, expected) in [
            (2, 1, Some(true)),
            (1, 2, Some(false)),
            (2, 2, Some(false)),
            (2, 9, None),
        ] {
            let (mount, other) = (MountId(mount), MountId(other));
            assert_eq!(table.is_listed_after(mount, other), expected);
        }
    }

    #[test]
    fn a_renamed_path_takes_the_mounts_below_it_along() {
        let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        let table = table.with_name(Path::new("/run"), Path::new("/link"));
        let points: Vec<&Path> = table.mount_points().collect();
        assert_eq!(points, ["/", "/link", "/link/x"].map(Path::new));
    }
}

#[cfg(test)]
mod index_tests {
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

#[cfg(test)]
mod peers_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;
    use crate::mount_table::MountTable;

    /// As on Container-Optimized OS: one disk, with several folders bound to the paths that
    /// programs use.
    const TABLE: &str = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 8:9 / /mnt/disk rw shared:9 - ext4 /dev/sda9 rw
31 21 8:9 /var /var rw shared:9 - ext4 /dev/sda9 rw
32 31 8:9 /var/lib/kubelet /var/lib/kubelet rw shared:9 - ext4 /dev/sda9 rw
33 21 8:9 /var /slave rw master:9 - ext4 /dev/sda9 rw
34 21 8:9 / /alone rw - ext4 /dev/sda9 rw
";

    #[test]
    fn a_peer_and_a_slave_show_mounts_at_another_name() {
        let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        let mount = |point: &str| {
            table
                .entries()
                .iter()
                .find(|entry| entry.mount_point == Path::new(point))
                .unwrap()
        };
        let kubelets = mount("/var/lib/kubelet");
        let name = |on: &str, path: &str| mount(on).name_at_origin(Path::new(path), kubelets);
        for (on, path, expected) in [
            ("/mnt/disk", "/mnt/disk", "/var/lib/kubelet"),
            ("/mnt/disk", "/mnt/disk/var/lib", "/var/lib/kubelet"),
            ("/mnt/disk", "/mnt/disk/var/lib/kubelet", "/var/lib/kubelet"),
            (
                "/mnt/disk",
                "/mnt/disk/var/lib/kubelet/pods",
                "/var/lib/kubelet/pods",
            ),
            (
                "/slave",
                "/slave/lib/kubelet/pods/u",
                "/var/lib/kubelet/pods/u",
            ),
        ] {
            assert_eq!(
                name(on, path).as_deref(),
                Some(Path::new(expected)),
                "{path}"
            );
        }
        for (on, path) in [
            ("/mnt/disk", "/mnt/disk/var/log"),
            ("/mnt/disk", "/mnt/disk/var/lib/kubelet2"),
            ("/alone", "/alone/var/lib/kubelet"),
            ("/", "/etc"),
            ("/var/lib/kubelet", "/var/lib/kubelet/pods"),
        ] {
            assert_eq!(name(on, path), None, "{path}");
        }
    }
}
