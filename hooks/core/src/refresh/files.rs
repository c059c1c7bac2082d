//! The single files that a container engine bound from a directory of the host (moby#15793).
//!
//! An editor writes a new file and renames it over the old file; the container keeps the old file.
//! The host path comes from the container's spec, which no container can change. A mount belongs to
//! a bind by its destination, or by the place of its file. [`Way`](super::Way) decides if the file
//! that the path leads to now may be shown.
//!
//! A mount whose filesystem is not the directory's belongs to a bind only at the literal
//! destination, and only if no second mount is there. Then the filesystem of the file was mounted
//! anew, as by LXCFS (lxc/lxcfs#701).

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::evidence::FilePlace;
use crate::judge::{Expected, Pinning, Verdict};
use crate::mount_table::{MountEntry, MountIndex, MountTable};
use crate::paths::{below, lies_below};
use crate::refresh::{SubpathInContainer, judged};

/// A bind of a single file, from a container's spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundFile {
    /// The directory of the file on the host.
    pub directory: PathBuf,
    /// The name of the file there.
    pub name: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The place of the directory.
    pub place: FilePlace,
    /// The place of the file that the name leads to now; `None` if it is gone.
    pub current: Option<FilePlace>,
}

/// The mounts of a container that show these files, or older files of the same names.
pub fn files_in_container(table: &MountTable, files: &[BoundFile]) -> Vec<SubpathInContainer> {
    let expected_at = |mount: &MountEntry| {
        let file = files
            .iter()
            .find(|file| file.is_destination_of(mount, table))
            // The mount table names the destination without the symlinks that the image may have on
            // the way.
            .or_else(|| files.iter().find(|file| file.is_name_of(mount)))?;
        Some(file.expected())
    };
    judged(table, expected_at, |_| false)
}

impl BoundFile {
    /// The old file may have another name or another folder by now: some editors rename it to a
    /// backup, and its folder can be renamed.
    fn is_destination_of(&self, mount: &MountEntry, table: &MountTable) -> bool {
        if mount.mount_point != self.destination {
            return false;
        }
        let has_name = mount.root.path.file_name() == Some(self.name.as_os_str());
        if mount.device == self.place.device {
            return has_name || lies_below(&mount.root.path, &self.place.path);
        }
        // No mount of the container may be at the destination. An interrupted refresh leaves the
        // current file beneath.
        let current = self.current.as_ref();
        let mut here = table.stack_at(&self.destination);
        has_name
            && here.all(|other| {
                other.id == mount.id || current.is_some_and(|current| current.is_root_of(other))
            })
    }

    fn is_name_of(&self, mount: &MountEntry) -> bool {
        mount.device == self.place.device
            && below(&mount.root.path, &self.place.path).map(Path::as_os_str)
                == Some(self.name.as_os_str())
    }

    fn expected(&self) -> Expected<'_> {
        let current = self.current.as_ref();
        // A symlink may lead to another filesystem.
        let device = current.unwrap_or(&self.place).device;
        Expected::outside_payloads(&self.directory, device, &self.name, current)
    }
}

// Host-root binds that the runtime made private: the container keeps a copy of every mount that
// existed when the container started.
//
// A mount of the container belongs to a bind if it is at the bind's literal destination and shows
// the source that the host has now. The destination must have exactly one mount. The exception is
// an interrupted refresh, which leaves the new mount beneath the old mount. So a mount that the
// container made on top is never replaced.

/// A recursive bind of a spec that was judged [`Verdict::Pinning`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRootBind {
    /// The source on the host, without symlinks.
    pub source: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The place of the source in its filesystem.
    pub current: FilePlace,
    /// The verdict on the bind of the spec.
    pub pinning: Pinning,
}

/// The container's mounts that were made for these binds, with verdicts:
/// [`Verdict::Pinning`] for a private mount, [`Verdict::Current`] for a mount that receives the
/// host's umounts, [`Verdict::Foreign`] for a private mount that the container covered.
pub fn host_roots_in_container(
    table: &MountTable,
    binds: &[HostRootBind],
) -> Vec<SubpathInContainer> {
    binds
        .iter()
        .filter_map(|bind| bind.shown_in(table))
        .collect()
}

impl HostRootBind {
    fn shown_in(&self, table: &MountTable) -> Option<SubpathInContainer> {
        let stack: Vec<&MountEntry> = table.stack_at(&self.destination).collect();
        let lowest = *stack
            .iter()
            .find(|mount| stack.iter().all(|other| mount.parent != other.id))?;
        let above = stack.iter().find(|mount| mount.parent == lowest.id);
        let verdict = self.verdict_on(lowest)?;
        let (mount, verdict, covers_its_equal) = match above {
            None => (lowest, verdict, false),
            // The two mounts of an interrupted refresh: the mount beneath was made last.
            Some(top)
                if stack.len() == 2
                    && verdict == Verdict::Current
                    && matches!(self.verdict_on(top), Some(Verdict::Pinning(_)))
                    && table.is_listed_after(lowest.id, top.id) == Some(true) =>
            {
                (*top, Verdict::Pinning(self.pinning.clone()), true)
            }
            Some(_) if verdict == Verdict::Current => (lowest, verdict, false),
            Some(_) => (lowest, Verdict::Foreign, false),
        };
        Some(SubpathInContainer {
            covers_its_equal,
            ..SubpathInContainer::of_whole(table, mount, &self.source, verdict)
        })
    }

    /// `None` for a mount that does not show the source.
    fn verdict_on(&self, mount: &MountEntry) -> Option<Verdict> {
        if !self.current.is_root_of(mount) || mount.root.deleted {
            return None;
        }
        Some(match mount.propagation.passes_umounts_on() {
            true => Verdict::Current,
            false => Verdict::Pinning(self.pinning.clone()),
        })
    }
}

// The containers that may write a folder of the host, by their mount tables or their specs.
//
// A container that may write a folder can lead a name in it elsewhere. That gives nothing to a
// container that has the file already: an agent with a writable `/` could reach every file without
// a refresh.

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
    let mut judged = 0;
    for mount in table.entries().iter().rev() {
        let rest = file
            .below(mount)
            .filter(|_| !to_write || !mount.is_read_only());
        let Some(rest) = rest else { continue };
        if judged == MAX_JUDGED_MOUNTS {
            return false;
        }
        judged += 1;
        // The container sees the file if no mount hides the path: only the parents of this mount
        // lie on the way to the mount.
        let path = mount.mount_point.join(rest);
        let mut carrying = HashSet::from([mount.id]);
        let mut next = index.parent(mount);
        while let Some(parent) = next.filter(|parent| carrying.insert(parent.id)) {
            next = index.parent(parent);
        }
        let mut mounts = table.entries().iter();
        if mounts.all(|other| carrying.contains(&other.id) || !path.starts_with(&other.mount_point))
        {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::Device;

    fn file(current: Option<&str>) -> BoundFile {
        BoundFile {
            directory: "/srv/app".into(),
            name: "app.conf".into(),
            destination: "/etc/app.conf".into(),
            place: place("/app"),
            current: current.map(place),
        }
    }

    fn place(path: &str) -> FilePlace {
        FilePlace {
            device: Device { major: 8, minor: 1 },
            path: path.into(),
        }
    }

    /// The verdict on a mount with this device, root and mount point.
    fn state(current: Option<&str>, device: &str, root: &str, point: &str) -> Option<&'static str> {
        let text = format!(
            "1 0 0:9 / / rw - overlay o rw\n2 1 {device} {root} {point} rw - ext4 /dev/sda1 rw\n"
        );
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        files_in_container(&table, &[file(current)])
            .first()
            .map(|it| it.verdict.name().as_str())
    }

    #[test]
    fn a_file_is_stale_once_its_name_leads_to_another_one() {
        let (here, at) = (Some("/app/app.conf"), "/etc/app.conf");
        let (stale, current) = (Some("stale"), Some("current"));
        // Replaced by rename; renamed to a backup; the backup removed; the file removed; a link
        // within the directory.
        for (now, root, expected) in [
            (here, "/app/app.conf", current),
            (here, "/app/app.conf//deleted", stale),
            (here, "/app/app.conf~", stale),
            (here, "/app/app.conf~//deleted", stale),
            (None, "/app/app.conf//deleted", stale),
            (
                Some("/app/releases/3/app.conf"),
                "/app/releases/3/app.conf",
                current,
            ),
            (
                Some("/app/releases/3/app.conf"),
                "/app/releases/2/app.conf",
                stale,
            ),
        ] {
            assert_eq!(state(now, "8:1", root, at), expected, "{root}");
        }
        // The folder was renamed, and a different folder has the name.
        assert_eq!(state(here, "8:1", "/app.old/app.conf", at), stale);
        // The image has a symlink on the way to the destination.
        assert_eq!(
            state(here, "8:1", "/app/app.conf//deleted", "/run/etc/app.conf"),
            stale
        );
    }

    /// `8:1` is the filesystem of now.
    #[test]
    fn a_file_of_a_filesystem_that_was_mounted_anew_is_stale_unless_the_container_mounted_it() {
        let (current, at) = (Some("/app/app.conf"), "/etc/app.conf");
        let states = |mounts: &[&str]| {
            let lines = mounts
                .iter()
                .map(|mount| format!("{mount} rw - fuse d rw\n"));
            let text = format!(
                "1 0 0:9 / / rw - overlay o rw\n{}",
                lines.collect::<String>()
            );
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            let found = files_in_container(&table, &[file(current)]);
            let state = |it: &SubpathInContainer| (it.mount.id.0, it.is_due());
            found.iter().map(state).collect::<Vec<_>>()
        };
        let old = "2 1 0:7 /app.conf /etc/app.conf";
        assert_eq!(states(&[old]), [(2, true)]);
        let own = "3 2 0:8 /app.conf /etc/app.conf";
        assert_eq!(states(&[old, own]), []);
        // An interrupted refresh: the new mount is beneath, and made last.
        let (top, beneath) = (
            "2 3 0:7 /app.conf /etc/app.conf",
            "3 1 8:1 /app/app.conf /etc/app.conf",
        );
        assert_eq!(states(&[top, beneath]), [(2, true)]);
        // A mount of the container on the current mount.
        let (first, over) = (
            "2 1 8:1 /app/app.conf /etc/app.conf",
            "3 2 0:8 /app.conf /etc/app.conf",
        );
        assert_eq!(states(&[first, over]), [(2, false)]);
        assert_eq!(state(current, "0:7", "/app.conf", "/mnt/app.conf"), None);
        assert_eq!(state(current, "0:7", "/other", at), None);
        // The name is a symlink to a file of another filesystem.
        let mut linked = file(current);
        linked.current = Some(FilePlace {
            device: Device { major: 0, minor: 7 },
            path: "/app.conf".into(),
        });
        let text = format!("1 0 0:9 / / rw - overlay o rw\n{old} rw - fuse d rw\n");
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        assert!(files_in_container(&table, &[linked])[0].is_current());
    }

    #[test]
    fn a_mount_of_another_directory_is_none_of_ours() {
        let at = "/etc/app.conf";
        for (device, root, point) in [
            ("8:2", "/app/own.conf//deleted", at),
            ("8:2", "/app/app.conf//deleted", "/etc/other.conf"),
            ("8:1", "/other/own.conf//deleted", at),
            ("8:1", "/other/app.conf//deleted", "/etc/other.conf"),
            ("8:1", "/application/own.conf", at),
            ("8:1", "/app", at),
            ("8:1", "/", at),
            ("8:1", "/app/other.conf", "/etc/other.conf"),
            ("8:1", "/app/sub/app.conf", "/etc/other.conf"),
        ] {
            assert_eq!(
                state(Some("/app/app.conf"), device, root, point),
                None,
                "{device} {root} {point}"
            );
        }
    }
}

#[cfg(test)]
mod host_roots_tests {
    use super::*;
    use crate::mount_table::Device;

    fn states(mounts: &[&str]) -> Vec<(u32, &'static str)> {
        let bind = HostRootBind {
            source: "/".into(),
            destination: "/host".into(),
            current: FilePlace {
                device: Device { major: 8, minor: 1 },
                path: "/".into(),
            },
            pinning: Pinning {
                bind: true,
                rootfs: false,
                private_mount: None,
                kept: None,
            },
        };
        let lines = mounts.iter().map(|line| format!("{line}\n"));
        let text = format!(
            "1 0 0:9 / / rw - overlay o rw\n{}",
            lines.collect::<String>()
        );
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let state = |it: &SubpathInContainer| match (it.is_current(), it.is_due()) {
            (true, _) => "current",
            (_, true) if it.covers_its_equal => "unfinished",
            (_, true) => "due",
            (false, false) => "kept",
        };
        host_roots_in_container(&table, &[bind])
            .iter()
            .map(|it| (it.mount.id.0, state(it)))
            .collect()
    }

    const PRIVATE: &str = "5 1 8:1 / /host rw - ext4 d rw";

    #[test]
    fn a_private_mount_is_due() {
        assert_eq!(states(&[PRIVATE]), [(5, "due")]);
        for propagation in ["master:7", "shared:7", "shared:7 master:9"] {
            let line = format!("5 1 8:1 / /host rw {propagation} - ext4 d rw");
            assert_eq!(states(&[&line]), [(5, "current")], "{propagation}");
        }
        let within = "6 5 8:2 / /host/disk rw - ext4 e rw";
        assert_eq!(states(&[PRIVATE, within]), [(5, "due")]);
    }

    #[test]
    fn a_mount_that_the_container_made_is_kept() {
        assert_eq!(states(&["5 1 8:2 / /host rw - ext4 d rw"]), []);
        assert_eq!(states(&["5 1 8:1 /sub /host rw - ext4 d rw"]), []);
        let over = "6 5 0:8 / /host rw - tmpfs t rw";
        assert_eq!(states(&[PRIVATE, over]), [(5, "kept")]);
        let slave = "5 1 8:1 / /host rw master:7 - ext4 d rw";
        let own = "6 5 8:1 / /host rw - ext4 d rw";
        assert_eq!(states(&[slave, own]), [(5, "current")]);
    }

    #[test]
    fn a_refresh_that_was_interrupted_is_finished() {
        let (old, new) = (
            "5 6 8:1 / /host rw - ext4 d rw",
            "6 1 8:1 / /host rw master:7 - ext4 d rw",
        );
        assert_eq!(states(&[old, new]), [(5, "unfinished")]);
        let over = "7 5 0:8 / /host rw - tmpfs t rw";
        assert_eq!(states(&[old, new, over]), [(6, "current")]);
    }
}

#[cfg(test)]
mod writers_tests {
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
