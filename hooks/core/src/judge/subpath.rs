//! Detects stale volume-subpaths on the host.
//!
//! A subpath is *current* if it shows the very file that the kubelet would bind today for the same
//! sub path. That path is the volume, then `..data` where the kubelet writes it, then the sub path.
//! This file derives the expected source from the evidence; [`judge`] compares it with the mount.
//! The order of the checks matters. Unreadable evidence is Unknown before it can be anything else.
//! A volume that is not mounted has no files to compare with. A missing target is reported before a
//! target that differs.

use std::ffi::OsStr;

use super::path_in_volume::NotInVolume;
use super::path_in_volume::PathInVolume;
use crate::evidence::{Observed, SubpathEvidence, SubpathMount, Volume};
use crate::kubelet::{MountedVolume, Plugin, VolumeSubpath, Writer};

use super::place::{Expected, ExpectedTarget, OnIt, Shown, judge, unreadable};
use super::reach::judge_reach;
use super::remedy::NoRemedy;
use super::verdict::{StaleCause, Unmounted, Verdict};

/// Judges a subpath.
pub fn judge_subpath(subpath: &VolumeSubpath, evidence: &SubpathEvidence) -> Verdict {
    let mount = match &evidence.mount {
        Observed::Seen(mount) => mount,
        Observed::Absent => return Verdict::Unmounted(Unmounted::Subpath),
        Observed::Unreadable(why) => {
            return judge_reach(&evidence.reach).unwrap_or_else(|| Verdict::Unknown(why.clone()));
        }
    };
    let verdict = match &evidence.volume {
        Observed::Seen(volume) => in_volume(subpath, mount, volume, evidence),
        Observed::Absent => without_remedy(mount, NoRemedy::NoVolume),
        Observed::Unreadable(why) => unreadable(&mount.root, why),
    };
    match (judge_reach(&evidence.reach), &verdict) {
        // The volume answered, so only the subpath is dead.
        (
            Some(_),
            Verdict::Stale { remedy: Ok(_), .. } | Verdict::Orphaned { .. } | Verdict::Unmounted(_),
        ) => verdict,
        (Some(dead), _) => dead,
        (None, _) => verdict,
    }
}

fn in_volume(
    subpath: &VolumeSubpath,
    mount: &SubpathMount,
    volume: &Volume,
    evidence: &SubpathEvidence,
) -> Verdict {
    if let Some(unmounted) = missing_mount(subpath, mount, volume) {
        return Verdict::Unmounted(unmounted);
    }
    match PathInVolume::from_mount(mount, volume) {
        Ok(sub_path) if shows_whole_share(mount, volume, &sub_path) => Verdict::Stale {
            cause: StaleCause::WrongRoot,
            remedy: Err(NoRemedy::WholeShare),
        },
        Ok(sub_path) if shows_file_deleted_here(mount, &sub_path) => Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(NoRemedy::RenamedByClient),
        },
        Ok(sub_path) if shows_volume_itself(mount, volume, &sub_path) => Verdict::Current,
        Ok(sub_path) => {
            let expected = Expected {
                directory: &volume.directory,
                device: volume.device,
                writer: volume.plugin.writer(),
                layout: volume.layout,
                sub_path,
                target: ExpectedTarget::Opened(&evidence.target),
            };
            let shown = Shown {
                device: mount.device,
                root: &mount.root,
                file: Some(&mount.identity),
                reach: &evidence.reach,
                on_it: OnIt::Nothing,
            };
            judge(&expected, &shown)
        }
        Err(why @ NotInVolume::OtherDevice { .. }) => Verdict::Stale {
            cause: StaleCause::OtherDevice,
            remedy: Err(why.into()),
        },
        Err(why @ NotInVolume::Outside { .. }) => without_remedy(mount, why.into()),
    }
}

/// The mount that the volume of a subpath lacks. Only the subpath shows that an emptyDir had the
/// medium Memory.
fn missing_mount(
    subpath: &VolumeSubpath,
    mount: &SubpathMount,
    volume: &Volume,
) -> Option<Unmounted> {
    let required = MountedVolume::of_subpath(subpath, volume.plugin);
    if volume.is_mount_point {
        let found = volume.fs_type.clone();
        let required = required.filter(|required| !required.required_mount().may_be(&found))?;
        return Some(Unmounted::Volume {
            volume: required,
            found: Some(found),
        });
    }
    let of_memory = || MountedVolume::of_memory(subpath, volume.plugin, &volume.directory);
    let lacking = required.or_else(|| volume.was_memory(mount).then(of_memory));
    lacking.map(|volume| Unmounted::Volume {
        volume,
        found: None,
    })
}

/// True for a pod's `subPath: .` of a kubelet-written volume: it is beside the payloads and never
/// changes.
fn shows_volume_itself(mount: &SubpathMount, volume: &Volume, sub_path: &PathInVolume) -> bool {
    let is_root = sub_path.timestamp.is_none() && sub_path.path.as_os_str().is_empty();
    volume.plugin.writer() == Writer::Kubelet
        && is_root
        && !mount.root.deleted
        && mount.device == volume.device
}

/// True for a share that resolves to its own root, possible after its handles went bad. On a local
/// filesystem the root is a pod's `subPath: .`; a mount that a sidecar makes within its volume has
/// a name there.
fn shows_whole_share(mount: &SubpathMount, volume: &Volume, sub_path: &PathInVolume) -> bool {
    let is_a_volumes = volume.plugin != Plugin::host_path();
    is_a_volumes && !mount.fs_type.is_local() && sub_path.path.as_os_str().is_empty()
}

/// True for a file deleted or replaced on this node while in use: the NFS client gave it a name
/// that no pod requests.
fn shows_file_deleted_here(mount: &SubpathMount, sub_path: &PathInVolume) -> bool {
    let name = sub_path.path.file_name().and_then(OsStr::to_str);
    let number = name
        .and_then(|name| name.strip_prefix(".nfs"))
        .filter(|_| mount.fs_type.has_root_in_source());
    number.is_some_and(|number| {
        number.len() == 24 && number.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// A subpath whose volume cannot be compared: a deleted root is certain, and bindguard does not
/// judge anything else.
fn without_remedy(mount: &SubpathMount, why: NoRemedy) -> Verdict {
    if mount.root.deleted {
        Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(why),
        }
    } else {
        Verdict::Foreign
    }
}
