//! Queries on a mount table.

use std::path::Path;

use super::entry::{MountEntry, MountId};
use super::parse::ParseError;

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

    pub(super) fn push(&mut self, entry: MountEntry) {
        self.entries.push(entry);
    }

    pub(super) fn skip(&mut self, line: ParseError) {
        match &mut self.skipped {
            Some(first) => first.more += 1,
            None => self.skipped = Some(line),
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
        self.entries
            .iter()
            .any(|it| it.parent == entry.id && it.id != entry.id)
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
        let above = self
            .entries
            .iter()
            .filter(|entry| path.starts_with(&entry.mount_point));
        above.max_by_key(|entry| entry.mount_point.components().count())
    }

    /// True if `mount` was made after `other`; `None` if the table lacks either mount. The kernel
    /// lists mounts in the order in which they were made, and the mounts of a copied namespace in
    /// the order of their places.
    pub fn is_listed_after(&self, mount: MountId, other: MountId) -> Option<bool> {
        let position = |id: MountId| self.entries.iter().position(|entry| entry.id == id);
        Some(position(mount)? > position(other)?)
    }

    /// The mounts at exactly this mount point, hidden mounts included.
    pub fn stack_at<'a>(&'a self, mount_point: &'a Path) -> impl Iterator<Item = &'a MountEntry> {
        self.entries
            .iter()
            .filter(move |entry| entry.mount_point == mount_point)
    }
}

#[cfg(test)]
mod tests {
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
