//! Detects stale volume-subpaths.
//!
//! A subpath is *current* if it shows the very file that the kubelet would bind today for the same
//! sub path. That path is the volume, then `..data` where the kubelet writes it, then the sub path.
//! The order of the checks matters. Unreadable evidence is Unknown before it can be anything else.
//! A volume that is not mounted has no files to compare with. A missing target is reported before
//! one that differs.

use std::ffi::OsStr;

use crate::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use crate::kubelet::{MountedVolume, NotInVolume, PathInVolume, Plugin, VolumeSubpath, Writer};

use super::reach::judge_reach;
use super::remedy::{NoRemedy, Remedy, RepairMethod};
use super::verdict::{Lack, StaleCause, Unmounted, Verdict};

/// Judges one subpath.
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
        Observed::Unreadable(why) => unreadable(mount, why),
    };
    match (judge_reach(&evidence.reach), &verdict) {
        // Its volume is not dead: that answered.
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
        Ok(sub_path) => Comparison {
            mount,
            volume,
            sub_path: &sub_path,
            reach: &evidence.reach,
        }
        .judge(&evidence.target),
        Err(why @ NotInVolume::OtherDevice { .. }) => Verdict::Stale {
            cause: StaleCause::OtherDevice,
            remedy: Err(why.into()),
        },
        Err(why @ NotInVolume::Outside { .. }) => without_remedy(mount, why.into()),
    }
}

/// The mount that the volume of a subpath lacks. Only the subpath shows that an emptyDir was one of
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

/// A subpath with evidence missing that a repair needs. Its own mount was read: a deleted root is
/// certain in any case, because no runtime can bind it.
fn unreadable(mount: &SubpathMount, why: &str) -> Verdict {
    match mount.root.deleted {
        true => Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(NoRemedy::Unreadable(why.to_owned())),
        },
        false => Verdict::Unknown(why.to_owned()),
    }
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

/// A subpath and the target of its sub path today.
struct Comparison<'a> {
    mount: &'a SubpathMount,
    volume: &'a Volume,
    sub_path: &'a PathInVolume,
    reach: &'a Reach,
}

impl Comparison<'_> {
    fn judge(&self, target: &Observed<Target>) -> Verdict {
        let target = match target {
            Observed::Seen(target) => target,
            Observed::Absent => return self.orphaned(Lack::Payload, None),
            Observed::Unreadable(why) => return unreadable(self.mount, why),
        };
        let shown = match &self.mount.identity {
            Observed::Seen(identity) => identity,
            Observed::Absent => {
                return unreadable(
                    self.mount,
                    "the file that its mount shows could not be found",
                );
            }
            Observed::Unreadable(why) => return unreadable(self.mount, why),
        };
        match &target.file {
            Observed::Seen(file) => self.against(target, shown, file),
            Observed::Absent => self.vanished(shown),
            Observed::Unreadable(why) => unreadable(self.mount, why),
        }
    }

    fn against(&self, target: &Target, shown: &FileIdentity, file: &FileIdentity) -> Verdict {
        if self.is_placeholder() {
            return self.stale(StaleCause::Placeholder, method_over(shown, file));
        }
        if shown.kind != file.kind {
            let directory = file.kind == FileKind::Directory;
            return self.orphaned(
                Lack::OtherKind {
                    path: self.sub_path.path.clone(),
                    directory,
                },
                None,
            );
        }
        match self.difference(target, shown, file) {
            Some(cause) => self.stale(cause, RepairMethod::Rebind),
            None => Verdict::Current,
        }
    }

    /// The difference between the file that is shown and the one that the kubelet would bind today.
    fn difference(
        &self,
        target: &Target,
        shown: &FileIdentity,
        file: &FileIdentity,
    ) -> Option<StaleCause> {
        if let Some(words) = self.reach.error_of_dead_source() {
            return Some(StaleCause::DeadMount(words.to_owned()));
        }
        if self.mount.root.deleted {
            return Some(StaleCause::DeletedRoot);
        }
        if self.mount.device != self.volume.device {
            return Some(StaleCause::OtherDevice);
        }
        match (&self.sub_path.timestamp, &target.timestamp) {
            (Some(shown), Some(current)) if shown != current => {
                return Some(StaleCause::OlderPayload {
                    shown: shown.clone(),
                    current: current.clone(),
                });
            }
            _ => {}
        }
        // A payload directory's file can be unlinked and created again under the mount; so can any
        // file that containers write.
        (shown != file).then_some(StaleCause::Replaced)
    }

    /// Nothing has the sub path's name. A directory that containers wrote can be made again; one in
    /// a payload cannot.
    fn vanished(&self, shown: &FileIdentity) -> Verdict {
        let is_plain =
            self.volume.plugin.writer() == Writer::Containers && self.sub_path.timestamp.is_none();
        let can_be_made = is_plain && shown.kind == FileKind::Directory;
        self.orphaned(
            Lack::Key(self.sub_path.path.clone()),
            can_be_made.then(|| self.remedy(RepairMethod::Remake)),
        )
    }

    /// True if the key was missing at the bind: the kubelet made an empty directory to have
    /// something to bind.
    fn is_placeholder(&self) -> bool {
        self.volume.plugin.writer() == Writer::Kubelet && self.sub_path.timestamp.is_none()
    }

    fn orphaned(&self, lacks: Lack, remake: Option<Remedy>) -> Verdict {
        let cause = match self.reach.error_of_dead_source() {
            Some(words) => StaleCause::DeadMount(words.to_owned()),
            None if self.mount.root.deleted => StaleCause::DeletedRoot,
            None if self.is_placeholder() => StaleCause::Placeholder,
            None => StaleCause::Replaced,
        };
        Verdict::Orphaned {
            cause,
            lacks,
            remake,
        }
    }

    fn stale(&self, cause: StaleCause, method: RepairMethod) -> Verdict {
        Verdict::Stale {
            cause,
            remedy: Ok(self.remedy(method)),
        }
    }

    fn remedy(&self, method: RepairMethod) -> Remedy {
        Remedy {
            volume: self.volume.directory.clone(),
            sub_path: self.sub_path.clone(),
            writer: self.volume.plugin.writer(),
            layout: self.volume.layout,
            method,
        }
    }
}

/// A file cannot be mounted over a directory, nor a directory over a file: move_mount(2) returns
/// ENOTDIR.
fn method_over(shown: &FileIdentity, file: &FileIdentity) -> RepairMethod {
    if shown.kind == file.kind {
        RepairMethod::Rebind
    } else {
        RepairMethod::PointSpecAtVolume
    }
}
