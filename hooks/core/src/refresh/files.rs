//! The single files that a container engine bound from a directory of the host (moby#15793).
//!
//! An editor writes a new file and renames it over the old file; the container keeps the old file.
//! The host path comes from the container's spec, which no container can change. A mount belongs to
//! a bind by its destination, or by the place of its file. [`Way`](crate::refresh::Way) decides if the file that the path
//! leads to now may be shown.
//!
//! A mount whose filesystem is not the directory's belongs to a bind only at the literal
//! destination, and only if no second mount is there. Then the filesystem of the file was mounted
//! anew, as by LXCFS (lxc/lxcfs#701).

use std::path::{Path, PathBuf};

use crate::evidence::FilePlace;
use crate::judge::Expected;
use crate::mount_table::{MountEntry, MountTable};
use crate::refresh::{SubpathInContainer, judged};
use crate::text::{below, lies_below};

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
