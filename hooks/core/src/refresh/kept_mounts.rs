//! The other mounts of a container around the mounts that a refresh replaces.
//!
//! Below a recursive bind are copies of the host's mounts, and mounts that the container or its
//! runtime made.
//!
//! A copy may be lost with the bind: the new bind shows what the host has. A mount is certainly a
//! copy if the host has the same mount at the same place. The host may have unmounted a mount since.
//! Then the copy is what the refresh releases. The mount is taken for such a copy only if nothing
//! else can have made the mount: neither the container, nor the spec, nor a hook.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use crate::evidence::FilePlace;
use crate::mount_table::{MountAttributes, MountEntry, MountId, MountIndex, MountTable};
use crate::proof::ExpectedBinds;
use crate::refresh::{
    HostRootBind, MountsInVolume, NestedBind, Refused, RefusedReason, SubpathInContainer,
};
use crate::spec::MountMakers;
use crate::text::below;

/// The mounts below a mount of a container.
#[derive(Debug)]
pub struct MountsBelow<'t> {
    mounts: Vec<&'t MountEntry>,
    index: MountIndex<'t>,
}

/// The attributes that the new mount at a path below the bind keeps from the old mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restriction {
    /// The path below the bind.
    pub path: PathBuf,
    pub attributes: MountAttributes,
}

/// The mounts below a bind that are lost with the old bind, or come again with the new bind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptMounts {
    /// The old mounts that are more restricted than the host's.
    pub restrictions: Vec<Restriction>,
    /// The binds of the spec that are nested in a volume. The new mount gets new mounts of them.
    pub nested: Vec<NestedBind>,
}

/// A mount below a bind that the host does not have, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoneMount<'t> {
    pub mount: &'t MountEntry,
    /// True if the record of the create shows that the mount is a copy of a host's mount.
    pub is_recorded_copy: bool,
}

impl<'t> MountsBelow<'t> {
    /// Finds the mounts below the mount with this id; `None` if the table lacks the mount.
    pub fn of(table: &'t MountTable, top: MountId) -> Option<Self> {
        let index = MountIndex::of(table);
        let top = index.mount(top)?;
        let mut children: HashMap<MountId, Vec<&MountEntry>> = HashMap::new();
        for mount in table.entries() {
            if mount.id != mount.parent {
                children.entry(mount.parent).or_default().push(mount);
            }
        }
        let (mut mounts, mut next) = (Vec::new(), vec![top.id]);
        while let Some(parent) = next.pop() {
            // A mount has a single parent. Removing the children ends a loop in a forged table.
            for mount in children.remove(&parent).unwrap_or_default() {
                next.push(mount.id);
                mounts.push(mount);
            }
        }
        Some(Self { mounts, index })
    }

    /// True if no mount is below.
    pub fn is_empty(&self) -> bool {
        self.mounts.is_empty()
    }

    pub fn mounts(&self) -> impl Iterator<Item = &'t MountEntry> {
        self.mounts.iter().copied()
    }

    /// Compares the mounts in a volume that are no binds of the spec with those of the host. The
    /// volume is bound recursively from `source` to `destination`. `place_of` finds the place of a
    /// source of the spec on the host, `None` if that is not known. `record` is the record of the
    /// create.
    ///
    /// # Errors
    /// If a mount in the volume must not be lost.
    pub fn compared(
        &self,
        MountsInVolume { nested, others }: MountsInVolume<'_>,
        (source, destination): (&Path, &Path),
        host: &MountTable,
        makers: &MountMakers,
        record: &ExpectedBinds,
        place_of: &dyn Fn(&Path) -> Option<FilePlace>,
    ) -> Result<KeptMounts, Refused> {
        for path in makers.paths_below(destination) {
            let path_below = below(path, destination);
            if !nested.iter().any(|bind| Some(&*bind.path) == path_below) {
                return Err(Refused::new(RefusedReason::SpecMountsBelow, path));
            }
        }
        let makers = OtherMakers::of(&self.index, destination, makers, record, place_of);
        let host = MountIndex::of(host);
        let mut restrictions = Vec::new();
        for mount in others {
            let refused = |reason| Err(Refused::new(reason, &mount.mount_point));
            let Some(path) = below(&mount.mount_point, destination) else {
                return refused(RefusedReason::NestedMount);
            };
            let place = source.join(path);
            match equal_at(&host, &place, mount) {
                Some(equal) if is_restricted(mount, equal) => {
                    if host.stack_at(&place).len() > 1 {
                        return refused(RefusedReason::StackedMounts);
                    }
                    restrictions.push(Restriction {
                        path: path.to_owned(),
                        attributes: mount.attributes,
                    });
                }
                Some(_) => {}
                None if makers.cannot_have_made(mount, &self.index) => {}
                None => return refused(RefusedReason::NestedMount),
            }
        }
        Ok(KeptMounts {
            restrictions,
            nested,
        })
    }

    /// The unique ids of the mounts that the host has at the same places. The bind leads from
    /// `source` to `destination`.
    pub fn ids_of_copies(
        &self,
        (source, destination): (&Path, &Path),
        host: &MountTable,
    ) -> Vec<u64> {
        let host = MountIndex::of(host);
        let mut ids = Vec::new();
        for mount in &self.mounts {
            if let Some(path) = below(&mount.mount_point, destination)
                && equal_at(&host, &source.join(path), mount).is_some()
            {
                ids.extend(mount.unique_id);
            }
        }
        ids
    }

    /// The container's mounts that the host lacks at the same places, parents before children.
    /// Parameters as in [`Self::compared`].
    ///
    /// # Errors
    /// If the spec itself mounts below the bind.
    pub fn gone(
        &self,
        bind: &HostRootBind,
        host: &MountTable,
        makers: &MountMakers,
        record: &ExpectedBinds,
        place_of: &dyn Fn(&Path) -> Option<FilePlace>,
    ) -> Result<Vec<GoneMount<'t>>, Refused> {
        if let Some(path) = makers.paths_below(&bind.destination).next() {
            return Err(Refused::new(RefusedReason::SpecMountsBelow, path));
        }
        let host = MountIndex::of(host);
        let others = OtherMakers::of(&self.index, &bind.destination, makers, record, place_of);
        let mut gone = Vec::new();
        for mount in self.mounts() {
            let path = below(&mount.mount_point, &bind.destination);
            if path.is_some_and(|path| equal_at(&host, &bind.source.join(path), mount).is_some()) {
                continue;
            }
            gone.push(GoneMount {
                mount,
                is_recorded_copy: path.is_some()
                    && record.has_made(mount)
                    && others.cannot_have_made(mount, &self.index),
            });
        }
        Ok(gone)
    }
}

/// The same mount at a place of the host.
fn equal_at<'h>(host: &MountIndex<'h>, place: &Path, mount: &MountEntry) -> Option<&'h MountEntry> {
    let mut stack = host.stack_at(place).iter().copied();
    stack.find(|host| {
        // Tables of containers have no sources, which have the root of an NFS mount.
        let is_same_root = host.root == mount.root || host.fs_type.has_root_in_source();
        let is_idmapped = host.attributes.is_idmapped();
        host.device == mount.device && is_same_root && is_idmapped == mount.attributes.is_idmapped()
    })
}

/// True if the old mount denies more than the host's, or keeps access times otherwise.
fn is_restricted(mount: &MountEntry, host: &MountEntry) -> bool {
    let times = |mount: &MountEntry| mount.attributes.bits() & MountAttributes::ACCESS_TIMES;
    mount.attributes.denied_beyond(host.attributes) > 0 || times(mount) != times(host)
}

/// The makers of mounts besides the recursive bind itself.
struct OtherMakers<'r> {
    is_unknown: bool,
    container_may_mount: bool,
    record: &'r ExpectedBinds,
    /// The sources of binds that are not at their destinations: a symlink of the image led the
    /// runtime elsewhere.
    sources: Vec<FilePlace>,
    fs_types: Vec<&'r str>,
}

impl<'r> OtherMakers<'r> {
    fn of(
        table: &MountIndex<'_>,
        destination: &Path,
        makers: &'r MountMakers,
        record: &'r ExpectedBinds,
        place_of: &dyn Fn(&Path) -> Option<FilePlace>,
    ) -> Self {
        let is_elsewhere = |place: &Path| table.stack_at(place).is_empty();
        let mut others = Self {
            is_unknown: makers.has_hooks,
            container_may_mount: makers.container_may_mount,
            record,
            sources: Vec::new(),
            fs_types: Vec::new(),
        };
        for path in &makers.covered {
            // A symlink of the image can lead the runtime from a masked path to a volume. /proc and
            // /sys have no such symlinks.
            let is_of_image = !path.starts_with("/proc") && !path.starts_with("/sys");
            others.is_unknown |= is_of_image && is_elsewhere(path);
        }
        for mount in &makers.mounts {
            if mount.destination == destination || !is_elsewhere(&mount.destination) {
                continue;
            }
            match mount.source.as_deref().map(place_of) {
                Some(Some(place)) => others.sources.push(place),
                Some(None) => others.is_unknown = true,
                None => others.fs_types.push(&mount.fs_type),
            }
        }
        others
    }

    fn cannot_have_made(&self, mount: &MountEntry, table: &MountIndex<'_>) -> bool {
        // A file that was replaced since keeps only its device.
        let is_replaced = |place: &FilePlace| mount.root.deleted && mount.device == place.device;
        let is_source = |place: &FilePlace| is_replaced(place) || place.is_root_of(mount);
        // A runtime binds a read-only path onto itself.
        let is_on_itself = |parent: &MountEntry| {
            mount.device == parent.device
                && parent.place_in_filesystem(&mount.mount_point).as_ref() == Some(&mount.root.path)
        };
        !self.is_unknown
            && (!self.container_may_mount || self.record.has_made(mount))
            && !mount.attributes.is_idmapped()
            && !table.parent(mount).is_none_or(is_on_itself)
            && !self.sources.iter().any(is_source)
            && !self.fs_types.contains(&&*mount.fs_type.0)
    }
}

// The mounts of a container that a killed refresh left shared.
//
// Before Linux 6.5 a refresh makes the mount around a stale file shared for a moment, and the new
// mount arrives shared. The mount table of before shows their former propagation.

/// The subpaths, and the mounts that contain their mount points: a tuck changes the propagation of
/// these mounts. Duplicates are removed.
pub fn changed_by_tuck(now: &MountTable, subpaths: &[&SubpathInContainer]) -> Vec<MountEntry> {
    let index = MountIndex::of(now);
    let mut changed = BTreeMap::new();
    for subpath in subpaths {
        let mount = index.mount(subpath.mount.id);
        let parent = subpath.parent.as_ref();
        let mut around = parent.and_then(|parent| index.mount(parent.id));
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
    use crate::judge::Pinning;
    use crate::mount_table::Device;

    const HOST: &str = "1 0 8:1 / / rw,relatime shared:1 - ext4 d rw
2 1 0:5 / /proc rw,nosuid,relatime shared:2 - proc p rw
3 1 8:2 / /mnt/data rw,relatime shared:3 - xfs e rw
";
    const CONTAINER: &str = "10 9 0:40 / / rw - overlay o rw
11 10 8:1 / /host rw,relatime - ext4 d rw
12 11 0:5 / /host/proc rw,nosuid,relatime - proc p rw
";

    fn table(text: &str) -> MountTable {
        MountTable::from_mountinfo(text.as_bytes()).unwrap()
    }

    fn place_of(source: &Path) -> Option<FilePlace> {
        let device = Device { major: 8, minor: 7 };
        let path = source.to_owned();
        (source != Path::new("/unknown")).then_some(FilePlace { device, path })
    }

    /// The comparison for a container with these mounts besides, which cannot mount itself.
    fn compared(more: &str, spec: &str) -> Result<KeptMounts, Refused> {
        compared_with("", more, spec)
    }

    fn compared_with(of_host: &str, more: &str, spec: &str) -> Result<KeptMounts, Refused> {
        let container = table(&format!("{CONTAINER}{more}"));
        let host = table(&format!("{HOST}{of_host}"));
        let makers = MountMakers::from_spec(spec.as_bytes()).unwrap();
        let below = MountsBelow::of(&container, MountId(11)).unwrap();
        let record = ExpectedBinds::default();
        let found = MountsInVolume {
            nested: Vec::new(),
            others: below.mounts().collect(),
        };
        let places = (Path::new("/"), Path::new("/host"));
        below.compared(found, places, &host, &makers, &record, &place_of)
    }

    const PLAIN: &str = r#"{"process":{"capabilities":{}},"mounts":[{"destination":"/host","type":"bind","source":"/"}]}"#;

    #[test]
    fn a_mount_that_the_host_unmounted_is_released() {
        let disk = "13 11 8:3 / /host/mnt/old rw,relatime - ext4 f rw\n";
        let kept = compared(disk, PLAIN).unwrap();
        assert_eq!(kept, KeptMounts::default());
        assert_eq!(compared("", PLAIN), Ok(KeptMounts::default()));
        // A network namespace, and a mount of the host's at another place.
        for line in [
            "13 11 0:4 net:[4026532000] /host/run/netns/a rw - nsfs n rw\n",
            "13 11 8:2 / /host/mnt/other rw,relatime - xfs e rw\n",
        ] {
            assert!(compared(line, PLAIN).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_mount_that_something_else_may_have_made_is_kept() {
        let disk = "13 11 8:3 / /host/mnt/old rw,relatime - ext4 f rw\n";
        let perhaps = |line: &str, spec: &str| match compared(line, spec) {
            Err(refused) if refused.reason == RefusedReason::NestedMount => true,
            other => panic!("{line} {spec}: {other:?}"),
        };
        for spec in [
            "{}",
            r#"{"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}}"#,
            r#"{"process":{"capabilities":{}},"hooks":{"createContainer":[{}]}}"#,
            r#"{"process":{"capabilities":{}},"mounts":[{"destination":"/var/run/x","type":"bind","source":"/unknown"}]}"#,
            r#"{"process":{"capabilities":{}},"mounts":[{"destination":"/link","type":"ext4","source":"/dev/sdb"}]}"#,
            r#"{"process":{"capabilities":{}},"linux":{"maskedPaths":["/proc/kcore","/link"]}}"#,
        ] {
            assert!(perhaps(disk, spec));
        }
        let masked =
            r#"{"process":{"capabilities":{}},"linux":{"maskedPaths":["/proc/absent","/secret"]}}"#;
        let mask = "14 10 0:6 /null /secret ro - devtmpfs d rw\n";
        assert!(compared(&format!("{disk}{mask}"), masked).is_ok());
        for line in [
            "13 11 8:1 /etc /host/etc ro,relatime - ext4 d rw\n",
            "13 11 8:3 / /host/x rw,relatime,idmapped - ext4 f rw\n",
            "13 11 8:3 / /elsewhere rw,relatime - ext4 f rw\n",
        ] {
            assert!(perhaps(line, PLAIN));
        }
        let linked = r#"{"process":{"capabilities":{}},"mounts":[{"destination":"/link","type":"bind","source":"/s"}]}"#;
        for root in ["/s", "/other//deleted"] {
            let line = format!("13 11 8:7 {root} /host/x rw - ext4 f rw\n");
            assert!(perhaps(&line, linked));
        }
        // A file of a pod that is gone.
        let deleted = "13 11 8:3 /x//deleted /host/x rw,relatime - ext4 f rw\n";
        assert!(compared(deleted, linked).is_ok());
        assert!(compared(disk, linked).is_ok());
        let below = r#"{"mounts":[{"destination":"/host/etc/x","type":"bind","source":"/s"}]}"#;
        let refused = compared("", below);
        let expected = Refused::new(RefusedReason::SpecMountsBelow, "/host/etc/x");
        assert_eq!(refused, Err(expected));
    }

    #[test]
    fn a_stricter_mount_stays_strict() {
        let strict = "13 11 8:2 / /host/mnt/data ro,noatime - xfs e rw\n";
        let kept = compared(strict, PLAIN).unwrap();
        let attributes = MountAttributes::from_options("ro,noatime".as_ref());
        let path = "mnt/data".into();
        assert_eq!(kept.restrictions, [Restriction { path, attributes }]);
    }

    /// A container that may mount: all but a copy is kept.
    const MAY_MOUNT: &str = r#"{"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}}"#;

    #[test]
    fn a_copy_shows_the_same_folder_of_the_same_filesystem_with_the_same_ids() {
        let nfs = "4 1 0:50 / /mnt/nfs rw,relatime - nfs4 server:/x rw\n";
        for (line, is_copy) in [
            ("8:2 / /host/mnt/data rw,relatime - xfs e rw", true),
            ("8:2 /sub /host/mnt/data rw,relatime - xfs e rw", false),
            ("8:3 / /host/mnt/data rw,relatime - xfs e rw", false),
            (
                "8:2 / /host/mnt/data rw,relatime,idmapped - xfs e rw",
                false,
            ),
            ("8:2 / /host/mnt/other rw,relatime - xfs e rw", false),
            ("0:50 /x /host/mnt/nfs rw,relatime - nfs4 none rw", true),
            ("0:51 /x /host/mnt/nfs rw,relatime - nfs4 none rw", false),
        ] {
            let found = compared_with(nfs, &format!("13 11 {line}\n"), MAY_MOUNT);
            assert_eq!(found.is_ok(), is_copy, "{line}: {found:?}");
        }
    }

    #[test]
    fn a_mount_is_stricter_by_a_denial_or_by_its_access_times() {
        let data = |options: &str| {
            let line = format!("13 11 8:2 / /host/mnt/data {options} - xfs e rw\n");
            compared(&line, PLAIN).unwrap().restrictions.len()
        };
        assert_eq!(data("rw,relatime"), 0);
        assert_eq!(data("ro,relatime"), 1);
        assert_eq!(data("rw,noatime"), 1);
        let strict = "4 1 8:4 / /mnt/strict ro,nosuid,relatime - xfs e rw\n";
        let lax = "13 11 8:4 / /host/mnt/strict rw,relatime - xfs e rw\n";
        assert_eq!(compared_with(strict, lax, PLAIN), Ok(KeptMounts::default()));
    }

    #[test]
    fn a_stricter_mount_of_a_stack_is_refused() {
        let over = "4 3 8:4 / /mnt/data rw,relatime - xfs f rw\n";
        let strict = "13 11 8:2 / /host/mnt/data ro,relatime - xfs e rw\n";
        let refused = compared_with(over, strict, PLAIN).unwrap_err();
        assert_eq!(refused.reason, RefusedReason::StackedMounts);
        let equal = "13 11 8:2 / /host/mnt/data rw,relatime - xfs e rw\n";
        assert!(compared_with(over, equal, PLAIN).is_ok());
    }

    #[test]
    fn only_a_mount_of_the_spec_that_is_not_at_its_place_may_be_elsewhere() {
        let bind = r#"{"process":{"capabilities":{}},"mounts":[
            {"destination":"/data","type":"bind","source":"/s"}]}"#;
        let shown = "13 11 8:7 /s /host/x rw - ext4 f rw\n";
        let at_its_place = "14 10 8:7 /s /data rw - ext4 f rw\n";
        assert!(compared(shown, bind).is_err());
        assert!(compared(&format!("{shown}{at_its_place}"), bind).is_ok());
        // The recursive bind itself.
        let host = r#"{"process":{"capabilities":{}},"mounts":[
            {"destination":"/host","type":"bind","source":"/unknown"}]}"#;
        assert!(compared(shown, host).is_ok());
        let masked = |path: &str| {
            let linux = format!(r#""linux":{{"maskedPaths":["{path}"]}}"#);
            compared(
                shown,
                &format!(r#"{{"process":{{"capabilities":{{}}}},{linux}}}"#),
            )
        };
        for (path, is_ok) in [("/proc/kcore", true), ("/sys/x", true), ("/secret", false)] {
            assert_eq!(masked(path).is_ok(), is_ok, "{path}");
        }
    }

    #[test]
    fn only_a_folder_bound_onto_itself_may_be_of_the_runtime() {
        for (line, is_ok) in [
            ("8:1 /etc /host/etc ro,relatime - ext4 d rw", false),
            ("8:1 /var /host/etc ro,relatime - ext4 d rw", true),
            ("8:3 /etc /host/etc ro,relatime - ext4 f rw", true),
        ] {
            let found = compared(&format!("13 11 {line}\n"), PLAIN);
            assert_eq!(found.is_ok(), is_ok, "{line}: {found:?}");
        }
    }

    #[test]
    fn a_nested_bind_comes_again() {
        let container = table(&format!(
            "{CONTAINER}13 11 8:7 /s /host/etc/x rw - ext4 f rw\n"
        ));
        let below = MountsBelow::of(&container, MountId(11)).unwrap();
        let nested = |path: &str| NestedBind {
            bind: 0,
            path: path.into(),
            shown: None,
        };
        let spec = r#"{"mounts":[{"destination":"/host/etc/x","type":"bind","source":"/s"}]}"#;
        let makers = MountMakers::from_spec(spec.as_bytes()).unwrap();
        let compared = |path: &str| {
            let found = MountsInVolume {
                nested: vec![nested(path)],
                others: Vec::new(),
            };
            let places = (Path::new("/"), Path::new("/host"));
            let record = ExpectedBinds::default();
            below.compared(found, places, &table(HOST), &makers, &record, &place_of)
        };
        assert_eq!(compared("etc/x").unwrap().nested, [nested("etc/x")]);
        let refused = compared("etc/y").unwrap_err();
        assert_eq!(refused.reason, RefusedReason::SpecMountsBelow);
    }

    /// The container's table with unique ids, 100 higher than the ids.
    fn with_unique_ids(more: &str) -> MountTable {
        let mut entries = table(&format!("{CONTAINER}{more}")).entries().to_vec();
        for entry in &mut entries {
            entry.unique_id = Some(u64::from(entry.id.0) + 100);
        }
        MountTable::from_entries(entries)
    }

    const GONE: &str = "13 11 8:3 / /host/mnt/old rw,relatime - ext4 f rw
14 13 8:4 / /host/mnt/old/below rw,relatime - ext4 g rw
15 11 8:1 /etc /host/etc ro,relatime - ext4 d rw
";

    #[test]
    fn the_ids_of_copies_are_those_of_mounts_that_the_host_has() {
        let container = with_unique_ids(GONE);
        let below = MountsBelow::of(&container, MountId(11)).unwrap();
        let places = (Path::new("/"), Path::new("/host"));
        assert_eq!(below.ids_of_copies(places, &table(HOST)), [112]);
        assert!(!below.is_empty());
        let proc = MountsBelow::of(&container, MountId(12)).unwrap();
        assert!(proc.is_empty());
        assert!(MountsBelow::of(&container, MountId(99)).is_none());
    }

    #[test]
    fn a_gone_mount_is_a_copy_if_the_create_made_it_and_nothing_else_can_have() {
        let container = with_unique_ids(GONE);
        let below = MountsBelow::of(&container, MountId(11)).unwrap();
        let device = Device { major: 8, minor: 1 };
        let bind = |destination: &str| HostRootBind {
            source: "/".into(),
            destination: destination.into(),
            current: FilePlace {
                device,
                path: "/".into(),
            },
            pinning: Pinning {
                bind: true,
                rootfs: false,
                private_mount: None,
                kept: None,
            },
        };
        let gone = |bind: &HostRootBind, mounts_before, spec: &str| {
            let makers = MountMakers::from_spec(spec.as_bytes()).unwrap();
            let record = ExpectedBinds {
                mounts_before,
                ..ExpectedBinds::default()
            };
            let found = below.gone(bind, &table(HOST), &makers, &record, &place_of)?;
            let described = found.iter().map(|it| (it.mount.id.0, it.is_recorded_copy));
            let mut described: Vec<_> = described.collect();
            described.sort_unstable();
            Ok::<_, Refused>(described)
        };
        let host = bind("/host");
        let unrecorded = Ok(vec![(13, false), (14, false), (15, false)]);
        assert_eq!(gone(&host, None, MAY_MOUNT), unrecorded);
        let recorded = Ok(vec![(13, true), (14, true), (15, false)]);
        assert_eq!(gone(&host, Some(200), MAY_MOUNT), recorded);
        let first = Ok(vec![(13, true), (14, false), (15, false)]);
        assert_eq!(gone(&host, Some(114), MAY_MOUNT), first);
        let hooks = r#"{"hooks":{"prestart":[{}]}}"#;
        assert_eq!(gone(&host, Some(200), hooks), unrecorded);
        let elsewhere = gone(&bind("/elsewhere"), Some(200), MAY_MOUNT).unwrap();
        assert!(elsewhere.iter().all(|(_, is_copy)| !is_copy));
        assert_eq!(elsewhere.len(), 4);
        let spec = r#"{"mounts":[{"destination":"/host/etc/x","type":"bind","source":"/s"}]}"#;
        let refused = gone(&host, Some(200), spec).unwrap_err();
        assert_eq!(refused.reason, RefusedReason::SpecMountsBelow);
    }
}

#[cfg(test)]
mod interrupted_tests {
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
