//! When a volume-subpath is stale.
//!
//! It is *current* when it shows the very file that the kubelet would bind today for the same sub path: the volume,
//! then `..data`, then the path. The order of the questions matters: what could not be read is Unknown before it can
//! be anything else, and a target that is missing is told before one that differs.

use crate::evidence::{FileIdentity, FileKind, Observed, SubpathEvidence, SubpathMount, Target, Volume};
use crate::kubelet::{NoSubPath, SubPath, Writer};

use super::verdict::{Lack, Remedy, StaleCause, Unmounted, Verdict, Way};

/// Judges one subpath.
pub fn judge_subpath(evidence: &SubpathEvidence) -> Verdict {
    let mount = match &evidence.mount {
        Observed::Seen(mount) => mount,
        Observed::Absent => return Verdict::Unmounted(Unmounted::Subpath),
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    if !mount.fs_type.is_local() {
        return Verdict::Unknown(format!("it is on a {} filesystem, which is not looked into", mount.fs_type.0));
    }
    let volume = match &evidence.volume {
        Observed::Seen(volume) => volume,
        Observed::Absent => {
            return without_remedy(mount, "no volume of that name is one that can be repaired".to_owned());
        }
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    match SubPath::from_mount(mount, volume) {
        Ok(sub_path) => against_target(mount, volume, &sub_path, &evidence.target),
        Err(why @ NoSubPath::OtherDevice { .. }) => {
            Verdict::Stale { cause: StaleCause::OtherDevice, remedy: Err(why.to_string()) }
        }
        Err(why @ NoSubPath::Outside { .. }) => without_remedy(mount, why.to_string()),
    }
}

/// A subpath of a volume that cannot be compared with: a deleted root is certain, anything else is not ours to judge.
fn without_remedy(mount: &SubpathMount, why: String) -> Verdict {
    if mount.root.deleted {
        Verdict::Stale { cause: StaleCause::DeletedRoot, remedy: Err(why) }
    } else {
        Verdict::Foreign
    }
}

fn against_target(mount: &SubpathMount, volume: &Volume, sub_path: &SubPath, target: &Observed<Target>) -> Verdict {
    let target = match target {
        Observed::Seen(target) => target,
        Observed::Absent => {
            return Verdict::Orphaned { cause: cause_without_target(mount), lacks: Lack::Payload };
        }
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    let shown = match &mount.identity {
        Observed::Seen(identity) => identity,
        Observed::Absent => return Verdict::Unknown("the file that its mount shows could not be found".to_owned()),
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    let placeholder = volume.plugin.writer() == Writer::Kubelet && sub_path.timestamp.is_none();
    let file = match &target.file {
        Observed::Seen(file) => file,
        Observed::Absent => {
            let cause = if placeholder { StaleCause::Placeholder } else { cause_without_target(mount) };
            return Verdict::Orphaned { cause, lacks: Lack::Key(sub_path.path.clone()) };
        }
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    if placeholder {
        return stale(StaleCause::Placeholder, volume, sub_path, way_over(shown, file));
    }
    if shown.kind != file.kind {
        let directory = file.kind == FileKind::Directory;
        let lacks = Lack::OtherKind { path: sub_path.path.clone(), directory };
        return Verdict::Orphaned { cause: cause_without_target(mount), lacks };
    }
    match difference(mount, shown, sub_path, target, file) {
        Some(cause) => stale(cause, volume, sub_path, Way::Rebind),
        None => Verdict::Current,
    }
}

/// How `shown` differs from what the kubelet would bind today.
fn difference(
    mount: &SubpathMount,
    shown: &FileIdentity,
    sub_path: &SubPath,
    target: &Target,
    file: &FileIdentity,
) -> Option<StaleCause> {
    if mount.root.deleted {
        return Some(StaleCause::DeletedRoot);
    }
    match (&sub_path.timestamp, &target.timestamp) {
        (Some(shown), Some(current)) if shown != current => {
            return Some(StaleCause::OlderPayload { shown: shown.clone(), current: current.clone() });
        }
        _ => {}
    }
    // A payload directory's file can be unlinked and made again under the mount; so can any file that containers write.
    (shown != file).then_some(StaleCause::Replaced)
}

fn cause_without_target(mount: &SubpathMount) -> StaleCause {
    if mount.root.deleted { StaleCause::DeletedRoot } else { StaleCause::Replaced }
}

fn stale(cause: StaleCause, volume: &Volume, sub_path: &SubPath, way: Way) -> Verdict {
    let remedy =
        Remedy { volume: volume.directory.clone(), sub_path: sub_path.clone(), writer: volume.plugin.writer(), way };
    Verdict::Stale { cause, remedy: Ok(remedy) }
}

/// A file cannot be mounted over a directory, nor a directory over a file: move_mount(2) says ENOTDIR.
fn way_over(shown: &FileIdentity, file: &FileIdentity) -> Way {
    if shown.kind == file.kind { Way::Rebind } else { Way::PointSpecAtVolume }
}
