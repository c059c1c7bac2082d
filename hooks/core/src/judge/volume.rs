//! Detects volumes that require a mount and have none, and deleted roots of all volumes.

use crate::evidence::{Observed, VolumeMount};
use crate::kubelet::MountedVolume;

use super::remedy::NoRemedy;
use super::verdict::{StaleCause, Unmounted, Verdict};

/// Judges a volume. [`Observed::Absent`]: nothing is mounted on its directory, or the directory
/// does not exist.
pub fn judge_volume(volume: &MountedVolume, mount: &Observed<VolumeMount>) -> Verdict {
    let found = match mount {
        Observed::Seen(mount) if mount.deleted => return deleted(),
        Observed::Seen(mount) if volume.required_mount().may_be(&mount.fs_type) => {
            return Verdict::Current;
        }
        Observed::Seen(mount) => Some(mount.fs_type.clone()),
        Observed::Absent => None,
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    Verdict::Unmounted(Unmounted::Volume {
        volume: volume.clone(),
        found,
    })
}

/// Judges a volume that requires no mount, mounted or not.
pub fn judge_plain_volume(mount: &Observed<VolumeMount>) -> Verdict {
    match mount {
        Observed::Seen(mount) if mount.deleted => deleted(),
        Observed::Seen(_) | Observed::Absent => Verdict::Current,
        Observed::Unreadable(why) => Verdict::Unknown(why.clone()),
    }
}

/// A driver that binds a folder of its own mounts it once for a pod.
fn deleted() -> Verdict {
    Verdict::Stale {
        cause: StaleCause::DeletedRoot,
        remedy: Err(NoRemedy::MountedByDriver),
    }
}
