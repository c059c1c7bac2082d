//! The subpaths of kubelet-written volumes in a container.
//!
//! The mount's own device and root show the volume and the sub path. Neither the destination nor
//! any name that a container can choose takes part in the decision.

use std::path::PathBuf;

use super::{SubpathInContainer, judged};
use crate::evidence::FilePlace;
use crate::judge::{Expected, ExpectedTarget, PathInVolume};
use crate::kubelet::{TimestampDirectory, VolumeLayout, Writer};
use crate::mount_table::{MountEntry, MountTable};
use crate::paths::below;

/// A kubelet-written volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodVolume {
    /// Its directory on the host.
    pub directory: PathBuf,
    /// Its place on the host.
    pub place: FilePlace,
    /// The payload that `..data` names.
    pub current: TimestampDirectory,
}

/// The mounts of a container that show a part of a payload of these volumes. Mounts of a whole
/// volume follow `..data` by themselves.
pub fn subpaths_in_container(table: &MountTable, volumes: &[PodVolume]) -> Vec<SubpathInContainer> {
    let expected_at =
        |mount: &MountEntry| volumes.iter().find_map(|volume| volume.expected_at(mount));
    judged(table, expected_at, |_| false)
}

impl PodVolume {
    fn expected_at(&self, mount: &MountEntry) -> Option<Expected<'_>> {
        if self.place.device != mount.device {
            return None;
        }
        let mut names = below(&mount.root.path, &self.place.path)?.components();
        let timestamp = TimestampDirectory::from_name(names.next()?.as_os_str())?;
        Some(Expected {
            directory: &self.directory,
            device: self.place.device,
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            sub_path: PathInVolume {
                timestamp: Some(timestamp),
                path: names.as_path().to_owned(),
            },
            target: ExpectedTarget::InPayload(&self.current),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;
    use crate::mount_table::Device;

    const OLD: &str = "..2026_11_21_05_10_00.1";
    const NEW: &str = "..2026_11_21_05_20_00.2";

    fn volume() -> PodVolume {
        PodVolume {
            directory: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~configmap/conf".into(),
            place: FilePlace {
                device: Device { major: 8, minor: 1 },
                path: "/kubelet/pods/u/volumes/kubernetes.io~configmap/conf".into(),
            },
            current: TimestampDirectory::from_name(NEW.as_ref()).unwrap(),
        }
    }

    /// A container's root, and the mounts of a test on it: id, parent, device, root and mount
    /// point.
    fn states(mounts: &[(u32, u32, &str, &str, &str)]) -> Vec<(u32, &'static str)> {
        let lines = mounts.iter().map(|(id, parent, device, root, point)| {
            format!("{id} {parent} {device} {root} {point} ro,relatime - ext4 /dev/sda1 rw\n")
        });
        let text: String = ["1 0 0:9 / / rw - overlay o rw\n".to_owned()]
            .into_iter()
            .chain(lines)
            .collect();
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        subpaths_in_container(&table, &[volume()])
            .iter()
            .map(|it| (it.mount.id.0, state(it)))
            .collect()
    }

    fn state(subpath: &SubpathInContainer) -> &'static str {
        match &subpath.verdict {
            _ if subpath.covers_its_equal => "covering",
            Verdict::Stale { remedy: Err(_), .. } => "occupied",
            verdict => verdict.name().as_str(),
        }
    }

    fn root(rest: &str) -> String {
        format!("/kubelet/pods/u/volumes/kubernetes.io~configmap/conf{rest}")
    }

    #[test]
    fn a_mount_is_stale_by_its_root_alone() {
        let (deleted, older) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{OLD}/app.conf")),
        );
        let (current, gone) = (
            root(&format!("/{NEW}/app.conf")),
            root(&format!("/{NEW}/app.conf//deleted")),
        );
        for (shown, state) in [
            (&deleted, "stale"),
            (&older, "stale"),
            (&current, "current"),
            (&gone, "stale"),
        ] {
            assert_eq!(
                states(&[(2, 1, "8:1", shown, "/etc/app.conf")]),
                [(2, state)],
                "{shown}"
            );
        }
    }

    #[test]
    fn a_mount_of_something_else_is_none_of_ours() {
        let deleted = root(&format!("/{OLD}/app.conf//deleted"));
        for (device, shown) in [
            ("8:2", deleted.as_str()),
            (
                "8:1",
                "/kubelet/pods/u/volumes/kubernetes.io~configmap/other/..2026_11_21_05_10_00.1/app.conf//deleted",
            ),
            ("8:1", &root("")),
            ("8:1", &root("/app.conf//deleted")),
            ("8:1", "/app.conf//deleted"),
        ] {
            assert_eq!(
                states(&[(2, 1, device, shown, "/etc/app.conf")]),
                [],
                "{device} {shown}"
            );
        }
    }

    #[test]
    fn of_a_stack_only_the_top_is_named() {
        let (deleted, current) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{NEW}/app.conf")),
        );
        let at = "/etc/app.conf";
        // Killed between attaching the new mount and detaching the stale mount.
        assert_eq!(
            states(&[(2, 3, "8:1", &deleted, at), (3, 1, "8:1", &current, at)]),
            [(2, "covering")]
        );
        // The container mounted its own file over the subpath, or the kubelet mounted the subpath
        // over a foreign mount.
        assert_eq!(
            states(&[(2, 1, "8:1", &deleted, at), (3, 2, "0:40", "/x", at)]),
            [(2, "foreign")]
        );
        assert_eq!(
            states(&[(2, 1, "0:40", "/x", at), (3, 2, "8:1", &deleted, at)]),
            [(3, "stale")]
        );
        let other = root(&format!("/{OLD}/other.conf//deleted"));
        assert_eq!(
            states(&[(2, 1, "8:1", &other, at), (3, 2, "8:1", &deleted, at)]),
            [(2, "foreign")]
        );
    }

    /// The table lists the mounts in the order in which they were made.
    #[test]
    fn a_mount_of_the_container_over_its_own_file_is_left_alone() {
        let (deleted, current) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{NEW}/app.conf")),
        );
        let at = "/etc/app.conf";
        // The container ran `mount --bind FILE FILE`, to remount the file with new flags.
        for own in [&deleted, &current] {
            assert_eq!(
                states(&[(2, 1, "8:1", &deleted, at), (3, 2, "8:1", own, at)]),
                [(2, "foreign")],
                "{own}"
            );
        }
    }

    #[test]
    fn a_stale_directory_with_other_mounts_in_it_is_occupied() {
        let (old, new) = (
            root(&format!("/{OLD}/d//deleted")),
            root(&format!("/{NEW}/d")),
        );
        let inner = (3, 2, "0:40", "/b", "/etc/d/b.conf");
        assert_eq!(
            states(&[(2, 1, "8:1", &old, "/etc/d"), inner]),
            [(2, "occupied")]
        );
        assert_eq!(
            states(&[(2, 1, "8:1", &new, "/etc/d"), inner]),
            [(2, "current")]
        );
    }
}
