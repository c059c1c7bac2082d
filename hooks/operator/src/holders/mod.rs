//! Finds the holders of the mounts at or below a path: the cause of "device or resource busy".
//!
//! A mount namespace begins with copies of another namespace's mounts, so a mount that is gone here
//! can still exist there. Two rules find related mounts. Neither needs equal paths in both
//! namespaces:
//!
//! ```text
//! it shows the same           its device and root are those of a mount at or below the path
//! it covers the same place    its parent shows the very directory of the filesystem that the path names
//! ```
//!
//! The second rule finds mounts that no mount here shows: after a lazy umount, and on a mount point
//! that cannot be removed.

mod release;
mod report;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable};
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{HostRoots, releasable_copies};

use crate::containers::{bundle_of_container, hold_running, inits_of, spec_of_container};
use crate::holders::release::is_in_bind;
use crate::node::refuse_other_mounts;
use crate::old_binds::stale_mounts;
use crate::pods::PodContainer;

pub use crate::holders::release::ReleaseCommand;
pub use crate::holders::report::{HeldMount, Holder, HolderKind, HoldersReport};
pub use crate::node::{container_ids, pod_uid};

/// The mounts whose holders are searched: those at or below a path, or of a device, described in a
/// way that is valid in every namespace.
#[derive(Debug, Clone, Default)]
pub struct MountsToFind {
    /// A mount of a listed device matches if its root is a listed directory or a path below.
    shown: HashMap<Device, HashSet<PathBuf>>,
    /// A mount matches if it covers this place or a path below it.
    covered: Option<(Device, PathBuf)>,
}

impl MountsToFind {
    /// The mounts at or below `path` in this namespace's table. `path` is as the kernel prints it.
    pub fn at_or_below(path: &Path, own: &MountTable) -> Self {
        let mut shown: HashMap<Device, HashSet<PathBuf>> = HashMap::new();
        for entry in own.entries() {
            if entry.mount_point.starts_with(path) {
                let roots = shown.entry(entry.device).or_default();
                roots.insert(entry.root.path.clone());
            }
        }
        // The directory of the filesystem that `path` names beneath the mounts on it.
        let under = match own.stack_at(path).next() {
            Some(bottom) => own
                .mount(bottom.parent)
                .filter(|parent| parent.id != bottom.id),
            None => own.mount_over(path),
        };
        let covered = under.and_then(|it| Some((it.device, it.place_in_filesystem(path)?)));
        Self { shown, covered }
    }

    /// All mounts of a device.
    pub fn of_device(device: Device) -> Self {
        Self {
            shown: HashMap::from([(device, HashSet::from([PathBuf::from("/")]))]),
            covered: None,
        }
    }

    /// True if `entry`, a mount of `table`, shows or covers a wanted place.
    pub fn is(&self, entry: &MountEntry, table: &MountIndex<'_>) -> bool {
        if let Some(roots) = self.shown.get(&entry.device)
            && entry.root.path.ancestors().any(|it| roots.contains(it))
        {
            return true;
        }
        let Some((device, place)) = &self.covered else {
            return false;
        };
        let parent = table.parent(entry).filter(|it| it.device == *device);
        parent
            .and_then(|parent| parent.place_in_filesystem(&entry.mount_point))
            .is_some_and(|covered| covered.starts_with(place))
    }

    fn among<'t>(&self, table: &'t MountTable, index: &MountIndex<'_>) -> Vec<&'t MountEntry> {
        let entries = table.entries().iter();
        entries.filter(|entry| self.is(entry, index)).collect()
    }
}

/// The umounts of some mounts of the reader's own namespace, which reach mounts of other namespaces.
///
/// A umount propagates from the parent of the unmounted mount: to the parent's peers, to their
/// slaves, and to the slaves of those. The kernel unmounts the mount at the same place on each. The
/// propagation of the mount itself does not matter: a shared or slave copy stays if the mount below
/// it is private. See mount_namespaces(7) and `propagate_umount` in the kernel's `fs/pnode.c`.
#[derive(Debug, Default)]
struct Spread<'t> {
    /// The key is a peer group that the umount reaches, and the place within the group's
    /// filesystem.
    reached: HashMap<(u32, PathBuf), &'t MountEntry>,
}

impl<'t> Spread<'t> {
    /// The umounts of `mounts`. `tables`: those of all namespaces, the reader's `own` included.
    fn of<'o>(
        mounts: &[&'t MountEntry],
        own: &MountIndex<'_>,
        tables: impl Iterator<Item = &'o MountTable>,
    ) -> Self {
        // The peer groups that receive mounts, by their master group.
        let mut slaves: HashMap<u32, HashSet<u32>> = HashMap::new();
        for entry in tables.flat_map(MountTable::entries) {
            let propagation = &entry.propagation;
            if let (Some(master), Some(group)) = (propagation.master, propagation.peer_group) {
                slaves.entry(master).or_default().insert(group);
            }
        }
        let (mut spread, mut known) = (Self::default(), HashMap::new());
        for mount in mounts {
            let Some(parent) = own.parent(mount) else {
                continue;
            };
            let place = parent.place_in_filesystem(&mount.mount_point);
            let Some((group, place)) = parent.propagation.peer_group.zip(place) else {
                continue;
            };
            // The group and all groups that receive from the group, directly or indirectly.
            let reached = known.entry(group).or_insert_with(|| {
                let (mut reached, mut next) = (HashSet::from([group]), vec![group]);
                while let Some(group) = next.pop() {
                    for slave in slaves.get(&group).into_iter().flatten() {
                        if reached.insert(*slave) {
                            next.push(*slave);
                        }
                    }
                }
                reached
            });
            for group in reached.iter() {
                let key = (*group, place.clone());
                spread.reached.entry(key).or_insert(mount);
            }
        }
        spread
    }

    /// The mount here whose umount also unmounts `entry`. `table`: that of the entry's own
    /// namespace.
    fn reaching(&self, entry: &MountEntry, table: &MountIndex<'_>) -> Option<&'t MountEntry> {
        let parent = table.parent(entry)?;
        let place = parent.place_in_filesystem(&entry.mount_point)?;
        let groups = [parent.propagation.peer_group, parent.propagation.master];
        groups
            .into_iter()
            .flatten()
            .find_map(|group| self.reached.get(&(group, place.clone())).copied())
    }
}

// Tries, without a change, the commands that would free the copies of a running container.
//
// A refresh and a release are refused for many reasons: a recursively read-only bind, a bind of
// another shim without a record of the create. A command that would be refused is no advice.

/// The effect that commands would have on a running container.
#[derive(Debug, Default)]
pub struct Trial {
    /// `refresh --what host-root` would replace a bind.
    pub refreshes: bool,
    /// The copies that `release` would unmount.
    pub releases: Vec<MountEntry>,
    /// The mounts of the spec. `None` if unknown: then any mount may be the container's own.
    pub spec: Option<SpecUsers>,
}

impl Trial {
    /// True for a mount in a bind of the container that is no mount of the spec, and has no mount on
    /// it: a copy of a mount of the host, and no volume.
    fn is_copy(&self, entry: &MountEntry, index: &MountIndex<'_>, table: &MountTable) -> bool {
        let spec = self.spec.as_ref();
        let is_of_spec = spec.is_none_or(|spec| spec.has_mount_at(&entry.mount_point));
        is_in_bind(entry, index) && !is_of_spec && !table.has_mounts_on(entry)
    }

    /// Tries the commands on a container. Nothing is entered.
    pub fn of(container: &PodContainer, policy: &Policy, places: &Places) -> Self {
        let root = Path::new("/");
        let spec = spec_of_container(root, &container.id);
        let mut trial = Self {
            spec: spec.and_then(|spec| SpecUsers::from_spec(&spec).ok()),
            ..Self::default()
        };
        let id = container.id.as_str();
        let init = inits_of([id]).get(id).copied();
        let Some(Ok(Some(process))) = init.map(|init| hold_running(id, init)) else {
            return trial;
        };
        if refuse_other_mounts(&process).is_err() {
            return trial;
        }
        let Some(bundle) = bundle_of_container(root, &container.id) else {
            return trial;
        };
        let Ok(roots) = HostRoots::open(&bundle, policy, places) else {
            return trial;
        };
        // both verbs refuse a container that left the namespaces of its runtime
        let Ok(releases) = releasable_copies(&process, trial.spec.as_ref(), &roots) else {
            return trial;
        };
        trial.releases = releases;
        if let Ok(mounts) = stale_mounts(&process, &roots) {
            let is_stale = |outcome: &MountResult| *outcome == MountResult::Stale;
            trial.refreshes = mounts.iter().any(|mount| is_stale(&mount.outcome));
        }
        trial
    }
}

#[cfg(test)]
mod mounts_to_find_tests {
    use super::*;

    fn table(lines: &str) -> MountTable {
        MountTable::from_mountinfo(lines.as_bytes()).unwrap()
    }

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 8:2 / /mnt/disk rw shared:2 - ext4 /dev/sdb rw\n";
    const CONTAINER: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n13 12 8:2 / /host/mnt/disk rw - ext4 /dev/sdb rw\n14 11 8:2 /sub /data rw - ext4 /dev/sdb rw\n";

    fn found(wanted: &MountsToFind, table: &MountTable) -> Vec<u32> {
        let index = MountIndex::of(table);
        table
            .entries()
            .iter()
            .filter(|entry| wanted.is(entry, &index))
            .map(|entry| entry.id.0)
            .collect()
    }

    #[test]
    fn a_copy_and_a_bind_of_a_part_show_the_same() {
        let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &table(HOST));
        assert_eq!(found(&wanted, &table(CONTAINER)), [13, 14]);
        assert_eq!(
            found(
                &MountsToFind::of_device(Device { major: 8, minor: 2 }),
                &table(CONTAINER)
            ),
            [13, 14]
        );
    }

    #[test]
    fn a_mount_that_is_unmounted_here_is_found_by_the_path_that_it_covers() {
        let unmounted = table("1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n");
        let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &unmounted);
        assert_eq!(found(&wanted, &table(CONTAINER)), [13]);
        let elsewhere = MountsToFind::at_or_below(Path::new("/mnt/other"), &unmounted);
        assert_eq!(found(&elsewhere, &table(CONTAINER)), Vec::<u32>::new());
    }
}

#[cfg(test)]
mod spread_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::path::Path;

    use super::*;

    const HOST: &str = "\
1 0 8:1 / / rw shared:1 - ext4 a rw
2 1 0:40 / /mnt/p rw shared:2 - tmpfs p rw
3 2 0:41 / /mnt/p/c rw shared:3 - tmpfs c rw
4 1 0:42 / /mnt/q rw - tmpfs q rw
5 4 0:43 / /mnt/q/c rw shared:5 - tmpfs d rw
";

    /// The umount on the host that also unmounts the mount with this id in another namespace.
    fn reaching(elsewhere: &str, id: u32) -> Option<String> {
        let [host, other] =
            [HOST, elsewhere].map(|text| MountTable::from_mountinfo(text.as_bytes()).unwrap());
        let mounts: Vec<_> = host
            .entries()
            .iter()
            .filter(|it| it.mount_point.starts_with("/mnt"))
            .collect();
        let spread = Spread::of(&mounts, &MountIndex::of(&host), [&host, &other].into_iter());
        let entry = other
            .entries()
            .iter()
            .find(|entry| entry.id.0 == id)
            .unwrap();
        let found = spread
            .reaching(entry, &MountIndex::of(&other))
            .map(|mount| mount.mount_point.as_path());
        found.map(|point: &Path| point.display().to_string())
    }

    #[test]
    fn the_mount_below_decides_and_not_the_mount_itself() {
        let slave_of = |p: &str, c: &str| {
            format!(
                "11 0 8:1 / / rw master:1 - ext4 a rw\n12 11 0:40 / /mnt/p rw{p} - tmpfs p rw\n13 12 0:41 / /mnt/p/c rw{c} - tmpfs c rw\n"
            )
        };
        assert_eq!(
            reaching(&slave_of(" master:2", " master:3"), 13).as_deref(),
            Some("/mnt/p/c")
        );
        assert_eq!(
            reaching(&slave_of("", " master:3"), 13),
            None,
            "its parent is private"
        );
        assert_eq!(
            reaching(&slave_of(" master:2", ""), 13).as_deref(),
            Some("/mnt/p/c"),
            "it is private itself"
        );
        assert_eq!(reaching(&slave_of("", ""), 12).as_deref(), Some("/mnt/p"));
        let below_private =
            "11 0 0:42 / / rw - tmpfs q rw\n12 11 0:43 / /c rw master:5 - tmpfs d rw\n";
        assert_eq!(
            reaching(below_private, 12),
            None,
            "the host's own parent is private"
        );
    }

    #[test]
    fn a_umount_goes_on_through_slaves_that_are_shared_and_to_other_names() {
        let through = "11 0 8:1 / / rw shared:9 master:1 - ext4 a rw\n20 0 8:1 /mnt /host rw master:9 - ext4 a rw\n21 20 0:40 / /host/p rw - tmpfs p rw\n";
        assert_eq!(reaching(through, 21).as_deref(), Some("/mnt/p"));
        let elsewhere = "20 0 8:1 /srv /host rw master:1 - ext4 a rw\n21 20 0:40 / /host/p rw master:2 - tmpfs p rw\n";
        assert_eq!(
            reaching(elsewhere, 21),
            None,
            "it is mounted at another place"
        );
    }
}
