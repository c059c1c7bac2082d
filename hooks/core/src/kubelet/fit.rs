//! Finds the volume that a subpath belongs to, among several with one name.
//!
//! The kubelet names the folder of a subpath after the volume alone. A claim's volume has the name
//! of its PersistentVolume, and another volume of the pod may have the same name. Then two plugins
//! have a folder of that name.

use crate::evidence::{SubpathMount, Volume};
use crate::paths::lies_in;

use super::plugin::Writer;

/// The match between a volume and what the mount of a subpath shows, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The mount shows something in it.
    Holds,
    /// The mount may show an earlier mount of it.
    MountedAnew,
    /// It is not mounted, and the mount may show what was mounted.
    NotMounted,
    /// No match.
    None,
}

impl Fit {
    /// Compares the two.
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
    /// True if a mount may show an earlier mount of this volume: a tmpfs, a restarted FUSE daemon,
    /// a disk that was attached again. A volume that was mounted again has another device, and the
    /// same paths below its root. A volume's mount that is older than the subpath does not match:
    /// something else was mounted within the volume.
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

    /// True if a subpath shows that a volume, now a plain folder, was a tmpfs: an emptyDir of
    /// medium Memory. The kubelet's own volumes that need no mount are on its disk.
    pub fn was_memory(&self, mount: &SubpathMount) -> bool {
        let may_be_memory = self.plugin.writer() == Writer::Containers;
        may_be_memory && mount.fs_type.0 == "tmpfs" && mount.device != self.device
    }
}
