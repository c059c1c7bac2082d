//! When a volume that has to be mounted is not.

use crate::evidence::{Observed, VolumeMount};
use crate::kubelet::MountedVolume;

use super::verdict::{Unmounted, Verdict};

/// Judges one volume. [`Observed::Absent`]: its directory is there, or not even that, and nothing is mounted on it.
pub fn judge_volume(volume: &MountedVolume, mount: &Observed<VolumeMount>) -> Verdict {
    let found = match mount {
        Observed::Seen(mount) if volume.required_mount().may_be(&mount.fs_type) => return Verdict::Current,
        Observed::Seen(mount) => Some(mount.fs_type.clone()),
        Observed::Absent => None,
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    Verdict::Unmounted(Unmounted::Volume { volume: volume.clone(), found })
}
