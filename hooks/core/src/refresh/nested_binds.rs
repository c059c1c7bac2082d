//! The binds of a spec that lie in a volume of the container, such as a volume at `/data/cache`
//! within a volume at `/data`. A new mount of the outer volume gets new mounts of these binds.

use std::path::{Path, PathBuf};

use super::MountsBelow;
use crate::evidence::FilePlace;
use crate::mount_table::{MountEntry, MountTable};
use crate::paths::below;

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
        let shows = |mount: &MountEntry| {
            let mut places = self.places.iter();
            places.any(|place| place.is_root_of(mount)) || mount.mount_point == self.destination
        };
        !self.places.is_empty() && !table.entries().iter().any(shows)
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
    let nested = binds.iter().filter_map(|bind| {
        let path = bind.path_below(&volume.mount_point, outer_index)?;
        Some(NestedBind {
            bind: bind.index,
            path: path.to_owned(),
            shown: None,
        })
    });
    let mut nested: Vec<NestedBind> = nested.collect();
    nested.sort_by_key(|bind| bind.path.components().count());
    let mut others = Vec::new();
    let below_it = MountsBelow::of(table, volume.id);
    for mount in below_it.iter().flat_map(MountsBelow::mounts) {
        let path = below(&mount.mount_point, &volume.mount_point);
        let is_here = |bind: &&mut NestedBind| bind.shown.is_none() && Some(&*bind.path) == path;
        match nested.iter_mut().find(is_here) {
            Some(bind) => bind.shown = Some(mount.clone()),
            None => others.push(mount),
        }
    }
    MountsInVolume { nested, others }
}

#[cfg(test)]
mod tests {
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
