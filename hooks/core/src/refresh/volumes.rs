//! The volumes of a container: subpaths of kubelet-written volumes, volumes that were mounted anew,
//! and the binds of the spec in a volume.
//!
//! A subpath's device and root show the volume and the sub path. Neither the destination nor any name
//! that a container can choose takes part in the decision.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::evidence::FilePlace;
use crate::judge::{Expected, ExpectedTarget, PathInVolume, RepairMethod, StaleCause, Verdict};
use crate::kubelet::{TimestampDirectory, VolumeLayout, Writer};
use crate::mount_table::{MountEntry, MountId, MountTable};
use crate::proof::add_newest;
use crate::refresh::{MountsBelow, SubpathInContainer, judged};
use crate::spec::SpecView;
use crate::text::{below, lies_below};

/// A kubelet-written volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodVolume {
    /// Its directory on the host.
    pub directory: PathBuf,
    /// Its place on the host.
    pub place: FilePlace,
    /// The payload that `..data` names.
    pub current: TimestampDirectory,
}

/// The mounts of a container that show a part of a payload of these volumes. Mounts of a whole
/// volume follow `..data` by themselves.
pub fn subpaths_in_container(table: &MountTable, volumes: &[PodVolume]) -> Vec<SubpathInContainer> {
    judged(
        table,
        |mount| volumes.iter().find_map(|volume| volume.expected_at(mount)),
        |_| false,
    )
}

impl PodVolume {
    fn expected_at(&self, mount: &MountEntry) -> Option<Expected<'_>> {
        if self.place.device != mount.device {
            return None;
        }
        Some(Expected {
            directory: &self.directory,
            device: self.place.device,
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            sub_path: PathInVolume::in_payload(below(&mount.root.path, &self.place.path)?)?,
            target: ExpectedTarget::InPayload(&self.current),
        })
    }
}

// The binds of a spec that lie in a volume of the container, such as a volume at `/data/cache`
// within a volume at `/data`. A new mount of the outer volume gets new mounts of these binds.

/// A bind of the spec that may be nested in another bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InnerBind {
    /// The bind's position in the spec's `mounts`.
    pub index: usize,
    /// The path in the container.
    pub destination: PathBuf,
    /// The places that the container's mount of this bind may show. Empty if none is known.
    pub places: Vec<FilePlace>,
}

/// A bind of the spec in a volume of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NestedBind {
    /// The bind's position in the spec's `mounts`.
    pub bind: usize,
    /// The path below the volume.
    pub path: PathBuf,
    /// The container's mount; `None` if that mount is gone.
    pub shown: Option<MountEntry>,
}

/// The mounts below the mount of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountsInVolume<'t> {
    /// The binds of the spec, outer binds first.
    pub nested: Vec<NestedBind>,
    /// All other mounts.
    pub others: Vec<&'t MountEntry>,
}

impl InnerBind {
    /// The path of this bind below a place, if this bind is nested there. Runtimes mount in the
    /// order of the spec, so the bind at that place hides the earlier binds below it.
    pub(super) fn path_below<'p>(
        &'p self,
        outer: &Path,
        outer_index: Option<usize>,
    ) -> Option<&'p Path> {
        let is_hidden = outer_index.is_some_and(|outer| self.index < outer);
        let path = below(&self.destination, outer)?;
        (!path.as_os_str().is_empty() && !is_hidden).then_some(path)
    }

    /// True if the container had a mount of this bind, and has no such mount now. A symlink of the
    /// image may lead the destination elsewhere, so the mount may be at any place.
    pub(super) fn is_missing_in(&self, table: &MountTable) -> bool {
        let mut mounts = table.entries().iter();
        !self.places.is_empty()
            && !mounts.any(|mount| {
                mount.mount_point == self.destination
                    || self.places.iter().any(|place| place.is_root_of(mount))
            })
    }
}

/// The position in the spec of the bind at a place, the last bind if there are several.
pub(super) fn index_at(binds: &[InnerBind], place: &Path) -> Option<usize> {
    let here = binds.iter().filter(|bind| bind.destination == place);
    here.map(|bind| bind.index).max()
}

/// The mounts in the volume that this mount shows.
pub fn mounts_in_volume<'t>(
    table: &'t MountTable,
    volume: &MountEntry,
    binds: &[InnerBind],
) -> MountsInVolume<'t> {
    let outer_index = index_at(binds, &volume.mount_point);
    let mut nested = Vec::new();
    for bind in binds {
        if let Some(path) = bind.path_below(&volume.mount_point, outer_index) {
            nested.push(NestedBind {
                bind: bind.index,
                path: path.to_owned(),
                shown: None,
            });
        }
    }
    nested.sort_by_key(|bind| bind.path.components().count());
    let mut others = Vec::new();
    let below_it = MountsBelow::of(table, volume.id);
    for mount in below_it.iter().flat_map(MountsBelow::mounts) {
        let path = below(&mount.mount_point, &volume.mount_point);
        let bind = nested
            .iter_mut()
            .find(|bind| bind.shown.is_none() && Some(&*bind.path) == path);
        match bind {
            Some(bind) => bind.shown = Some(mount.clone()),
            None => others.push(mount),
        }
    }
    MountsInVolume { nested, others }
}

// Binds of a spec that were mounted in a directory of a volume, and are gone.
//
// A container can bind a file of one configMap in the directory of another configMap. An update by
// the kubelet removes the old directory. Since Linux 3.18 the removal detaches every mount in the
// directory, in every mount namespace. The container then reads the directory's own file.

/// A bind of a container's spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecBind {
    /// The path in the container.
    pub destination: PathBuf,
    /// The path on the host.
    pub source: PathBuf,
}

impl SpecBind {
    /// The binds of a spec.
    pub fn of_spec(spec: &SpecView<'_>) -> Vec<Self> {
        let binds = spec.binds().iter().map(|bind| Self {
            destination: bind.destination().to_owned(),
            source: bind.source().to_owned(),
        });
        binds.collect()
    }
}

/// The binds below the mount of a directory that the table has no longer. A directory whose
/// destination has a symlink is left out: the table has the resolved paths.
pub fn missing_binds<'b>(
    table: &MountTable,
    subpaths: &[SubpathInContainer],
    binds: &'b [SpecBind],
) -> Vec<&'b SpecBind> {
    let mut outer = Vec::new();
    for subpath in subpaths {
        let directory = &subpath.mount.mount_point;
        if binds.iter().any(|bind| bind.destination == *directory) {
            outer.push(directory);
        }
    }
    let mut missing = Vec::new();
    for bind in binds {
        let place = &bind.destination;
        if outer.iter().any(|directory| lies_below(place, directory))
            && table.stack_at(place).next().is_none()
        {
            missing.push(bind);
        }
    }
    missing
}

// Binds whose source is a mount of its own on the host, such as a CSI volume.
//
// A driver that was restarted mounts its volume anew, and the container keeps the dead mount. A
// mount of the container belongs to a bind if it is at the bind's literal destination and shows
// what the guard recorded at the create or at an earlier refresh. Without a record of the create,
// the destination must have exactly one mount at the first refresh. Later refreshes know the mounts
// that refreshes made ([`RefreshedMounts`]). So a mount that the container made is never replaced,
// unless the container first unmounted the only mount there. If the host mounted the source anew,
// and only mounts of the container are at the destination, the topmost mount has the verdict
// [`Verdict::Foreign`].

/// The file of a bundle with the [`RefreshedMounts`].
pub const REFRESHED_FILE: &str = "bindguard-refreshed.json";

/// The mounts that refreshes replaced or made in a container whose create left no record. Who made
/// the other mounts of the container stays unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshedMounts {
    /// The unique id of the container's root mount. A container that was started again from the
    /// same bundle has another root mount. `None` before Linux 6.11.
    root: Option<u64>,
    binds: Vec<RefreshedBind>,
}

/// The mounts that refreshes replaced or made for a bind. The newest mounts are last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshedBind {
    /// The bind's position in the spec's `mounts`.
    bind: usize,
    /// The unique ids of the mounts.
    ids: Vec<u64>,
    /// The places that the mounts show.
    places: Vec<FilePlace>,
}

impl RefreshedMounts {
    /// This record, if it is about the container with this table; otherwise an empty record.
    #[must_use]
    pub fn of_container(self, table: &MountTable) -> Self {
        let mut mounts = table.entries().iter();
        if !self.binds.is_empty() && mounts.any(|mount| mount.unique_id == self.root) {
            return self;
        }
        let root = table.stack_at(Path::new("/")).next();
        Self {
            root: root.and_then(|root| root.unique_id),
            binds: Vec::new(),
        }
    }

    /// The record of a bind, `None` before its first refresh.
    pub fn bind(&self, bind: usize) -> Option<&RefreshedBind> {
        self.binds.iter().find(|known| known.bind == bind)
    }

    /// Adds a mount of a bind.
    pub fn add(&mut self, bind: usize, id: Option<u64>, place: FilePlace) {
        let at = self.binds.iter().position(|known| known.bind == bind);
        let at = at.unwrap_or(self.binds.len());
        if at == self.binds.len() {
            self.binds.push(RefreshedBind {
                bind,
                ..RefreshedBind::default()
            });
        }
        let known = &mut self.binds[at];
        if let Some(id) = id {
            add_newest(&mut known.ids, id);
        }
        add_newest(&mut known.places, place);
    }
}

/// A bind of a spec whose source is a mount point of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundMount {
    /// The source on the host.
    pub source: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The places that the container's mount showed at the create and after each refresh. Empty without a
    /// record.
    pub recorded: Vec<FilePlace>,
    /// The mounts of earlier refreshes, if the create left no record.
    pub refreshed: Option<RefreshedBind>,
    /// The place that the host's mount shows now.
    pub current: FilePlace,
    /// True if the mounts below the source are bound, too.
    pub is_recursive: bool,
}

/// The container's mounts that were made for these binds, with verdicts. `inner` are all binds of
/// the spec, nested or not. A mount that lacks a nested bind is stale as well.
pub fn mounts_in_container(
    table: &MountTable,
    mounts: &[BoundMount],
    inner: &[InnerBind],
) -> Vec<SubpathInContainer> {
    let binds = mounts.iter().map(|bind| BindInTable::of(bind, table));
    let binds: Vec<_> = binds.collect();
    let expected_at = |mount: &MountEntry| {
        let found = binds.iter().find(|it| it.has_made(mount))?;
        Some(found.bind.expected())
    };
    // The new mount gets the binds of the spec again. Which of the other mounts are copies of the
    // host's mounts is judged before the mount is replaced.
    let goes_along = |mount: &MountEntry| {
        let of_spec = inner
            .iter()
            .find(|bind| bind.destination == mount.mount_point);
        mounts.iter().any(|outer| {
            of_spec.is_some_and(|bind| bind.path_below(&outer.destination, None).is_some())
                || outer.is_recursive && lies_below(&mount.mount_point, &outer.destination)
        })
    };
    let mut shown = judged(table, expected_at, goes_along);
    for outer in &mut shown {
        let place = &outer.mount.mount_point;
        let index = index_at(inner, place);
        let missing = inner
            .iter()
            .find(|bind| bind.path_below(place, index).is_some() && bind.is_missing_in(table));
        let bind = mounts.iter().find(|bind| bind.source == outer.volume);
        if let (true, Some(missing), Some(bind)) = (outer.is_current(), missing, bind) {
            let expected = bind.expected();
            outer.verdict = Verdict::Stale {
                cause: StaleCause::LacksBind(missing.destination.clone()),
                remedy: Ok(expected.remedy(RepairMethod::Rebind)),
            };
        }
    }
    for bind in &binds {
        shown.extend(bind.replaced_in(table));
    }
    shown
}

/// A bind and the mounts at its destination. A container decides how many these are: a single pass
/// over the table finds all.
struct BindInTable<'t> {
    /// The current place has the root by which this table names the current mount.
    bind: BoundMount,
    here: Vec<&'t MountEntry>,
    /// The parents of the mounts here that refreshes replaced or made.
    beneath_refreshed: Vec<MountId>,
}

impl<'t> BindInTable<'t> {
    fn of(bind: &BoundMount, table: &'t MountTable) -> Self {
        let mut bind = bind.clone();
        let here: Vec<_> = table.stack_at(&bind.destination).collect();
        // The root of an NFS mount is a part of its source, and tables of containers have no
        // sources: the device decides.
        let current = here.iter().find(|mount| {
            mount.fs_type.has_root_in_source() && mount.device == bind.current.device
        });
        if let Some(mount) = current {
            bind.current.path.clone_from(&mount.root.path);
        }
        let mut beneath_refreshed = Vec::new();
        for mount in &here {
            if let (Some(refreshed), Some(id)) = (&bind.refreshed, mount.unique_id)
                && refreshed.ids.contains(&id)
            {
                beneath_refreshed.push(mount.parent);
            }
        }
        Self {
            bind,
            here,
            beneath_refreshed,
        }
    }

    fn has_made(&self, mount: &MountEntry) -> bool {
        mount.mount_point == self.bind.destination
            && (self.bind.current.is_root_of(mount) || self.is_recorded(mount))
    }

    fn is_recorded(&self, mount: &MountEntry) -> bool {
        let is_root = |places: &[FilePlace]| places.iter().any(|place| place.is_root_of(mount));
        if !self.bind.recorded.is_empty() {
            return is_root(&self.bind.recorded);
        }
        let is_lone = self.here.len() == 1;
        match (&self.bind.refreshed, mount.unique_id) {
            (None, _) => is_lone,
            // A mount that arrived by propagation has an id that no refresh knew before. A refresh
            // that was killed then left the mount beneath the old mount.
            (Some(refreshed), Some(id)) => {
                refreshed.ids.contains(&id)
                    || self.beneath_refreshed.contains(&mount.id) && is_root(&refreshed.places)
            }
            (Some(refreshed), None) => is_lone || is_root(&refreshed.places),
        }
    }

    /// The container's own mount in place of the bind, if the host has mounted the source anew since
    /// the bind was made or refreshed. Until then the container does not lack anything.
    fn replaced_in(&self, table: &MountTable) -> Option<SubpathInContainer> {
        let bind = &self.bind;
        let top = *self.here.last()?;
        let refreshed = bind.refreshed.as_ref();
        let is_known = bind.recorded.contains(&bind.current)
            || refreshed.is_some_and(|refreshed| refreshed.places.contains(&bind.current));
        if is_known || self.here.iter().any(|mount| self.has_made(mount)) {
            return None;
        }
        let replaced = SubpathInContainer::of_whole(table, top, &bind.source, Verdict::Foreign);
        Some(replaced)
    }
}

impl BoundMount {
    fn expected(&self) -> Expected<'_> {
        let name = Path::new("");
        Expected::outside_payloads(&self.source, self.current.device, name, Some(&self.current))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;
    use crate::mount_table::Device;

    const OLD: &str = "..2026_11_21_05_10_00.1";
    const NEW: &str = "..2026_11_21_05_20_00.2";

    fn volume() -> PodVolume {
        PodVolume {
            directory: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~configmap/conf".into(),
            place: FilePlace {
                device: Device { major: 8, minor: 1 },
                path: "/kubelet/pods/u/volumes/kubernetes.io~configmap/conf".into(),
            },
            current: TimestampDirectory::from_name(NEW.as_ref()).unwrap(),
        }
    }

    /// A container's root, and the mounts of a test on it: id, parent, device, root and mount
    /// point.
    fn states(mounts: &[(u32, u32, &str, &str, &str)]) -> Vec<(u32, &'static str)> {
        let lines = mounts.iter().map(|(id, parent, device, root, point)| {
            format!("{id} {parent} {device} {root} {point} ro,relatime - ext4 /dev/sda1 rw\n")
        });
        let text: String = ["1 0 0:9 / / rw - overlay o rw\n".to_owned()]
            .into_iter()
            .chain(lines)
            .collect();
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        subpaths_in_container(&table, &[volume()])
            .iter()
            .map(|it| (it.mount.id.0, state(it)))
            .collect()
    }

    fn state(subpath: &SubpathInContainer) -> &'static str {
        match &subpath.verdict {
            _ if subpath.covers_its_equal => "covering",
            Verdict::Stale { remedy: Err(_), .. } => "occupied",
            verdict => verdict.name().as_str(),
        }
    }

    fn root(rest: &str) -> String {
        format!("/kubelet/pods/u/volumes/kubernetes.io~configmap/conf{rest}")
    }

    #[test]
    fn a_mount_is_stale_by_its_root_alone() {
        let (deleted, older) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{OLD}/app.conf")),
        );
        let (current, gone) = (
            root(&format!("/{NEW}/app.conf")),
            root(&format!("/{NEW}/app.conf//deleted")),
        );
        for (shown, state) in [
            (&deleted, "stale"),
            (&older, "stale"),
            (&current, "current"),
            (&gone, "stale"),
        ] {
            assert_eq!(
                states(&[(2, 1, "8:1", shown, "/etc/app.conf")]),
                [(2, state)],
                "{shown}"
            );
        }
    }

    #[test]
    fn a_mount_of_something_else_is_none_of_ours() {
        let deleted = root(&format!("/{OLD}/app.conf//deleted"));
        for (device, shown) in [
            ("8:2", deleted.as_str()),
            (
                "8:1",
                "/kubelet/pods/u/volumes/kubernetes.io~configmap/other/..2026_11_21_05_10_00.1/app.conf//deleted",
            ),
            ("8:1", &root("")),
            ("8:1", &root("/app.conf//deleted")),
            ("8:1", "/app.conf//deleted"),
        ] {
            assert_eq!(
                states(&[(2, 1, device, shown, "/etc/app.conf")]),
                [],
                "{device} {shown}"
            );
        }
    }

    #[test]
    fn of_a_stack_only_the_top_is_named() {
        let (deleted, current) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{NEW}/app.conf")),
        );
        let at = "/etc/app.conf";
        // Killed between attaching the new mount and detaching the stale mount.
        assert_eq!(
            states(&[(2, 3, "8:1", &deleted, at), (3, 1, "8:1", &current, at)]),
            [(2, "covering")]
        );
        // The container mounted its own file over the subpath, or the kubelet mounted the subpath
        // over a foreign mount.
        assert_eq!(
            states(&[(2, 1, "8:1", &deleted, at), (3, 2, "0:40", "/x", at)]),
            [(2, "foreign")]
        );
        assert_eq!(
            states(&[(2, 1, "0:40", "/x", at), (3, 2, "8:1", &deleted, at)]),
            [(3, "stale")]
        );
        let other = root(&format!("/{OLD}/other.conf//deleted"));
        assert_eq!(
            states(&[(2, 1, "8:1", &other, at), (3, 2, "8:1", &deleted, at)]),
            [(2, "foreign")]
        );
    }

    /// The table lists the mounts in the order in which they were made.
    #[test]
    fn a_mount_of_the_container_over_its_own_file_is_left_alone() {
        let (deleted, current) = (
            root(&format!("/{OLD}/app.conf//deleted")),
            root(&format!("/{NEW}/app.conf")),
        );
        let at = "/etc/app.conf";
        // The container ran `mount --bind FILE FILE`, to remount the file with new flags.
        for own in [&deleted, &current] {
            assert_eq!(
                states(&[(2, 1, "8:1", &deleted, at), (3, 2, "8:1", own, at)]),
                [(2, "foreign")],
                "{own}"
            );
        }
    }

    #[test]
    fn a_stale_directory_with_other_mounts_in_it_is_occupied() {
        let (old, new) = (
            root(&format!("/{OLD}/d//deleted")),
            root(&format!("/{NEW}/d")),
        );
        let inner = (3, 2, "0:40", "/b", "/etc/d/b.conf");
        assert_eq!(
            states(&[(2, 1, "8:1", &old, "/etc/d"), inner]),
            [(2, "occupied")]
        );
        assert_eq!(
            states(&[(2, 1, "8:1", &new, "/etc/d"), inner]),
            [(2, "current")]
        );
    }
}

#[cfg(test)]
mod nested_binds_tests {
    use super::*;
    use crate::mount_table::{Device, MountId};

    fn bind(index: usize, destination: &str) -> InnerBind {
        let device = Device {
            major: 0,
            minor: 90 + index as u32,
        };
        let path = "/".into();
        InnerBind {
            index,
            destination: destination.into(),
            places: vec![FilePlace { device, path }],
        }
    }

    fn table(mounts: &[&str]) -> MountTable {
        let own = [
            "1 0 0:9 / / rw - overlay o rw",
            "5 1 0:5 / /data rw - fuse.d d rw",
        ];
        let lines = own.iter().chain(mounts).map(|line| format!("{line}\n"));
        MountTable::from_mountinfo(lines.collect::<String>().as_bytes()).unwrap()
    }

    /// The binds with the ids of their mounts, and the ids of the other mounts.
    type Found = (Vec<(usize, Option<u32>)>, Vec<u32>);

    fn found(mounts: &[&str]) -> Found {
        let binds = [
            bind(0, "/data"),
            bind(1, "/data/cache/deep"),
            bind(2, "/data/cache"),
            bind(3, "/database"),
        ];
        let table = table(mounts);
        let volume = table.mount(MountId(5)).unwrap();
        let MountsInVolume { nested, others } = mounts_in_volume(&table, volume, &binds);
        let ids = |it: NestedBind| (it.bind, it.shown.map(|mount| mount.id.0));
        let others = others.iter().map(|mount| mount.id.0).collect();
        (nested.into_iter().map(ids).collect(), others)
    }

    const CACHE: &str = "6 5 0:92 / /data/cache rw - tmpfs t rw";

    #[test]
    fn the_outer_bind_comes_first_whether_mounted_or_gone() {
        let nested = |mounts: &[&str]| found(mounts).0;
        assert_eq!(nested(&[CACHE]), [(2, Some(6)), (1, None)]);
        let deep = "7 6 0:91 / /data/cache/deep rw - tmpfs t rw";
        assert_eq!(nested(&[CACHE, deep]), [(2, Some(6)), (1, Some(7))]);
        assert_eq!(nested(&[]), [(2, None), (1, None)]);
    }

    #[test]
    fn a_bind_before_the_volume_in_the_spec_stays_hidden() {
        let binds = [
            bind(0, "/data/cache"),
            bind(1, "/data"),
            bind(2, "/data/deep"),
        ];
        let table = table(&[]);
        let found = mounts_in_volume(&table, table.mount(MountId(5)).unwrap(), &binds);
        let found: Vec<_> = found.nested.iter().map(|bind| bind.bind).collect();
        assert_eq!(found, [2]);
    }

    #[test]
    fn mounts_that_are_no_binds_of_the_spec_are_told_apart() {
        for line in [
            "7 5 0:7 / /data/own rw - tmpfs t rw",
            "7 6 0:7 / /data/cache rw - tmpfs t rw",
            "7 6 0:7 / /data/cache/own rw - tmpfs t rw",
        ] {
            let nested = vec![(2, Some(6)), (1, None)];
            assert_eq!(found(&[CACHE, line]), (nested, vec![7]), "{line}");
        }
    }

    #[test]
    fn a_bind_is_missing_if_no_mount_shows_its_source() {
        let bind = bind(2, "/data/cache");
        assert!(bind.is_missing_in(&table(&[])));
        assert!(!bind.is_missing_in(&table(&[CACHE])));
        let elsewhere = "6 5 0:92 / /data/linked rw - tmpfs t rw";
        assert!(!bind.is_missing_in(&table(&[elsewhere])));
        let places = Vec::new();
        assert!(!InnerBind { places, ..bind }.is_missing_in(&table(&[])));
    }
}

#[cfg(test)]
mod mounts_tests {
    use super::*;
    use crate::mount_table::Device;

    fn place(minor: u32, path: &str) -> FilePlace {
        FilePlace {
            device: Device { major: 0, minor },
            path: path.into(),
        }
    }

    /// The state of the mounts at `/data`: `0:7` is the host's mount now, `0:5` was recorded.
    fn states(recorded: &[FilePlace], mounts: &[&str]) -> Vec<(u32, &'static str)> {
        states_with(&[], false, recorded, mounts)
    }

    fn states_with(
        inner: &[InnerBind],
        is_recursive: bool,
        recorded: &[FilePlace],
        mounts: &[&str],
    ) -> Vec<(u32, &'static str)> {
        let bind = BoundMount {
            source: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/mount".into(),
            destination: "/data".into(),
            recorded: recorded.to_vec(),
            refreshed: None,
            current: place(7, "/"),
            is_recursive,
        };
        let root = ["1 0 0:9 / / rw - overlay o rw"];
        let text = root.iter().chain(mounts).map(|line| format!("{line}\n"));
        let text: String = text.collect();
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let found = mounts_in_container(&table, &[bind], inner);
        let state = |it: &SubpathInContainer| match (it.is_current(), it.is_due()) {
            (true, _) => "current",
            (_, true) => "due",
            (false, false) => "kept",
        };
        found.iter().map(|it| (it.mount.id.0, state(it))).collect()
    }

    #[test]
    fn a_mount_of_the_record_is_due_once_the_host_has_another() {
        let recorded = [place(5, "/"), place(6, "/")];
        let dead = "5 1 0:5 / /data rw - fuse.d d rw";
        assert_eq!(states(&recorded, &[dead]), [(5, "due")]);
        let second = "6 1 0:6 / /data rw - fuse.d d rw";
        assert_eq!(states(&recorded, &[second]), [(6, "due")]);
        let now = "7 1 0:7 / /data rw - fuse.d d rw";
        assert_eq!(states(&recorded, &[now]), [(7, "current")]);
        let deleted = "5 1 0:5 /v//deleted /data rw - tmpfs t rw";
        assert_eq!(states(&[place(5, "/v")], &[deleted]), [(5, "due")]);
    }

    #[test]
    fn a_mount_that_the_container_made_is_kept() {
        let recorded = [place(5, "/")];
        let own = "8 1 0:8 / /data rw - tmpfs t rw";
        assert_eq!(states(&recorded, &[own]), [(8, "kept")]);
        let is_as_recorded = [place(5, "/"), place(7, "/")];
        assert_eq!(states(&is_as_recorded, &[own]), []);
        let dead = "5 1 0:5 / /data rw - fuse.d d rw";
        let above = "8 5 0:8 / /data rw - tmpfs t rw";
        assert_eq!(states(&recorded, &[dead, above]), [(5, "kept")]);
        let within = "8 5 0:8 / /data/cache rw - tmpfs t rw";
        assert_eq!(states(&recorded, &[dead, within]), [(5, "kept")]);
        let elsewhere = "8 1 0:5 / /mnt rw - fuse.d d rw";
        assert_eq!(states(&recorded, &[elsewhere]), []);
    }

    #[test]
    fn a_mount_with_a_bind_of_the_spec_in_it_is_due_and_also_without_it() {
        let inner = [InnerBind {
            index: 1,
            destination: "/data/cache".into(),
            places: vec![place(8, "/")],
        }];
        let dead = "5 1 0:5 / /data rw - fuse.d d rw";
        let now = "7 1 0:7 / /data rw - fuse.d d rw";
        let cache = |parent: u32| format!("8 {parent} 0:8 / /data/cache rw - tmpfs t rw");
        let own = "9 5 0:9 / /data/own rw - tmpfs t rw";
        let states = |mounts: &[&str]| states_with(&inner, false, &[place(5, "/")], mounts);
        assert_eq!(states(&[dead, &cache(5)]), [(5, "due")]);
        assert_eq!(states(&[dead]), [(5, "due")]);
        assert_eq!(states(&[dead, &cache(5), own]), [(5, "kept")]);
        assert_eq!(states(&[now, &cache(7)]), [(7, "current")]);
        assert_eq!(states(&[now]), [(7, "due")]);
    }

    #[test]
    fn a_recursive_bind_with_a_mount_below_is_due_and_a_covered_one_is_kept() {
        let states = |mounts: &[&str]| states_with(&[], true, &[place(5, "/")], mounts);
        let dead = "5 1 0:5 / /data rw - fuse.d d rw";
        let within = "8 5 0:8 / /data/cache rw - tmpfs t rw";
        assert_eq!(states(&[dead, within]), [(5, "due")]);
        let above = "8 5 0:8 / /data rw - tmpfs t rw";
        assert_eq!(states(&[dead, above]), [(5, "kept")]);
    }

    #[test]
    fn without_a_record_only_a_lone_mount_is_due() {
        let dead = "5 1 0:5 / /data rw - fuse.d d rw";
        let above = "8 5 0:8 / /data rw - tmpfs t rw";
        assert_eq!(states(&[], &[dead]), [(5, "due")]);
        assert_eq!(states(&[], &[dead, above]), [(8, "kept")]);
    }

    /// A table that was read as text has no unique ids.
    #[test]
    fn without_ids_the_places_of_earlier_refreshes_are_known() {
        let mut refreshed = RefreshedMounts::default();
        refreshed.add(3, None, place(5, "/"));
        refreshed.add(3, None, place(6, "/"));
        let bind = BoundMount {
            source: "/mnt".into(),
            destination: "/data".into(),
            recorded: Vec::new(),
            refreshed: refreshed.bind(3).cloned(),
            current: place(7, "/"),
            is_recursive: false,
        };
        let (old, new) = (
            "5 6 0:5 / /data rw - fuse.d d rw\n",
            "6 1 0:6 / /data rw - fuse.d d rw\n",
        );
        let own = "8 6 0:8 / /data rw - tmpfs t rw\n";
        for (mounts, due) in [
            (format!("{old}{new}"), Some(5)),
            (new.to_owned(), Some(6)),
            (format!("{new}{own}"), None),
        ] {
            let text = format!("1 0 0:9 / / rw - overlay o rw\n{mounts}");
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            let found = mounts_in_container(&table, std::slice::from_ref(&bind), &[]);
            let found = found.iter().find(|it| it.is_due());
            assert_eq!(found.map(|it| it.mount.id.0), due, "{mounts}");
        }
    }

    /// statmount(2) reports `/` for every NFS mount; the host's own table has the path of the
    /// export.
    #[test]
    fn a_mount_of_the_same_nfs_filesystem_is_current() {
        let bind = BoundMount {
            source: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/pv".into(),
            destination: "/data".into(),
            recorded: Vec::new(),
            refreshed: None,
            current: place(7, "/share"),
            is_recursive: false,
        };
        for (line, state) in [
            ("7 1 0:7 / /data rw - nfs4 none rw", true),
            ("7 1 0:7 / /data rw - nfs4 server:/share rw", true),
            ("7 1 0:6 / /data rw - nfs4 none rw", false),
            ("7 1 0:7 / /data rw - fuse.d d rw", false),
        ] {
            let text = format!("1 0 0:9 / / rw - overlay o rw\n{line}\n");
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            let found = mounts_in_container(&table, std::slice::from_ref(&bind), &[]);
            assert_eq!(
                (found[0].is_current(), found[0].is_due()),
                (state, !state),
                "{line}"
            );
        }
    }

    #[test]
    fn a_refresh_that_was_interrupted_is_due() {
        let new = "7 1 0:7 / /data rw - fuse.d d rw";
        let dead = "5 7 0:5 / /data rw - fuse.d d rw";
        assert_eq!(states(&[place(5, "/")], &[dead, new]), [(5, "due")]);
    }

    #[test]
    fn a_record_is_kept_for_the_container_with_its_root_only() {
        let table = |id: u64| {
            let mut root = MountEntry::from_line(b"1 0 0:9 / / rw - overlay o rw").unwrap();
            root.unique_id = Some(id);
            MountTable::from_entries(vec![root])
        };
        let mut record = RefreshedMounts::default().of_container(&table(10));
        record.add(3, Some(20), place(5, "/"));
        record.add(4, Some(21), place(6, "/"));
        for (bind, place) in [(3, place(5, "/")), (4, place(6, "/"))] {
            let known = record.bind(bind).map(|known| known.places.clone());
            assert_eq!(known, Some(vec![place]));
        }
        assert_eq!(record.clone().of_container(&table(10)), record);
        let other = record.of_container(&table(11));
        assert_eq!(other, RefreshedMounts::default().of_container(&table(11)));
        assert_ne!(other, RefreshedMounts::default());
    }
}
