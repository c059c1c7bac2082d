//! A volume that has to be mounted.

use bindguard_core::evidence::{Observed, VolumeMount};
use bindguard_core::kubelet::MountedVolume;

use crate::handle::{Handle, HandleError};
use crate::mounts::Mounts;
use crate::observe::unreadable;

/// A volume's mount point, held. Its server is not asked anything: `O_PATH` of a mount's root does not reach it.
#[derive(Debug)]
pub struct HeldVolume(Result<Handle, HandleError>);

impl HeldVolume {
    /// Takes hold of a volume's mount point.
    pub fn hold(volume: &MountedVolume) -> Self {
        Self(Handle::of(volume.mount_point()))
    }

    /// The mount point itself.
    pub fn handle(&self) -> Option<&Handle> {
        self.0.as_ref().ok()
    }

    /// Looks at its mount.
    pub fn observe(&self, mounts: &Mounts) -> Observed<VolumeMount> {
        let handle = match &self.0 {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        match mounts.mount_of(handle) {
            Ok(mount) if mount.is_mount_point => Observed::Seen(VolumeMount { fs_type: mount.entry.fs_type }),
            Ok(_) => Observed::Absent,
            Err(why) => Observed::Unreadable(why),
        }
    }
}
