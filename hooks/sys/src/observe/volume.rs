//! A volume that has to be mounted.

use bindguard_core::evidence::{Observed, VolumeMount};
use bindguard_core::kubelet::MountedVolume;
use bindguard_core::mount_table::MountTable;

use crate::handle::HandleError;
use crate::observe::place::{Place, unreadable};

/// A volume's mount point, held. Its server is not asked anything: `O_PATH` of a mount's root does not reach it.
#[derive(Debug)]
pub struct HeldVolume(Result<Place, HandleError>);

impl HeldVolume {
    /// Takes hold of a volume's mount point.
    pub fn hold(volume: &MountedVolume) -> Self {
        Self(Place::hold(volume.mount_point()))
    }

    /// Looks it up in a mount table that was read after it was held.
    pub fn observe(&self, table: &MountTable) -> Observed<VolumeMount> {
        let place = match &self.0 {
            Ok(place) => place,
            Err(error) => return unreadable(error),
        };
        match place.mount_in(table) {
            Ok((entry, true)) => Observed::Seen(VolumeMount { fs_type: entry.fs_type.clone() }),
            Ok((_, false)) => Observed::Absent,
            Err(why) => Observed::Unreadable(why),
        }
    }
}
