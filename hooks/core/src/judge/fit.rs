//! Finds the volume that a subpath belongs to, among several volumes with the same name.
//!
//! The kubelet names the folder of a subpath after the volume alone. A claim's volume has the name
//! of its PersistentVolume, and another volume of the pod may have the same name. Then two plugins
//! have a folder of that name.

use crate::evidence::{SubpathMount, Volume};
use crate::kubelet::Writer;
use crate::paths::lies_in;

/// The match between a volume and what the mount of a subpath shows, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The mount shows a file or directory in the volume.
    Holds,
    /// The mount may show an earlier mount of the volume.
    MountedAnew,
    /// The volume is not mounted; the mount may show the filesystem that was mounted there.
    NotMounted,
    /// The mount does not belong to the volume.
    None,
}

impl Fit {
    /// Compares a subpath's mount with a volume.
    pub fn of(mount: &SubpathMount, volume: &Volume) -> Self {
        if mount.device == volume.device && lies_in(&mount.root.path, &volume.place) {
            Self::Holds
        } else if volume.is_earlier_mount(mount) {
            Self::MountedAnew
        } else if volume.lost_its_mount(mount) {
            Self::NotMounted
        } else {
            Self::None
        }
    }
}

impl Volume {
    /// True if the subpath's mount may show an earlier mount of this volume: a tmpfs, a restarted
    /// FUSE daemon, a disk that was attached again. Mounting a volume again changes its device, but
    /// not the paths below its root. If the volume's mount is older than the subpath, the subpath
    /// shows a filesystem that was mounted within the volume: no match.
    pub(super) fn is_earlier_mount(&self, mount: &SubpathMount) -> bool {
        let has_own_mount = self.plugin.may_mount() || self.fs_type.0 == "tmpfs";
        self.is_mount_point && self.is_newer && has_own_mount && self.fs_type == mount.fs_type
    }

    fn lost_its_mount(&self, mount: &SubpathMount) -> bool {
        let may_be_of_plugin = match self.plugin.required_mount() {
            Some(required) => required.may_be(&mount.fs_type),
            None => self.was_memory(mount),
        };
        !self.is_mount_point && may_be_of_plugin
    }

    /// True if the subpath's mount is a tmpfs although the volume is now a plain folder: an
    /// emptyDir of medium Memory. Volumes that the kubelet writes without a mount are on its disk.
    pub fn was_memory(&self, mount: &SubpathMount) -> bool {
        let may_be_memory = self.plugin.writer() == Writer::Containers;
        may_be_memory && mount.fs_type.0 == "tmpfs" && mount.device != self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::Observed;
    use crate::kubelet::{Plugin, VolumeLayout};
    use crate::mount_table::{Device, FsType, MountRoot};

    const OWN: Device = Device { major: 8, minor: 1 };
    const OTHER: Device = Device { major: 0, minor: 9 };

    /// A mount and a folder of a volume; a mount point with `newer` if it is newer than the mount.
    fn fit(plugin: &str, mount: (&str, Device, &str), newer: Option<bool>) -> Fit {
        let (fs_type, device, root) = mount;
        let mount = SubpathMount {
            root: MountRoot {
                path: root.into(),
                deleted: false,
            },
            device,
            fs_type: FsType(fs_type.to_owned()),
            identity: Observed::Absent,
            covers_its_equal: false,
        };
        let of_volume = match newer {
            Some(_) => "nfs4",
            None => "ext4",
        };
        let volume = Volume {
            plugin: Plugin::from_folder(plugin.as_ref()).expect("a plugin"),
            directory: "/volume".into(),
            device: OWN,
            fs_type: FsType(of_volume.to_owned()),
            place: "/place".into(),
            is_mount_point: newer.is_some(),
            is_newer: newer.unwrap_or(true),
            layout: VolumeLayout::Plain,
        };
        Fit::of(&mount, &volume)
    }

    #[test]
    fn a_mount_fits_the_volume_that_holds_it_or_held_it() {
        let config_map = "kubernetes.io~configmap";
        let empty_dir = "kubernetes.io~empty-dir";
        let nfs = "kubernetes.io~nfs";
        for (plugin, mount, newer, expected) in [
            (config_map, ("ext4", OWN, "/place/x"), None, Fit::Holds),
            (config_map, ("ext4", OWN, "/placex"), None, Fit::None),
            (config_map, ("ext4", OTHER, "/place/x"), None, Fit::None),
            (config_map, ("tmpfs", OTHER, "/x"), None, Fit::None),
            (empty_dir, ("tmpfs", OTHER, "/x"), None, Fit::NotMounted),
            (empty_dir, ("tmpfs", OWN, "/x"), None, Fit::None),
            (empty_dir, ("ext4", OTHER, "/x"), None, Fit::None),
            (empty_dir, ("tmpfs", OTHER, "/x"), Some(false), Fit::None),
            (nfs, ("nfs4", OTHER, "/x"), None, Fit::NotMounted),
            (nfs, ("ext4", OTHER, "/x"), None, Fit::None),
            (nfs, ("nfs4", OTHER, "/x"), Some(true), Fit::MountedAnew),
            (nfs, ("nfs4", OTHER, "/x"), Some(false), Fit::None),
            (nfs, ("ext4", OTHER, "/x"), Some(true), Fit::None),
        ] {
            let found = fit(plugin, mount, newer);
            assert_eq!(found, expected, "{plugin} {mount:?} {newer:?}");
        }
    }
}
