//! The containers that may write a folder of the host, by their mount tables or their specs.
//!
//! A container that may write a folder can lead a name in it elsewhere. That gives nothing to a
//! container that has the file already: an agent with a writable `/` could reach every file without
//! a refresh.

use std::collections::HashSet;
use std::path::Path;

use crate::evidence::FilePlace;
use crate::mount_table::{MountEntry, MountIndex, MountTable};

/// Limit of judged mounts of a container for a file. Each costs milliseconds if the mount table has
/// 65,536 mounts.
const MAX_JUDGED_MOUNTS: usize = 64;

/// True if a container with these mounts may write the folder, and has no access to the file.
/// `hidden` are the places that the container may write besides: the container may have unmounted
/// their mounts, and keep a folder open. `to_write`: read access to the file does not suffice.
pub fn can_lead(
    table: &MountTable,
    hidden: &[FilePlace],
    folder: &FilePlace,
    file: &FilePlace,
    to_write: bool,
) -> bool {
    let may_write = |mount: &MountEntry| !mount.is_read_only() && folder.below(mount).is_some();
    let is_hidden = hidden.iter().any(|place| folder.lies_in(place));
    (is_hidden || table.entries().iter().any(may_write)) && !has(table, file, to_write)
}

/// True if the container surely has the file. A container decides how many mounts give the file, so
/// only the newest are judged.
fn has(table: &MountTable, file: &FilePlace, to_write: bool) -> bool {
    let index = MountIndex::of(table);
    let gives = |mount: &&MountEntry| !(to_write && mount.is_read_only());
    let mounts = table.entries().iter().rev().filter(gives);
    let given = mounts.filter_map(|mount| {
        let rest = file.below(mount)?;
        Some((mount, mount.mount_point.join(rest)))
    });
    given
        .take(MAX_JUDGED_MOUNTS)
        .any(|(mount, path)| is_seen(table, &index, mount, &path))
}

/// True if no mount hides the path: only the parents of this mount lie on the way to the mount.
fn is_seen(table: &MountTable, index: &MountIndex<'_>, mount: &MountEntry, path: &Path) -> bool {
    let mut carrying = HashSet::from([mount.id]);
    let mut next = index.parent(mount);
    while let Some(parent) = next.filter(|parent| carrying.insert(parent.id)) {
        next = index.parent(parent);
    }
    let mounts = table.entries().iter();
    let mut on_the_way = mounts.filter(|other| path.starts_with(&other.mount_point));
    on_the_way.all(|other| carrying.contains(&other.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::Device;

    fn container(mounts: &str) -> MountTable {
        let text = format!("1 0 0:9 / / rw - overlay o rw\n{mounts}");
        MountTable::from_mountinfo(text.as_bytes()).unwrap()
    }

    fn place(path: &str) -> FilePlace {
        FilePlace {
            device: Device { major: 8, minor: 1 },
            path: path.into(),
        }
    }

    /// A container stacks as many binds of its folder as its mount table may have.
    #[test]
    fn a_stack_of_many_mounts_is_judged_in_time() {
        let stacked = |id: u32| format!("{id} {} 8:1 /p/data /data rw - ext4 d rw\n", id - 1);
        let mounts: String = (2..30_000).map(stacked).collect();
        let container = container(&mounts);
        let folder = place("/p/data");
        assert!(!can_lead(
            &container,
            &[],
            &folder,
            &place("/p/data/conf"),
            false
        ));
        assert!(can_lead(&container, &[], &folder, &place("/p/conf"), false));
    }

    #[test]
    fn a_container_leads_only_to_files_that_it_does_not_have() {
        let data = "2 1 8:1 /p/data /data rw - ext4 d rw\n";
        let masked = format!("{data}3 2 0:40 / /data/secret rw - tmpfs t rw\n");
        let all = "2 1 8:1 / /host rw - ext4 d rw\n";
        let over = format!("{data}3 1 0:40 / /data rw - tmpfs t rw\n");
        for (mounts, file, to_write, can) in [
            (data, "/p/.env", false, true),
            (data, "/p/data/conf/.env", false, false),
            (data, "/p/data2/.env", false, true),
            (masked.as_str(), "/p/data/secret/.env", false, true),
            (masked.as_str(), "/p/data/conf/.env", false, false),
            (over.as_str(), "/p/data/conf/.env", false, true),
            (all, "/p/.env", true, false),
            (
                "2 1 8:1 /p/data /data ro - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d ro\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:2 /p/data /data rw - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data//deleted /data rw - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d rw\n3 1 8:1 /p /all ro - ext4 d rw\n",
                "/p/.env",
                false,
                false,
            ),
            (
                "2 1 8:1 /p/data /data rw - ext4 d rw\n3 1 8:1 /p /all ro - ext4 d rw\n",
                "/p/.env",
                true,
                true,
            ),
        ] {
            assert_eq!(
                can_lead(
                    &container(mounts),
                    &[],
                    &place("/p/data"),
                    &place(file),
                    to_write
                ),
                can,
                "{mounts}{file}"
            );
        }
    }
}
