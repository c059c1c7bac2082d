//! The mounts of a container that a killed refresh left shared.
//!
//! Before Linux 6.5 a refresh makes the mount around a stale file shared for a moment, and the new
//! mount arrives shared. The mount table of before shows their former propagation.

use std::collections::{BTreeMap, HashMap};

use crate::mount_table::{MountEntry, MountIndex, MountTable};

use super::SubpathInContainer;

/// The subpaths, and the mounts that contain their mount points: a tuck changes the propagation of
/// these mounts. Duplicates are removed.
pub fn changed_by_tuck(now: &MountTable, subpaths: &[&SubpathInContainer]) -> Vec<MountEntry> {
    let index = MountIndex::of(now);
    let mut changed = BTreeMap::new();
    for subpath in subpaths {
        let mount = index.mount(subpath.mount.id);
        let mut around = subpath
            .parent
            .as_ref()
            .and_then(|parent| index.mount(parent.id));
        while let Some(above) = around
            && above.mount_point == subpath.mount.mount_point
        {
            around = index.parent(above);
        }
        for mount in mount.into_iter().chain(around) {
            changed.insert(mount.id, mount.clone());
        }
    }
    changed.into_values().collect()
}

/// The mounts that became shared, with their former propagation. Only recorded mounts and the
/// subpaths are compared: a refresh changes no other mount. A recorded mount is left unchanged if
/// the mount has a peer: a refresh did not share that mount.
pub fn left_shared(
    before: &MountTable,
    now: &MountTable,
    subpaths: &[SubpathInContainer],
) -> Vec<MountEntry> {
    let index = MountIndex::of(now);
    let mut sizes: HashMap<u32, usize> = HashMap::new();
    for mount in now.entries() {
        if let Some(group) = mount.propagation.peer_group {
            *sizes.entry(group).or_default() += 1;
        }
    }
    let mut left = BTreeMap::new();
    let mut add = |mount: &MountEntry, former: &MountEntry| {
        if mount.propagation.peer_group.is_some() && former.propagation.peer_group.is_none() {
            left.entry(mount.id).or_insert_with(|| MountEntry {
                propagation: former.propagation.clone(),
                ..mount.clone()
            });
        }
    };
    let recorded = MountIndex::of(before);
    for subpath in subpaths {
        // A volume that was mounted anew has another device than the recorded mount.
        if let Some(former) = recorded.stack_at(&subpath.mount.mount_point).first() {
            add(&subpath.mount, former);
        }
    }
    // While a volume is unmounted on the host, no subpath leads to the mounts around it.
    for former in before.entries() {
        if let Some(mount) = index.mount(former.id)
            && mount.device == former.device
            && mount.root.path == former.root.path
            && mount.mount_point == former.mount_point
            && let Some(group) = mount.propagation.peer_group
            && sizes[&group] == 1
        {
            add(mount, former);
        }
    }
    left.into_values().collect()
}

/// True if a place of the record has a shared mount that is not in `left`. It may be the new mount
/// of a tuck, which only a refresh of the same kind of binds knows: the record has to stay.
pub fn is_record_needed(before: &MountTable, now: &MountTable, left: &[MountEntry]) -> bool {
    before.entries().iter().any(|former| {
        former.propagation.peer_group.is_none()
            && now.stack_at(&former.mount_point).any(|mount| {
                mount.propagation.peer_group.is_some() && left.iter().all(|it| it.id != mount.id)
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;

    const PRIVATE: &str =
        "1 0 0:9 / / rw - overlay o rw\n2 1 8:1 /v/old/f//deleted /etc/f ro - ext4 /dev/sda1 rw\n";

    /// The ids of the mounts that are left, and whether each was a slave, for the subpath that is
    /// mounted last. The record has only what a tuck of the former subpath changes.
    fn left(before: &str, now: &str) -> Vec<(u32, bool)> {
        let (before, now) = (table(before), table(now));
        let before = MountTable::from_entries(changed_by_tuck(&before, &[&last_of(&before)]));
        let left = left_shared(&before, &now, &[last_of(&now)]);
        left.iter()
            .map(|mount| (mount.id.0, mount.propagation.master.is_some()))
            .collect()
    }

    fn last_of(now: &MountTable) -> SubpathInContainer {
        let mount = now.entries().last().unwrap().clone();
        SubpathInContainer {
            parent: now.mount(mount.parent).cloned(),
            mount,
            volume: "/v".into(),
            sub_path: "f".into(),
            verdict: Verdict::Foreign,
            covers_its_equal: false,
        }
    }

    fn table(text: &str) -> MountTable {
        MountTable::from_mountinfo(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_mount_that_became_shared_gets_its_former_propagation() {
        let around = "1 0 0:9 / / rw shared:7 - overlay o rw\n2 1 8:1 /v/old/f//deleted /etc/f ro - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, PRIVATE), []);
        assert_eq!(left(PRIVATE, around), [(1, false)]);
        assert_eq!(left(around, around), [], "it was shared before");
        let slave = PRIVATE.replace("/ / rw -", "/ / rw master:3 -");
        assert_eq!(
            left(&slave, &around.replace("shared:7", "shared:7 master:3")),
            [(1, true)]
        );
        // The id of the new mount differs.
        let new = "1 0 0:9 / / rw - overlay o rw\n5 1 8:1 /v/new/f /etc/f ro shared:8 - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, new), [(5, false)]);
        let anew = new.replace("8:1 /v/new/f", "0:7 /");
        assert_eq!(
            left(PRIVATE, &anew),
            [(5, false)],
            "the volume was mounted anew"
        );
        let peer = new.replace(
            "5 1 8:1",
            "4 1 8:1 /v/new/g /etc/g ro shared:8 - ext4 /dev/sda1 rw\n5 1 8:1",
        );
        assert_eq!(
            left(PRIVATE, &peer),
            [(5, false)],
            "another new mount is its peer"
        );
        // Not yet detached: the lower mount is left to the next check.
        let covering = "1 0 0:9 / / rw shared:7 - overlay o rw\n5 1 8:1 /v/new/f /etc/f ro shared:8 - ext4 /dev/sda1 rw\n\
                        2 5 8:1 /v/old/f//deleted /etc/f ro - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, covering), [(1, false)]);
    }

    /// A refresh while the volume was unmounted on the host, or of another kind of binds, removed
    /// the record, and each later refresh was refused because of the shared mount around the volume.
    #[test]
    fn a_refresh_that_knows_no_subpath_restores_the_mount_around_and_keeps_the_rest() {
        let before = table(PRIVATE);
        let before = MountTable::from_entries(changed_by_tuck(&before, &[&last_of(&before)]));
        let found = |now: &str| {
            let now = table(now);
            let left = left_shared(&before, &now, &[]);
            let ids: Vec<u32> = left.iter().map(|mount| mount.id.0).collect();
            (ids, is_record_needed(&before, &now, &left))
        };
        assert_eq!(found(PRIVATE), (vec![], false));
        let around = PRIVATE.replace("/ / rw -", "/ / rw shared:7 -");
        assert_eq!(found(&around), (vec![1], false));
        let new = "1 0 0:9 / / rw - overlay o rw\n5 1 8:1 /v/new/f /etc/f ro shared:8 - ext4 /dev/sda1 rw\n";
        assert_eq!(found(new), (vec![], true));
        let peer = around + "4 1 0:9 / /copy rw shared:7 - overlay o rw\n";
        assert_eq!(found(&peer), (vec![], true), "the container shares it");
    }

    #[test]
    fn the_record_has_no_other_mount() {
        let many: String = (10..500)
            .map(|id| format!("{id} 1 0:9 /x /m/{id} rw - overlay o rw\n"))
            .collect();
        let now = table(&PRIVATE.replace("2 1 8:1", &format!("{many}2 1 8:1")));
        let recorded: Vec<u32> = changed_by_tuck(&now, &[&last_of(&now)])
            .iter()
            .map(|mount| mount.id.0)
            .collect();
        assert_eq!(recorded, [1, 2]);
    }

    #[test]
    fn a_mount_of_something_else_stays_shared() {
        let peer = "1 0 0:9 / / rw shared:7 - overlay o rw\n4 1 0:9 / /copy rw shared:7 - overlay o rw\n\
                    2 1 8:1 /v/old/f//deleted /etc/f ro - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, peer), [], "the container shares it");
        let other = "1 0 0:8 / / rw shared:7 - tmpfs o rw\n2 1 8:1 /v/old/f//deleted /etc/f ro - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, other), [], "another mount got its id");
        let elsewhere = "1 0 0:9 / / rw - overlay o rw\n5 1 8:1 /v/new/f /etc/g ro shared:8 - ext4 /dev/sda1 rw\n";
        assert_eq!(left(PRIVATE, elsewhere), [], "a mount at another place");
    }
}
