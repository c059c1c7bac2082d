//! Derives findings from evidence. The rules for stale, orphaned and pinning binds.
//!
//! [`judge`] compares the mount at a place with the mount that its bind would make now. A place is a
//! namespace, the host's or a container's, and a path in it. On the host a descriptor of the mount is
//! open, so its file is compared by device and inode. In a container only the mount table is read, so
//! the mount's root is compared.

mod verdict;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::evidence::{
    FileIdentity, FileKind, FilePlace, HostMount, Observed, Reach, SubpathEvidence, SubpathMount,
    Target, Volume, VolumeMount,
};
use crate::kubelet::{
    MountedVolume, Plugin, TimestampDirectory, VolumeLayout, VolumeSubpath, Writer,
};
use crate::mount_table::{Device, MountRoot};
use crate::policy::Kept;
use crate::spec::{RequestedPropagation, RootfsPropagation};
use crate::text::{below, lies_in};

pub use crate::judge::verdict::{
    Finding, Lack, NoRemedy, Pinning, Plan, Rebind, Remedy, RepairMethod, StaleCause, Unmounted,
    Verdict, VerdictName, refusal_of, refusal_of_failed, refusal_of_uncompared, refusal_of_unseen,
    refusal_of_wrong,
};

// Finds the volume that a subpath belongs to, among several volumes with the same name.
//
// The kubelet names the folder of a subpath after the volume alone. A claim's volume has the name
// of its PersistentVolume, and another volume of the pod may have the same name. Then two plugins
// have a folder of that name.

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
        let may_be_of_plugin = || match volume.plugin.mount {
            Some(required) => required.may_be(&mount.fs_type),
            None => volume.was_memory(mount),
        };
        if mount.device == volume.device && lies_in(&mount.root.path, &volume.place) {
            Self::Holds
        } else if volume.is_earlier_mount(mount) {
            Self::MountedAnew
        } else if !volume.is_mount_point && may_be_of_plugin() {
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
    fn is_earlier_mount(&self, mount: &SubpathMount) -> bool {
        let has_own_mount = self.plugin.may_mount() || self.fs_type.0 == "tmpfs";
        self.is_mount_point && self.is_newer && has_own_mount && self.fs_type == mount.fs_type
    }

    /// True if the subpath's mount is a tmpfs although the volume is now a plain folder: an
    /// emptyDir of medium Memory. Volumes that the kubelet writes without a mount are on its disk.
    fn was_memory(&self, mount: &SubpathMount) -> bool {
        let may_be_memory = self.plugin.writer == Writer::Containers;
        may_be_memory && mount.fs_type.0 == "tmpfs" && mount.device != self.device
    }
}

// Detects a dead source: its server, or the daemon behind it, is gone or does not answer.

/// Judges a source's answer; `None` if it is not dead, or if that is unknown. A source not probed
/// for lack of time may be dead.
pub fn judge_reach(reach: &Reach) -> Option<Verdict> {
    Some(Verdict::Dead(match reach {
        Reach::Silent(milliseconds) => format!("it did not answer within {milliseconds} ms"),
        Reach::NotProbed => return Some(Verdict::NotProbed),
        reach => format!("it answers: {}", reach.error_of_dead_source()?),
    }))
}

// Derives the sub path within a volume from the root of a subpath's mount.
//
// Only the mount records the name: neither the OCI spec nor the kubelet's folders contain it. A
// `subPathExpr` therefore keeps the value that it had when the kubelet first bound the subpath.

/// A path within a volume, as a pod's `subPath` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathInVolume {
    /// The payload directory in which the mount shows the path. `None` in volumes without a
    /// payload, and for a mount of a path beside the payload.
    pub timestamp: Option<TimestampDirectory>,
    /// The path below the payload, or below the volume if it has no payload.
    pub path: PathBuf,
}

impl PathInVolume {
    /// Maps a mount's root to its volume.
    ///
    /// # Errors
    /// If the root is outside the volume, or is of a filesystem that is no known earlier mount of
    /// the volume.
    pub fn from_mount(mount: &SubpathMount, volume: &Volume) -> Result<Self, NoRemedy> {
        if mount.device != volume.device && !volume.is_earlier_mount(mount) {
            return Err(NoRemedy::OtherDevice {
                mount: mount.device,
                volume: volume.device,
            });
        }
        let Some(path) = below(&mount.root.path, &volume.place) else {
            return Err(NoRemedy::Outside {
                root: mount.root.path.clone(),
                volume: volume.place.clone(),
            });
        };
        let in_payload = match volume.layout {
            VolumeLayout::Payload => Self::in_payload(path),
            VolumeLayout::Plain => None,
        };
        Ok(in_payload.unwrap_or_else(|| Self {
            timestamp: None,
            path: path.to_owned(),
        }))
    }

    /// True if the path begins with the name of a payload directory. Subpaths of a payload do, and
    /// subpaths of a folder with such a name in a plain volume.
    pub fn begins_like_a_payload(&self) -> bool {
        Self::in_payload(&self.path).is_some()
    }

    /// Separates the name of a payload directory from the path below.
    pub(crate) fn in_payload(path: &Path) -> Option<Self> {
        let mut names = path.components();
        Some(Self {
            timestamp: Some(TimestampDirectory::from_name(names.next()?.as_os_str())?),
            path: names.as_path().to_owned(),
        })
    }
}

// Detects stale volume-subpaths on the host.
//
// A subpath is *current* if it shows the very file that the kubelet would bind today for the same
// sub path. That path is the volume, then `..data` where the kubelet writes it, then the sub path.
// [`judge_subpath`] derives the expected source from the evidence; [`judge`] compares the source
// with the mount.
// The order of the checks matters. Unreadable evidence is Unknown before it can be anything else.
// A volume that is not mounted has no files to compare with. A missing target is reported before a
// target that differs.

pub fn judge_subpath(subpath: &VolumeSubpath, evidence: &SubpathEvidence) -> Verdict {
    let dead = judge_reach(&evidence.reach);
    let mount = match &evidence.mount {
        Observed::Seen(mount) => mount,
        Observed::Absent => return Verdict::Unmounted(Unmounted::Subpath),
        Observed::Unreadable(why) => return dead.unwrap_or_else(|| Verdict::Unknown(why.clone())),
    };
    let verdict = match &evidence.volume {
        Observed::Seen(volume) => in_volume(subpath, mount, volume, evidence),
        Observed::Absent => if_deleted(&mount.root, NoRemedy::NoVolume, Verdict::Foreign),
        Observed::Unreadable(why) => unreadable(&mount.root, why),
    };
    match (dead, &verdict) {
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
    let (plugin, directory) = (volume.plugin, &volume.directory);
    let lacking = match plugin.mount {
        Some(required) if volume.is_mount_point && required.may_be(&volume.fs_type) => None,
        // Only the subpath shows that an emptyDir had the medium Memory.
        None if !volume.is_mount_point && volume.was_memory(mount) => Some(plugin.memory()),
        required => required,
    };
    if let Some(required) = lacking {
        return Verdict::Unmounted(Unmounted::Volume {
            volume: MountedVolume {
                mount_point: directory.clone(),
                pod_uid: subpath.pod_uid().to_owned(),
                plugin,
                required,
                volume: subpath.volume().to_owned(),
            },
            found: volume.is_mount_point.then(|| volume.fs_type.clone()),
        });
    }
    let sub_path = match PathInVolume::from_mount(mount, volume) {
        Ok(sub_path) => sub_path,
        Err(why @ NoRemedy::OtherDevice { .. }) => {
            return without_repair(StaleCause::OtherDevice, why);
        }
        Err(why) => return if_deleted(&mount.root, why, Verdict::Foreign),
    };
    let is_root = sub_path.path.as_os_str().is_empty();
    // A share can resolve to its own root after its handles went bad. On a local filesystem the
    // root is a pod's `subPath: .`; a mount that a sidecar makes within its volume has a name there.
    if is_root && plugin != Plugin::HOST_PATH && !mount.fs_type.is_local() {
        return without_repair(StaleCause::WrongRoot, NoRemedy::WholeShare);
    }
    // A file was deleted or replaced on this node while in use: the NFS client gave it a name that
    // no pod requests.
    let name = sub_path.path.file_name().and_then(OsStr::to_str);
    if let Some(number) = name.and_then(|name| name.strip_prefix(".nfs"))
        && mount.fs_type.has_root_in_source()
        && number.len() == 24
        && number.bytes().all(|digit| digit.is_ascii_hexdigit())
    {
        return without_repair(StaleCause::DeletedRoot, NoRemedy::RenamedByClient);
    }
    // A pod's `subPath: .` of a kubelet-written volume is beside the payloads and never changes.
    if is_root
        && sub_path.timestamp.is_none()
        && plugin.writer == Writer::Kubelet
        && !mount.root.deleted
        && mount.device == volume.device
    {
        return Verdict::Current;
    }
    let expected = Expected {
        directory,
        device: volume.device,
        writer: plugin.writer,
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

fn without_repair(cause: StaleCause, why: NoRemedy) -> Verdict {
    Verdict::Stale {
        cause,
        remedy: Err(why),
    }
}

/// A place whose evidence lacks a part that a repair needs. The place's own mount was read, and a
/// deleted root is certain in any case: no runtime can bind it.
fn if_deleted(root: &MountRoot, why: NoRemedy, otherwise: Verdict) -> Verdict {
    match root.deleted {
        true => without_repair(StaleCause::DeletedRoot, why),
        false => otherwise,
    }
}

fn unreadable(root: &MountRoot, why: &str) -> Verdict {
    let unknown = Verdict::Unknown(why.to_owned());
    if_deleted(root, NoRemedy::Unreadable(why.to_owned()), unknown)
}

// Detects volumes that require a mount and have none, and deleted roots of all volumes.

/// Judges a volume. [`Observed::Absent`]: nothing is mounted on its directory, or the directory
/// does not exist.
pub fn judge_volume(volume: &MountedVolume, mount: &Observed<VolumeMount>) -> Verdict {
    let found = match mount {
        Observed::Seen(mount) if !mount.deleted && !volume.required.may_be(&mount.fs_type) => {
            Some(mount.fs_type.clone())
        }
        Observed::Seen(_) | Observed::Unreadable(_) => return judge_plain_volume(mount),
        Observed::Absent => None,
    };
    Verdict::Unmounted(Unmounted::Volume {
        volume: volume.clone(),
        found,
    })
}

/// Judges a volume that requires no mount, mounted or not.
pub fn judge_plain_volume(mount: &Observed<VolumeMount>) -> Verdict {
    match mount {
        // A driver that binds a folder of its own mounts it once for a pod.
        Observed::Seen(mount) if mount.deleted => {
            without_repair(StaleCause::DeletedRoot, NoRemedy::MountedByDriver)
        }
        Observed::Seen(_) | Observed::Absent => Verdict::Current,
        Observed::Unreadable(why) => Verdict::Unknown(why.clone()),
    }
}

// Detects a host-root bind that pins the host's mounts.
//
// A bind that is not recursive includes no mount below its source, so nothing is to be repaired:
// rslave would only let in the mounts that the host makes later, and crun would make it recursive.
//
// With rprivate (the default of the kubelet and of runc) the container has a copy of every mount
// below the source. No umount on the host reaches these copies. The effects: `device or resource
// busy`, loop and dm devices that stay, network namespaces that never go. rslave lets umounts in
// and nothing out. crun follows `linux.rootfsPropagation` for all mounts, so that value must
// agree; runc's default does.
//
// rslave also lets later mounts of the host in. `ro` and `rro` make only those mounts read-only
// that exist when the container starts, so a bind that must stay read-only as a whole stays
// private.

/// Judges a host-root bind. `is_recursive`: the runtime includes the mounts below the source.
/// `kept`: the reason for which the bind must not be made rslave. `any_shared`: some bind of the same
/// spec requests shared propagation.
pub fn judge_host_root(
    requested: RequestedPropagation,
    is_recursive: bool,
    kept: Option<Kept>,
    rootfs: &RootfsPropagation,
    any_shared: bool,
    host: &Observed<HostMount>,
) -> Verdict {
    if requested == RequestedPropagation::Shared || !is_recursive {
        return Verdict::Current;
    }
    let private_mount = match host {
        Observed::Seen(mount) => (!mount.passes_umounts_on).then(|| mount.mount_point.clone()),
        Observed::Absent => return Verdict::Unknown("its source does not exist".to_owned()),
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    let bind = requested.keeps_host_mounts_alive();
    let kept = kept.filter(|_| bind);
    // A root made `shared` for a shared bind stays: rslave there would also lower that bind.
    let lets_in = rootfs.lets_umounts_in() || rootfs.is_shared() && any_shared;
    let pinning = Pinning {
        bind,
        rootfs: kept.is_none() && !lets_in,
        private_mount: private_mount.filter(|_| kept.is_none()),
        kept,
    };
    match bind || pinning.rootfs || pinning.private_mount.is_some() {
        true => Verdict::Pinning(pinning),
        false => Verdict::Current,
    }
}

/// The source of a bind, as the host shows it now.
#[derive(Debug, Clone)]
pub struct Expected<'e> {
    /// The directory of the volume, or of the file.
    pub directory: &'e Path,
    /// The device of that directory's filesystem.
    pub device: Device,
    /// The writer of the directory.
    pub writer: Writer,
    /// The layout of its files.
    pub layout: VolumeLayout,
    /// The path below the directory.
    pub sub_path: PathInVolume,
    /// The file or directory that the sub path leads to.
    pub target: ExpectedTarget<'e>,
}

/// The target of a bind, as far as it was read.
#[derive(Debug, Clone, Copy)]
pub enum ExpectedTarget<'e> {
    /// The target was opened beneath the directory.
    Opened(&'e Observed<Target>),
    /// The payload that `..data` names; the target in it was not opened.
    InPayload(&'e TimestampDirectory),
    /// The place of the target. `None` if nothing has its name at this moment.
    At(Option<&'e FilePlace>),
}

/// The mount at a place.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'s> {
    /// The device of its filesystem.
    pub device: Device,
    pub root: &'s MountRoot,
    /// Its file. `None` in a container, where nothing is opened to judge it.
    pub file: Option<&'s Observed<FileIdentity>>,
    /// Its answer to a probe.
    pub reach: &'s Reach,
    pub on_it: OnIt,
}

/// The mounts on a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnIt {
    Nothing,
    /// A mount covers the mount.
    Cover,
    /// Mounts are below the mount's directory.
    Inside,
}

pub fn judge(expected: &Expected<'_>, shown: &Shown<'_>) -> Verdict {
    if shown.on_it == OnIt::Cover {
        return Verdict::Foreign;
    }
    let by_root = expected.difference_of_mounts(shown);
    let difference = match expected.target {
        ExpectedTarget::Opened(target) => return expected.judge_opened(shown, target),
        ExpectedTarget::InPayload(current) => by_root.or_else(|| expected.older_payload(current)),
        ExpectedTarget::At(Some(place))
            if place.device == shown.device && place.path == shown.root.path =>
        {
            by_root
        }
        ExpectedTarget::At(_) => by_root.or(Some(StaleCause::Replaced)),
    };
    match difference {
        Some(cause) => expected.stale(shown, cause, RepairMethod::Rebind),
        None => Verdict::Current,
    }
}

impl<'e> Expected<'e> {
    /// A file, or the root of a mount, at a place that is no payload's.
    pub(crate) fn outside_payloads(
        directory: &'e Path,
        device: Device,
        name: &Path,
        current: Option<&'e FilePlace>,
    ) -> Self {
        Self {
            directory,
            device,
            writer: Writer::Containers,
            layout: VolumeLayout::Plain,
            sub_path: PathInVolume {
                timestamp: None,
                path: name.to_owned(),
            },
            target: ExpectedTarget::At(current),
        }
    }

    fn judge_opened(&self, shown: &Shown<'_>, target: &Observed<Target>) -> Verdict {
        let target = match target {
            Observed::Seen(target) => target,
            Observed::Absent => return self.orphaned(shown, Lack::Payload, None),
            Observed::Unreadable(why) => return unreadable(shown.root, why),
        };
        let own = match shown.file {
            Some(Observed::Seen(identity)) => identity,
            Some(Observed::Unreadable(why)) => return unreadable(shown.root, why),
            Some(Observed::Absent) | None => {
                let why = "the file that its mount shows could not be found";
                return unreadable(shown.root, why);
            }
        };
        let path = self.sub_path.path.clone();
        let file = match &target.file {
            Observed::Seen(file) => file,
            Observed::Absent => {
                // Nothing has the sub path's name. A directory that containers wrote can be made
                // again; a directory in a payload cannot.
                let can_be_made = self.writer == Writer::Containers
                    && self.sub_path.timestamp.is_none()
                    && own.kind == FileKind::Directory;
                let remake = can_be_made.then(|| self.remedy(RepairMethod::Remake));
                return self.orphaned(shown, Lack::Key(path), remake);
            }
            Observed::Unreadable(why) => return unreadable(shown.root, why),
        };
        let is_other_kind = own.kind != file.kind;
        if self.is_placeholder() {
            // A file cannot be mounted over a directory, nor a directory over a file: move_mount(2)
            // returns ENOTDIR.
            let method = match is_other_kind {
                true => RepairMethod::PointSpecAtVolume,
                false => RepairMethod::Rebind,
            };
            return self.stale(shown, StaleCause::Placeholder, method);
        }
        if is_other_kind {
            let directory = file.kind == FileKind::Directory;
            return self.orphaned(shown, Lack::OtherKind { path, directory }, None);
        }
        let current = target.timestamp.as_ref();
        let difference = self
            .difference_of_mounts(shown)
            .or_else(|| self.older_payload(current?))
            // A file that a container writes, or a payload directory's file, can be unlinked and
            // created again under the mount.
            .or((own != file).then_some(StaleCause::Replaced));
        match difference {
            Some(cause) => self.stale(shown, cause, RepairMethod::Rebind),
            None => Verdict::Current,
        }
    }

    /// The difference between the mount at the place and a new bind that does not depend on the
    /// file.
    fn difference_of_mounts(&self, shown: &Shown<'_>) -> Option<StaleCause> {
        if let Some(words) = shown.reach.error_of_dead_source() {
            return Some(StaleCause::DeadMount(words.to_owned()));
        }
        if shown.root.deleted {
            return Some(StaleCause::DeletedRoot);
        }
        (shown.device != self.device).then_some(StaleCause::OtherDevice)
    }

    fn older_payload(&self, current: &TimestampDirectory) -> Option<StaleCause> {
        let shown = self.sub_path.timestamp.as_ref()?;
        (shown != current).then(|| StaleCause::OlderPayload {
            shown: shown.clone(),
            current: current.clone(),
        })
    }

    /// True if the key was missing at the bind: the kubelet made an empty directory to have
    /// something to bind.
    fn is_placeholder(&self) -> bool {
        self.writer == Writer::Kubelet && self.sub_path.timestamp.is_none()
    }

    fn orphaned(&self, shown: &Shown<'_>, lacks: Lack, remake: Option<Remedy>) -> Verdict {
        let cause = match shown.reach.error_of_dead_source() {
            Some(words) => StaleCause::DeadMount(words.to_owned()),
            None if shown.root.deleted => StaleCause::DeletedRoot,
            None if self.is_placeholder() => StaleCause::Placeholder,
            None => StaleCause::Replaced,
        };
        Verdict::Orphaned {
            cause,
            lacks,
            remake,
        }
    }

    fn stale(&self, shown: &Shown<'_>, cause: StaleCause, method: RepairMethod) -> Verdict {
        let remedy = match shown.on_it {
            OnIt::Nothing | OnIt::Cover => Ok(self.remedy(method)),
            OnIt::Inside => Err(NoRemedy::Occupied),
        };
        Verdict::Stale { cause, remedy }
    }

    pub(crate) fn remedy(&self, method: RepairMethod) -> Remedy {
        Remedy {
            volume: self.directory.to_owned(),
            sub_path: self.sub_path.clone(),
            writer: self.writer,
            layout: self.layout,
            method,
        }
    }
}

#[cfg(test)]
mod tests;
