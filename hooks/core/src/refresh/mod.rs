//! Finds the mounts of a running container that show a replaced file.
//!
//! A mount keeps the file that it was made of (kubernetes#50345, moby#15793). Two kinds of mounts
//! are found: [`volumes`], the subpaths of kubelet-written volumes, and [`files`], the single files
//! that a container engine bound. Both compare devices and roots of mount tables, and open nothing.

mod files;
mod interrupted;
mod nested;
mod volumes;
mod way;
mod writers;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use crate::mount_table::{MountEntry, MountId, MountTable};

pub use files::{BoundFile, files_in_container};
pub use interrupted::{changed_by_tuck, left_shared};
pub use nested::{SpecBind, missing_binds};
pub use volumes::{PodVolume, subpaths_in_container};
pub use way::{FilePlace, Found, LookUp, Refused, RefusedReason, ReliedOn, Way, WayFolder};
pub use writers::ContainerTable;

/// A mount of a container that shows a file or directory of a volume, or a file of a directory on
/// the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubpathInContainer {
    /// Its line in the container's mount table.
    pub mount: MountEntry,
    /// The mount that it is mounted on.
    pub parent: Option<MountEntry>,
    /// The directory of its volume, or of its file on the host.
    pub volume: PathBuf,
    /// The path below the payload, or the name of the file.
    pub sub_path: PathBuf,
    /// Its state.
    pub state: SubpathState,
}

/// The state of a subpath's mount in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubpathState {
    /// It shows the file that its name leads to on the host.
    Current,
    /// It shows an older one.
    Stale,
    /// It lies on another mount of the same sub path: an earlier refresh did not detach it.
    Covering(MountId),
    /// The container mounted something over it.
    Hidden,
    /// A stale directory with other mounts in it: they would be lost with the directory's mount.
    Occupied,
}

impl SubpathState {
    /// True if the mount has to be replaced, or its refresh finished.
    pub fn is_stale(&self) -> bool {
        match self {
            Self::Stale | Self::Covering(_) => true,
            Self::Current | Self::Hidden | Self::Occupied => false,
        }
    }
}

/// The part of a volume or directory that a mount shows.
#[derive(Debug)]
struct ShownPart {
    volume: PathBuf,
    sub_path: PathBuf,
    is_current: bool,
}

impl ShownPart {
    fn is_same_sub_path(&self, other: &Self) -> bool {
        self.volume == other.volume && self.sub_path == other.sub_path
    }
}

/// The mounts that show a part, with their states. A container decides how many mounts there are:
/// each is looked up, none is searched.
///
/// A mount that the container made over such a mount is never named, so nothing replaces or
/// detaches it. The order of the table distinguishes it from an unfinished refresh: the kernel
/// lists mounts in the order in which they were made, and those of a copied namespace in the order
/// of their places. A refresh puts its new mount beneath the older one; the container puts its new
/// mount on top.
fn states(
    table: &MountTable,
    part_shown_by: impl Fn(&MountEntry) -> Option<ShownPart>,
) -> Vec<SubpathInContainer> {
    let shown: BTreeMap<MountId, ShownPart> = table
        .entries()
        .iter()
        .filter_map(|mount| Some((mount.id, part_shown_by(mount)?)))
        .collect();
    if shown.is_empty() {
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
        .filter(|mount| mount.id != mount.parent && shown.contains_key(&mount.parent))
    {
        on.entry(mount.parent).or_default().push(mount);
    }
    let shows_same = |mount: MountId, part: &ShownPart| {
        shown
            .get(&mount)
            .is_some_and(|it| it.is_same_sub_path(part))
    };
    let subpaths = table.entries().iter().filter_map(|mount| {
        let shown_here = shown.get(&mount.id)?;
        let parent = by_id
            .get(&mount.parent)
            .map(|(_, parent)| *parent)
            .filter(|parent| parent.id != mount.id);
        let beneath = parent.filter(|parent| {
            parent.mount_point == mount.mount_point && shown.contains_key(&parent.id)
        });
        if beneath.is_some_and(|beneath| is_newer(mount, beneath)) {
            return None;
        }
        let equal = beneath
            .filter(|beneath| shows_same(beneath.id, shown_here))
            .map(|beneath| beneath.id);
        let on_it: &[&MountEntry] = on.get(&mount.id).map_or(&[], Vec::as_slice);
        let covering = on_it
            .iter()
            .find(|other| other.mount_point == mount.mount_point);
        // An equal mount on top is the unfinished refresh; that mount is the one to act on.
        if covering.is_some_and(|top| shows_same(top.id, shown_here) && !is_newer(top, mount)) {
            return None;
        }
        let is_stale = equal.is_some() || !shown_here.is_current;
        let state = match (covering, equal) {
            (Some(_), _) => SubpathState::Hidden,
            (None, _) if is_stale && !on_it.is_empty() => SubpathState::Occupied,
            (None, Some(equal)) => SubpathState::Covering(equal),
            (None, None) if is_stale => SubpathState::Stale,
            (None, None) => SubpathState::Current,
        };
        Some(SubpathInContainer {
            mount: mount.clone(),
            parent: parent.cloned(),
            volume: shown_here.volume.clone(),
            sub_path: shown_here.sub_path.clone(),
            state,
        })
    });
    subpaths.collect()
}
