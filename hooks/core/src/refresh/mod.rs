//! Finds the mounts of a running container that show a replaced file.
//!
//! A mount keeps the file that it was made of (kubernetes#50345, moby#15793). Three kinds of mounts
//! are found: [`volumes`], the subpaths of kubelet-written volumes; [`files`], the single files
//! that a container engine or a pod bound; and [`mounts`], volumes that were mounted anew, with
//! their nested binds. [`host_roots`] finds the private binds that keep mounts of the host. All
//! compare devices and roots of mount tables, and open nothing.

mod files;
mod host_roots;
mod interrupted;
mod kept_mounts;
mod missing_binds;
mod mounts;
mod nested_binds;
mod refused;
mod volumes;
mod way;
mod writers;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use crate::evidence::Reach;
use crate::judge::{Expected, OnIt, Shown, Verdict, judge};
use crate::mount_table::{MountEntry, MountId, MountTable};

pub use files::{BoundFile, files_in_container};
pub use host_roots::{HostRootBind, host_roots_in_container};
pub use interrupted::{changed_by_tuck, is_record_needed, left_shared};
pub use kept_mounts::{GoneMount, KeptMounts, MountsBelow, Restriction};
pub use missing_binds::{SpecBind, missing_binds};
pub use mounts::{BoundMount, REFRESHED_FILE, RefreshedBind, RefreshedMounts, mounts_in_container};
pub use nested_binds::{InnerBind, MountsInVolume, NestedBind, mounts_in_volume};
pub use refused::{Refused, RefusedReason};
pub use volumes::{PodVolume, subpaths_in_container};
pub use way::{Found, LookUp, ReliedOn, Way, WayFolder};
pub use writers::can_lead;

/// A mount of a container that shows a file or directory of a volume, or a file of a directory on
/// the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathInContainer {
    /// Its line in the container's mount table.
    pub mount: MountEntry,
    /// The parent mount.
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
    /// True if the mount has to be replaced, or its refresh finished.
    pub fn is_due(&self) -> bool {
        match &self.verdict {
            Verdict::Stale { remedy: Ok(_), .. } => true,
            Verdict::Pinning(_) => true,
            Verdict::Current => self.covers_its_equal,
            Verdict::Stale { remedy: Err(_), .. }
            | Verdict::Orphaned { .. }
            | Verdict::Unmounted(_)
            | Verdict::Wrong(_)
            | Verdict::Dead(_)
            | Verdict::NotProbed
            | Verdict::Foreign
            | Verdict::Unknown(_) => false,
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
    let expected: BTreeMap<MountId, Expected<'e>> = table
        .entries()
        .iter()
        .filter_map(|mount| Some((mount.id, expected_at(mount)?)))
        .collect();
    if expected.is_empty() {
        return Vec::new();
    }
    let by_id: HashMap<MountId, (usize, &MountEntry)> = table
        .entries()
        .iter()
        .enumerate()
        .map(|(position, mount)| (mount.id, (position, mount)))
        .collect();
    let is_newer = |mount: &MountEntry, than: &MountEntry| by_id[&mount.id].0 > by_id[&than.id].0;
    let mut on: HashMap<MountId, Vec<&MountEntry>> = HashMap::new();
    for mount in table
        .entries()
        .iter()
        .filter(|mount| mount.id != mount.parent && expected.contains_key(&mount.parent))
        .filter(|mount| !goes_along(mount))
    {
        on.entry(mount.parent).or_default().push(mount);
    }
    let shows_same = |mount: MountId, as_here: &Expected<'_>| {
        expected
            .get(&mount)
            .is_some_and(|there| is_same_sub_path(there, as_here))
    };
    let subpaths = table.entries().iter().filter_map(|mount| {
        let expected_here = expected.get(&mount.id)?;
        let parent = by_id
            .get(&mount.parent)
            .map(|(_, parent)| *parent)
            .filter(|parent| parent.id != mount.id);
        let beneath = parent.filter(|parent| {
            parent.mount_point == mount.mount_point && expected.contains_key(&parent.id)
        });
        if beneath.is_some_and(|beneath| is_newer(mount, beneath)) {
            return None;
        }
        let on_it: &[&MountEntry] = on.get(&mount.id).map_or(&[], Vec::as_slice);
        let covering = on_it
            .iter()
            .find(|other| other.mount_point == mount.mount_point);
        // An equal mount on top comes from an unfinished refresh: the refresh acts on the upper
        // mount.
        if covering.is_some_and(|top| shows_same(top.id, expected_here) && !is_newer(top, mount)) {
            return None;
        }
        let on_it = match (covering, on_it) {
            (Some(_), _) => OnIt::Cover,
            (None, []) => OnIt::Nothing,
            (None, _) => OnIt::Inside,
        };
        let shown = Shown {
            device: mount.device,
            root: &mount.root,
            file: None,
            reach: &Reach::NotNeeded,
            on_it,
        };
        let covers = beneath.is_some_and(|beneath| shows_same(beneath.id, expected_here));
        Some(SubpathInContainer {
            mount: mount.clone(),
            parent: parent.cloned(),
            volume: expected_here.directory.to_owned(),
            sub_path: expected_here.sub_path.path.clone(),
            verdict: judge(expected_here, &shown),
            // The mounts in a directory would be lost with the mount that covers its equal.
            covers_its_equal: covers && on_it == OnIt::Nothing,
        })
    });
    subpaths.collect()
}

fn is_same_sub_path(one: &Expected<'_>, other: &Expected<'_>) -> bool {
    one.directory == other.directory && one.sub_path.path == other.sub_path.path
}
