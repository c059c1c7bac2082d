//! The single files that a container engine bound from a directory of the host (moby#15793).
//!
//! An editor writes a new file and renames it over the old one; the container keeps the old one. The host path comes from the
//! container's spec, which no container can change. A mount belongs to it only if it shows a file of the same directory: so
//! a refresh can never show a container a file of another directory.

use std::path::PathBuf;

use super::{ShownPart, SubpathInContainer, states};
use crate::mount_table::{Device, MountEntry, MountTable};
use crate::paths::below;

/// A bind of a single file, from a container's spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundFile {
    /// The directory of the file on the host.
    pub directory: PathBuf,
    /// The name of the file there.
    pub name: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The device of the directory's filesystem.
    pub device: Device,
    /// The directory's place within that filesystem.
    pub place: PathBuf,
    /// The place of the file that the name leads to now; `None` if it is gone.
    pub current: Option<PathBuf>,
}

/// The mounts of a container that show these files, or older files of the same names.
pub fn files_in_container(table: &MountTable, files: &[BoundFile]) -> Vec<SubpathInContainer> {
    states(table, |mount| {
        let by_destination = files.iter().find(|file| file.is_destination_of(mount));
        // The mount table names the destination without the symlinks that the image may have on the way.
        let by_name = || files.iter().find(|file| file.is_name_of(mount));
        let file = by_destination.or_else(by_name)?;
        Some(ShownPart {
            volume: file.directory.clone(),
            sub_path: file.name.clone(),
            is_current: !mount.root.deleted && file.current.as_deref() == Some(&mount.root.path),
        })
    })
}

impl BoundFile {
    /// The file may have another name by now: some editors rename the old file to a backup.
    fn is_destination_of(&self, mount: &MountEntry) -> bool {
        let inside = below(&mount.root.path, &self.place).filter(|_| self.device == mount.device);
        mount.mount_point == self.destination && inside.is_some_and(|name| !name.as_os_str().is_empty())
    }

    fn is_name_of(&self, mount: &MountEntry) -> bool {
        self.device == mount.device && below(&mount.root.path, &self.place) == Some(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refresh::SubpathState;

    fn file(current: Option<&str>) -> BoundFile {
        BoundFile {
            directory: "/srv/app".into(),
            name: "app.conf".into(),
            destination: "/etc/app.conf".into(),
            device: Device { major: 8, minor: 1 },
            place: "/app".into(),
            current: current.map(PathBuf::from),
        }
    }

    /// The state of a mount with this device, root and mount point.
    fn state(current: Option<&str>, device: &str, root: &str, point: &str) -> Option<SubpathState> {
        let text = format!("1 0 0:9 / / rw - overlay o rw\n2 1 {device} {root} {point} rw - ext4 /dev/sda1 rw\n");
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        files_in_container(&table, &[file(current)]).first().map(|it| it.state)
    }

    #[test]
    fn a_file_is_stale_once_its_name_leads_to_another_one() {
        let (here, at) = (Some("/app/app.conf"), "/etc/app.conf");
        let (stale, current) = (Some(SubpathState::Stale), Some(SubpathState::Current));
        // Replaced by rename; renamed to a backup; the backup removed; the file removed; a link within the directory.
        for (now, root, expected) in [
            (here, "/app/app.conf", current),
            (here, "/app/app.conf//deleted", stale),
            (here, "/app/app.conf~", stale),
            (here, "/app/app.conf~//deleted", stale),
            (None, "/app/app.conf//deleted", stale),
            (Some("/app/releases/3/app.conf"), "/app/releases/3/app.conf", current),
            (Some("/app/releases/3/app.conf"), "/app/releases/2/app.conf", stale),
        ] {
            assert_eq!(state(now, "8:1", root, at), expected, "{root}");
        }
        // The image has a symlink on the way to the destination.
        assert_eq!(state(here, "8:1", "/app/app.conf//deleted", "/run/etc/app.conf"), stale);
    }

    #[test]
    fn a_mount_of_another_directory_is_none_of_ours() {
        let at = "/etc/app.conf";
        for (device, root, point) in [
            ("8:2", "/app/app.conf//deleted", at),
            ("8:1", "/other/app.conf//deleted", at),
            ("8:1", "/application/app.conf", at),
            ("8:1", "/app", at),
            ("8:1", "/", at),
            ("8:1", "/app/other.conf", "/etc/other.conf"),
            ("8:1", "/app/sub/app.conf", "/etc/other.conf"),
        ] {
            assert_eq!(state(Some("/app/app.conf"), device, root, point), None, "{device} {root} {point}");
        }
    }
}
