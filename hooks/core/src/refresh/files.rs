//! The single files that a container engine bound from a directory of the host (moby#15793).
//!
//! An editor writes a new file and renames it over the old one; the container keeps the old one.
//! The host path comes from the container's spec, which no container can change. A mount belongs to
//! a bind by its destination, or by the place of its file. [`Way`](super::Way) decides if the file
//! that the path leads to now may be shown.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::{SubpathInContainer, judged};
use crate::evidence::FilePlace;
use crate::judge::{Expected, ExpectedTarget, PathInVolume};
use crate::kubelet::{VolumeLayout, Writer};
use crate::mount_table::{MountEntry, MountTable};
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
    /// The place of the directory.
    pub place: FilePlace,
    /// The place of the file that the name leads to now; `None` if it is gone.
    pub current: Option<FilePlace>,
}

/// The mounts of a container that show these files, or older files of the same names.
pub fn files_in_container(table: &MountTable, files: &[BoundFile]) -> Vec<SubpathInContainer> {
    let expected_at = |mount: &MountEntry| {
        let by_destination = files.iter().find(|file| file.is_destination_of(mount));
        // The mount table names the destination without the symlinks that the image may have on the
        // way.
        let by_name = || files.iter().find(|file| file.is_name_of(mount));
        let file = by_destination.or_else(by_name)?;
        Some(file.expected())
    };
    judged(table, expected_at, |_| false)
}

impl BoundFile {
    /// The old file may have another name or another folder by now: some editors rename it to a
    /// backup, and its folder can be renamed.
    fn is_destination_of(&self, mount: &MountEntry) -> bool {
        if mount.mount_point != self.destination || mount.device != self.place.device {
            return false;
        }
        let inside = below(&mount.root.path, &self.place.path)
            .is_some_and(|name| !name.as_os_str().is_empty());
        inside || mount.root.path.file_name() == Some(self.name.as_os_str())
    }

    fn is_name_of(&self, mount: &MountEntry) -> bool {
        let name = below(&mount.root.path, &self.place.path).map(|name| name.as_os_str());
        mount.device == self.place.device && name == Some(OsStr::new(&self.name))
    }

    fn expected(&self) -> Expected<'_> {
        Expected {
            directory: &self.directory,
            device: self.place.device,
            writer: Writer::Containers,
            layout: VolumeLayout::Plain,
            sub_path: PathInVolume {
                timestamp: None,
                path: self.name.clone(),
            },
            target: ExpectedTarget::At(self.current.as_ref()),
        }
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

    #[test]
    fn a_mount_of_another_directory_is_none_of_ours() {
        let at = "/etc/app.conf";
        for (device, root, point) in [
            ("8:2", "/app/app.conf//deleted", at),
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
