//! Finds the mounts of a running container that show a replaced file.
//!
//! A mount keeps the file that it was made of (kubernetes#50345, moby#15793). Three kinds of mounts
//! are found: the subpaths of kubelet-written volumes with nested binds ([`volumes`]), volumes that
//! were mounted anew ([`mounts`]), and the single files that a container engine or a pod bound
//! ([`files`]). [`host_roots_in_container`] finds the private binds that keep mounts of the host. All
//! compare devices and roots of mount tables, and open nothing.

mod files;
mod host_roots;
mod kept_mounts;
mod mounts;
mod volumes;
mod way;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use strum::VariantArray;

use crate::evidence::Reach;
use crate::judge::{Expected, OnIt, Shown, Verdict, judge};
use crate::mount_table::{MountEntry, MountId, MountTable};
use crate::text::serialize_path;

pub use crate::refresh::files::{BoundFile, files_in_container};
pub use crate::refresh::host_roots::{HostRootBind, host_roots_in_container};
pub use crate::refresh::kept_mounts::{
    GoneMount, KeptMounts, MountsBelow, Restriction, changed_by_tuck, is_record_needed, left_shared,
};
pub use crate::refresh::mounts::{
    BoundMount, REFRESHED_FILE, RefreshedBind, RefreshedMounts, mounts_in_container,
};
pub use crate::refresh::volumes::{
    InnerBind, MountsInVolume, NestedBind, PodVolume, SpecBind, missing_binds, mounts_in_volume,
    subpaths_in_container,
};
pub use crate::refresh::way::{Found, LookUp, ReliedOn, Way, WayFolder, can_lead};

/// A mount of a container that shows a file or directory of a volume, or a file of a directory on
/// the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathInContainer {
    /// Its line in the container's mount table.
    pub mount: MountEntry,
    pub parent: Option<MountEntry>,
    /// The directory of its volume, or of its file on the host.
    pub volume: PathBuf,
    /// The path below the payload, or the name of the file.
    pub sub_path: PathBuf,
    /// The verdict: [`Verdict::Foreign`] if the container mounted something over the mount, or in the
    /// place of its bind.
    pub verdict: Verdict,
    /// A mount of the same sub path is directly below: an earlier refresh did not detach this
    /// mount.
    pub covers_its_equal: bool,
}

impl SubpathInContainer {
    /// A mount of a whole source of the host.
    fn of_whole(table: &MountTable, mount: &MountEntry, source: &Path, verdict: Verdict) -> Self {
        let parent = table.mount(mount.parent);
        Self {
            mount: mount.clone(),
            parent: parent.filter(|parent| parent.id != mount.id).cloned(),
            volume: source.to_owned(),
            sub_path: PathBuf::new(),
            verdict,
            covers_its_equal: false,
        }
    }

    /// True if the mount has to be replaced, or its refresh finished.
    pub fn is_due(&self) -> bool {
        match &self.verdict {
            Verdict::Stale { remedy, .. } => remedy.is_ok(),
            Verdict::Pinning(_) => true,
            Verdict::Current => self.covers_its_equal,
            Verdict::Orphaned { .. } | Verdict::Unmounted(_) | Verdict::Wrong(_) => false,
            Verdict::Dead(_) | Verdict::NotProbed | Verdict::Foreign | Verdict::Unknown(_) => false,
        }
    }

    /// True if the mount shows the current file, and no refresh is unfinished.
    pub fn is_current(&self) -> bool {
        self.verdict == Verdict::Current && !self.covers_its_equal
    }
}

/// The mounts that show a part of a volume or directory, with their verdicts. A container decides
/// how many mounts there are, so maps replace searches of the table.
///
/// A mount that the container made over such a mount is never returned, so bindguard neither
/// replaces nor detaches the container's mount. The order of the table distinguishes the
/// container's mount from an unfinished refresh. The kernel lists mounts in the order of creation,
/// and the mounts of a copied namespace in the order of their places. A refresh puts its new mount
/// beneath the older mount; the container puts its new mount on top. A mount for which `goes_along`
/// is true is no obstacle: the new mount below gets the same mount again.
fn judged<'e>(
    table: &MountTable,
    expected_at: impl Fn(&MountEntry) -> Option<Expected<'e>>,
    goes_along: impl Fn(&MountEntry) -> bool,
) -> Vec<SubpathInContainer> {
    let mut expected = HashMap::new();
    for mount in table.entries() {
        if let Some(there) = expected_at(mount) {
            expected.insert(mount.id, there);
        }
    }
    if expected.is_empty() {
        return Vec::new();
    }
    let mut by_id = HashMap::new();
    let mut on: HashMap<MountId, Vec<&MountEntry>> = HashMap::new();
    for (position, mount) in table.entries().iter().enumerate() {
        by_id.insert(mount.id, (position, mount));
        let is_on_expected = mount.id != mount.parent && expected.contains_key(&mount.parent);
        if is_on_expected && !goes_along(mount) {
            on.entry(mount.parent).or_default().push(mount);
        }
    }
    let is_newer = |mount: &MountEntry, than: &MountEntry| by_id[&mount.id].0 > by_id[&than.id].0;
    let is_equal = |mount: &MountEntry, here: &Expected<'_>| {
        let there = expected.get(&mount.id);
        there.is_some_and(|there| {
            there.directory == here.directory && there.sub_path.path == here.sub_path.path
        })
    };
    let mut subpaths = Vec::new();
    for mount in table.entries() {
        let Some(here) = expected.get(&mount.id) else {
            continue;
        };
        let parent = by_id.get(&mount.parent).map(|(_, parent)| *parent);
        let parent = parent.filter(|parent| parent.id != mount.id);
        let beneath = parent.filter(|parent| {
            parent.mount_point == mount.mount_point && expected.contains_key(&parent.id)
        });
        if beneath.is_some_and(|beneath| is_newer(mount, beneath)) {
            continue;
        }
        let on_it = on.get(&mount.id).map_or(&[][..], Vec::as_slice);
        let covering = on_it
            .iter()
            .find(|other| other.mount_point == mount.mount_point);
        let on_it = match covering {
            // An equal mount on top comes from an unfinished refresh: the refresh acts on the upper
            // mount.
            Some(top) if is_equal(top, here) && !is_newer(top, mount) => continue,
            Some(_) => OnIt::Cover,
            None if on_it.is_empty() => OnIt::Nothing,
            None => OnIt::Inside,
        };
        let shown = Shown {
            device: mount.device,
            root: &mount.root,
            file: None,
            reach: &Reach::NotNeeded,
            on_it,
        };
        subpaths.push(SubpathInContainer {
            mount: mount.clone(),
            parent: parent.cloned(),
            volume: here.directory.to_owned(),
            sub_path: here.sub_path.path.clone(),
            verdict: judge(here, &shown),
            // The mounts in a directory would be lost with the mount that covers its equal.
            covers_its_equal: on_it == OnIt::Nothing
                && beneath.is_some_and(|beneath| is_equal(beneath, here)),
        });
    }
    subpaths
}

// The rules by which a refresh leaves a stale mount as it is. A refused mount is refused again until
// the node, the pod or the policy changes; a failed step may succeed at the next refresh.

/// Why a refresh leaves a stale mount as it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refused {
    pub reason: RefusedReason,
    /// The symlink, folder, file or mount that the rule is about: on the host, or a mount point in
    /// the container.
    #[serde(serialize_with = "serialize_path")]
    pub path: PathBuf,
    /// Details that the reason lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The rules of a refresh, in words that follow the path.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error, VariantArray,
)]
#[serde(rename_all = "kebab-case")]
pub enum RefusedReason {
    /// The symlink does not belong to root.
    #[error("is a symlink that does not belong to root")]
    LinkOfUser,
    /// A user other than root may write the folder of the symlink.
    #[error("is a symlink in a folder that others than root may write")]
    LinkInWritableFolder,
    /// A container may write the folder of the symlink.
    #[error("is a symlink in a folder that a container may write")]
    LinkBelowWritableBind,
    /// The folder is not the folder of the container's start, and users besides root may have put
    /// the folder there.
    #[error(
        "is another folder than at the container's start, and others than root may have put it there"
    )]
    OtherFolderOfUser,
    /// The folder is not the folder of the container's start, and a container may have put the folder
    /// there.
    #[error(
        "is another folder than at the container's start, and a container may have put it there"
    )]
    OtherFolderBelowWritableBind,
    /// Another file is mounted on the name.
    #[error("is a mount point")]
    MountPoint,
    /// The file's type differs from the old file's, for example a socket.
    #[error("has another type than the old file")]
    OtherType,
    /// The mounts of a running container could not be read: the container may be able to write the
    /// folder.
    #[error("may be writable for a container whose mounts could not be read")]
    MountsUnknown,
    /// SELinux denies the container to read the file.
    #[error("has an SELinux label that the container may not read")]
    SelinuxDenies,
    /// A container of the pod has a writable mount of the CSI volume, and may have made `..data`.
    #[error(
        "is a CSI volume that a container of the pod may write; mount it read-only in all containers"
    )]
    WritableVolume,
    /// Attaching the new mount would reach the host and other containers.
    #[error("is on a mount that is shared with the host: a new mount would reach the host")]
    ParentIsShared,
    /// The container's mount is a peer of a mount of the host.
    #[error("is shared with the host: detaching it would reach the host")]
    MountIsShared,
    /// On this kernel a mount that propagates beneath a locked mount takes its lock.
    #[error(
        "is in a container with a user namespace of its own, which could remove locked mounts after a refresh on Linux 7.1 to 7.2.10 (CVE-2026-98976)"
    )]
    KernelFault,
    /// The kernel locked the old mount when the new one arrived beneath.
    #[error(
        "was locked by the kernel when the new mount arrived beneath it; restart the pod, and update the kernel (fixed in 6.1.143 and 6.12.36)"
    )]
    Locked,
    /// The mount is idmapped, and its ids are not known to be the container's own.
    #[error("is idmapped with other ids than the container's, or with unknown ids")]
    OtherIds,
    /// The volume, or a bind in the volume, is unbindable.
    #[error("is unbindable: the new mounts cannot be copied with it")]
    Unbindable,
    /// The source of a nested bind is no longer the file that the container has.
    #[error("is a nested bind whose source was replaced, or is not local")]
    NestedSource,
    /// A mount in the bind would be lost.
    #[error("is a nested mount that may not be a copy of a mount of the host, and would be lost")]
    NestedMount,
    /// The volume contains more binds than a refresh can attach.
    #[error("has more binds in it than one refresh can attach")]
    ManyNestedBinds,
    /// The spec itself mounts or masks a path in the bind.
    #[error("is mounted or masked below the bind by the spec")]
    SpecMountsBelow,
    /// The host has several mounts at a place where the container's mount is more restricted.
    #[error("has several mounts below the bind")]
    StackedMounts,
    /// The spec was not understood, and may make mounts below the bind.
    #[error("may have mounts of the spec, which was not understood")]
    SpecUnknown,
    /// Mounts that arrive later would be writable.
    #[error("is bound recursively read-only (rro), which requires a private mount")]
    RecursivelyReadOnly,
    /// Policy keeps read-only binds private: mounts that arrive later would be writable.
    #[error("is bound read-only, and policy keeps read-only binds private")]
    ReadOnlyKept,
    /// Policy, or an annotation of the pod, permits no change.
    #[error("is a host-root bind, which policy only reports")]
    OnlyReported,
    /// The new mount would receive no umount either.
    #[error("is private on the host, so rslave has no effect; run mount --make-rshared on it")]
    PrivateOnHost,
    /// The host's present mount does not answer.
    #[error("is mounted on the host, but does not answer")]
    SourceIsDead,
    /// The source is no mount point any more, or cannot be opened.
    #[error("is not mounted on the host, or cannot be opened")]
    NoSource,
}

impl RefusedReason {
    pub const ALL: &[Self] = Self::VARIANTS;
}

impl Refused {
    pub fn new(reason: RefusedReason, path: impl Into<PathBuf>) -> Self {
        Self {
            reason,
            path: path.into(),
            error: None,
        }
    }

    #[must_use]
    pub fn with_error(mut self, error: String) -> Self {
        self.error = Some(error);
        self
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path.display(), self.reason)?;
        match &self.error {
            Some(error) => write!(f, ": {error}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod refused_tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_path_the_reason_and_the_error() {
        let refused = Refused::new(RefusedReason::LinkOfUser, "/etc/x");
        let text = "/etc/x is a symlink that does not belong to root";
        assert_eq!(refused.to_string(), text);
        let refused = refused.with_error("EIO".to_owned());
        assert_eq!(refused.to_string(), format!("{text}: EIO"));
    }
}
