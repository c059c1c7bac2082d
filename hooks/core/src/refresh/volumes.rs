//! The volumes of a container: subpaths of kubelet-written volumes, and the binds of the spec in a
//! volume.
//!
//! A subpath's device and root show the volume and the sub path. Neither the destination nor any name
//! that a container can choose takes part in the decision.

use std::path::{Path, PathBuf};

use crate::evidence::FilePlace;
use crate::judge::{Expected, ExpectedTarget, PathInVolume};
use crate::kubelet::{TimestampDirectory, VolumeLayout, Writer};
use crate::mount_table::{MountEntry, MountTable};
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
