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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::mount_table::FsType;

    #[test]
    fn a_volume_is_judged_by_the_mount_on_its_directory() {
        let path = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/data";
        let roots = [Path::new("/var/lib/kubelet")];
        let volume = MountedVolume::from_path(Path::new(path), roots).unwrap();
        let mount = |fs_type: &str, deleted| {
            Observed::Seen(VolumeMount {
                fs_type: FsType(fs_type.to_owned()),
                deleted,
            })
        };
        let unmounted = |found: Option<&str>| {
            Verdict::Unmounted(Unmounted::Volume {
                volume: volume.clone(),
                found: found.map(|fs_type| FsType(fs_type.to_owned())),
            })
        };
        for (mount, expected, of_plain) in [
            (mount("nfs4", false), Verdict::Current, Verdict::Current),
            (mount("nfs4", true), deleted(), deleted()),
            (
                mount("ext4", false),
                unmounted(Some("ext4")),
                Verdict::Current,
            ),
            (Observed::Absent, unmounted(None), Verdict::Current),
        ] {
            assert_eq!(judge_volume(&volume, &mount), expected, "{mount:?}");
            assert_eq!(judge_plain_volume(&mount), of_plain, "{mount:?}");
        }
    }
}
