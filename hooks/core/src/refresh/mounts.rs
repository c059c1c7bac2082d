//! Binds whose source is a mount of its own on the host, such as a CSI volume.
//!
//! A driver that was restarted mounts its volume anew, and the container keeps the dead mount. A
//! mount of the container belongs to a bind if it is at the bind's literal destination and shows
//! what the guard recorded at the create or at an earlier refresh. Without a record of the create,
//! the destination must have exactly one mount at the first refresh. Later refreshes know the mounts
//! that refreshes made ([`RefreshedMounts`]). So a mount that the container made is never replaced,
//! unless the container first unmounted the only mount there. If the host mounted the source anew,
//! and only mounts of the container are at the destination, the topmost mount has the verdict
//! [`Verdict::Foreign`].

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::evidence::FilePlace;
use crate::judge::{Expected, RepairMethod, StaleCause, Verdict};
use crate::mount_table::{MountEntry, MountId, MountTable};
use crate::proof::add_newest;
use crate::refresh::volumes::index_at;
use crate::refresh::{InnerBind, SubpathInContainer, judged};
use crate::text::lies_below;

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
