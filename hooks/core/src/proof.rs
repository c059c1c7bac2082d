//! The proof that a runtime mounted what the spec says.
//!
//! Before the runtime runs, the guard records what the kernel will show for each bind
//! ([`ExpectedBinds`], a file beside the bundle). After the create, the container's mount table is
//! compared with the record ([`Comparison`]). A runtime can mount something else: crun 1.29 on Linux
//! 7.0 can bind its own root filesystem in place of the host's (containers/crun#2262), and a hostile
//! process can race any runtime.
//!
//! The record alone decides: a program that changes config.json after the admission changes no
//! expectation. An image can have symlinks on the way to a destination. If nothing is mounted at the
//! literal destination, a walk through the container's root finds the place.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::evidence::FilePlace;
use crate::kubelet::{DATA_LINK, TimestampDirectory};
use crate::mount_table::{Device, MountAttributes, MountEntry, MountId, Propagation};
use crate::spec::{Bind, RequestedPropagation, RootfsPropagation};

/// The file of a bundle with the [`ExpectedBinds`].
pub const EXPECTED_FILE: &str = "bindguard-binds.json";

/// Limit of places, and of mounts, of later refreshes that are kept for a bind.
const MAX_REFRESHED: usize = 8;

/// Limit of mounts of later refreshes that are kept for all binds.
const MAX_REFRESHED_MOUNTS: usize = 1024;

/// The mounts that the kernel will show for the binds of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedBinds {
    /// The binds whose source is known.
    pub binds: Vec<ExpectedBind>,
    /// All entries of the admitted spec's `mounts`, in their order: a later entry covers earlier
    /// entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<AdmittedEntry>,
    /// `linux.maskedPaths`, which the runtime covers after all mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked: Vec<PathBuf>,
    /// True if policy refuses a container with a difference. A later change of the spec's
    /// annotations changes no policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses: Option<bool>,
    /// The admitted config.json. Another version has to be read for entries that were added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<SpecVersion>,
    /// The mounts of the create have unique ids below this number; the container's own mounts have
    /// greater ids. Written after the create; `None` before Linux 6.8.
    ///
    /// An id for each bind would miss the mounts below a recursive bind. The ids of another mount
    /// namespace also cost a listmount(2) of that namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounts_before: Option<u64>,
    /// The unique ids of mounts below a bind that refreshes have attached since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refreshed_mounts: Vec<u64>,
}

/// An entry of the admitted spec's `mounts`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmittedEntry {
    /// The path in the container.
    #[serde(rename = "to")]
    pub destination: PathBuf,
    /// The source of a bind, after the guard's edits.
    #[serde(rename = "from", default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PathBuf>,
}

/// A version of a file. A program that writes the file changes the time, which no program can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecVersion {
    /// The number of the inode.
    pub inode: u64,
    /// The size in bytes.
    pub size: u64,
    /// The time of the last change, in seconds since 1970 and nanoseconds.
    pub changed: (i64, i64),
}

/// The mount that the kernel will show for a bind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedBind {
    /// The bind's position in the spec's `mounts`.
    pub bind: usize,
    /// The path in the container.
    pub destination: PathBuf,
    /// The device of the source's filesystem.
    pub device: Device,
    /// The path of the source in that filesystem.
    pub root: PathBuf,
    /// The type of that filesystem.
    pub fs_type: String,
    /// The path of the source on the host, if a symlink leads to the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<PathBuf>,
    /// The number of the source's inode, if no server has to answer. A different number later shows
    /// that the source's file was replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// The sources that refreshes of the running container have attached since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refreshed: Vec<FilePlace>,
    /// The permissions that the spec denies.
    pub denied: MountAttributes,
    /// The propagation that the spec permits.
    pub propagation: ExpectedPropagation,
}

/// The propagation that a mount of the new container may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpectedPropagation {
    /// Any: the spec requests shared mounts, or nothing.
    Any,
    /// The mount must not send mounts to the host.
    NoPeer,
    /// The mount must neither send nor receive mounts.
    Private,
    /// As [`Self::NoPeer`], and the mount must receive the host's umounts.
    Slave,
}

impl ExpectedBinds {
    /// True if the create or a refresh made this mount. False if that is not known.
    pub fn has_made(&self, mount: &MountEntry) -> bool {
        mount.unique_id.is_some_and(|id| {
            self.mounts_before.is_some_and(|limit| id < limit)
                || self.refreshed_mounts.contains(&id)
        })
    }

    /// Adds mounts that a refresh has attached. Keeps the newest mounts.
    pub fn add_refreshed_mounts(&mut self, ids: Vec<u64>) {
        self.refreshed_mounts.extend(ids);
        let mounts = &mut self.refreshed_mounts;
        mounts.drain(..mounts.len().saturating_sub(MAX_REFRESHED_MOUNTS));
    }
}

impl ExpectedBind {
    /// The expectation for a bind whose source is `path` on the mount `source`. `None` if the
    /// kernel will not show the source by a path: a deleted file, a file outside of the mount's
    /// root, or a server's directory that the mount's source names instead of the root.
    pub fn new(
        bind: &Bind<'_>,
        source: &MountEntry,
        path: &Path,
        propagation: ExpectedPropagation,
    ) -> Option<Self> {
        Some(Self {
            bind: bind.index,
            destination: bind.destination().to_owned(),
            device: source.device,
            root: shown_root(source, path)?,
            fs_type: source.fs_type.0.clone(),
            resolved: None,
            inode: None,
            refreshed: Vec::new(),
            denied: bind.denied,
            propagation,
        })
    }

    /// The same expectation for a source that is now `path` on the mount `source`; as
    /// [`Self::new`].
    pub fn moved_to(&self, source: &MountEntry, path: &Path) -> Option<Self> {
        Some(Self {
            device: source.device,
            root: shown_root(source, path)?,
            fs_type: source.fs_type.0.clone(),
            ..self.clone()
        })
    }

    /// True if symlinks lead to the same path as in the `other` expectation for the same bind. The
    /// link `..data` of a volume may lead to the payload of another time.
    pub fn has_same_way(&self, other: &Self) -> bool {
        match (&self.resolved, &other.resolved) {
            (Some(way), Some(other)) => way
                .iter()
                .map(without_time)
                .eq(other.iter().map(without_time)),
            (way, other) => way == other,
        }
    }

    /// The place at the create, and the places of later refreshes. A mount of this bind shows a
    /// place of this list.
    pub fn places(&self) -> Vec<FilePlace> {
        let mut places = vec![FilePlace {
            device: self.device,
            path: self.root.clone(),
        }];
        places.extend_from_slice(&self.refreshed);
        places
    }

    /// Adds the place that a refresh attaches next, after the place that the container's mount shows
    /// until then: an interrupted refresh leaves that mount. Keeps the newest places. Returns true if
    /// the places changed.
    pub fn add_refreshed(&mut self, shown: FilePlace, attached: FilePlace) -> bool {
        if shown == attached && self.places().contains(&attached) {
            return false;
        }
        add_newest(&mut self.refreshed, shown);
        add_newest(&mut self.refreshed, attached);
        true
    }

    /// Compares the mount that the container sees at the destination.
    fn difference(&self, mount: &MountEntry) -> Option<Difference> {
        if !self.is_shown_by(mount) {
            return Some(Difference::OtherSource {
                root: mount.root.display_name(),
                fs_type: mount.fs_type.0.clone(),
                device: mount.device.to_string(),
            });
        }
        let missing = self.denied.denied_only_here(mount.attributes);
        if !missing.is_empty() {
            return Some(Difference::Permits(missing));
        }
        let Propagation {
            peer_group, master, ..
        } = mount.propagation;
        match self.propagation {
            ExpectedPropagation::Any => None,
            _ if peer_group.is_some() => Some(Difference::Propagates),
            ExpectedPropagation::NoPeer => None,
            ExpectedPropagation::Private => master.map(|_| Difference::Propagates),
            ExpectedPropagation::Slave if master.is_none() => Some(Difference::WithoutMaster),
            ExpectedPropagation::Slave => None,
        }
    }

    /// True if the mount shows the bind's source. A root that was deleted since is still the
    /// source.
    fn is_shown_by(&self, mount: &MountEntry) -> bool {
        // statmount(2) reports the subtype of a FUSE filesystem since Linux 6.13.
        let has_lost_subtype = mount.fs_type.0 == "fuse" && self.fs_type.starts_with("fuse.");
        mount.device == self.device
            && mount.root.path == self.root
            && (mount.fs_type.0 == self.fs_type || has_lost_subtype)
    }
}

/// Keeps the newest items, which a refresh has attached.
pub(crate) fn add_newest<T: PartialEq>(list: &mut Vec<T>, newest: T) {
    list.retain(|known| *known != newest);
    list.push(newest);
    let excess = list.len().saturating_sub(MAX_REFRESHED);
    list.drain(..excess);
}

fn shown_root(source: &MountEntry, path: &Path) -> Option<PathBuf> {
    let root = source.place_in_filesystem(path)?;
    let is_written_as_text = root.to_str().is_some() && !source.fs_type.has_root_in_source();
    is_written_as_text.then_some(root)
}

/// The name of a folder on a way; `..data` for all payloads of a volume.
fn without_time(name: &OsStr) -> &OsStr {
    match TimestampDirectory::from_name(name) {
        Some(_) => OsStr::new(DATA_LINK),
        None => name,
    }
}

impl ExpectedPropagation {
    /// The propagation for a bind with this request. With a shared root filesystem, runc makes all
    /// mounts shared afterwards.
    pub fn of_request(request: RequestedPropagation, rootfs: &RootfsPropagation) -> Self {
        match request {
            _ if rootfs.is_shared() => Self::Any,
            RequestedPropagation::Shared | RequestedPropagation::Nothing => Self::Any,
            RequestedPropagation::Private | RequestedPropagation::Unbindable => Self::Private,
            RequestedPropagation::Slave | RequestedPropagation::RecursiveSlave => Self::NoPeer,
        }
    }
}

/// A difference between a bind of the spec and the mounts of the new container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// The container sees no mount at the destination, or too few.
    #[error("nothing is mounted at its destination, or another mount hides its mount")]
    NotMounted,
    /// Another file or directory is mounted at the destination.
    #[error("its destination shows {root} of the {fs_type} filesystem {device}")]
    OtherSource {
        /// The root of the mount at the destination, as the kernel prints it.
        root: String,
        /// That mount's filesystem type.
        fs_type: String,
        /// That mount's device.
        device: String,
    },
    /// The mount permits what the spec denies.
    #[error("its mount in the container is not {0}")]
    Permits(MountAttributes),
    /// The mount sends or receives more mounts than the spec requests.
    #[error("its mount in the container propagates mounts further than the spec says")]
    Propagates,
    /// A host-root bind does not receive the host's umounts.
    #[error("its mount in the container has no master: the host's umounts do not reach it")]
    WithoutMaster,
}

// Compares a container's mount table with the expected binds: the mount that the container sees at
// each destination must be the mount that the spec puts there.
//
// The spec's entries form a stack: a later entry at the same place, or at a folder above, covers
// an earlier bind. The table forms a tree: the parents say which mount is visible at a place, the
// order of the lines does not.

/// A comparison with the mounts of a container, which arrive singly.
#[derive(Debug)]
pub struct Comparison<'e> {
    /// The entries of the spec, in their order.
    entries: Vec<Entry<'e>>,
    /// The places that the runtime covers after all mounts.
    masked: Vec<PathBuf>,
    /// The mounts at or above the place of a bind.
    mounts: Vec<MountEntry>,
    /// False if the table has neither a `/proc` nor a mount at the place of a bind: a process of a
    /// sandbox, as Kata's, has none of the spec's mounts.
    pub is_of_container: bool,
}

/// An entry of the spec's `mounts`.
#[derive(Debug, Default)]
struct Entry<'e> {
    /// The destination, in the kernel's way to print a path.
    place: PathBuf,
    /// The expectation; `None` for an entry that is no bind, and for a bind of unknown source.
    bind: Option<&'e ExpectedBind>,
}

impl<'e> Comparison<'e> {
    /// Starts with no mount. Each destination is taken literally, as if the image had no symlinks.
    pub fn new(expected: &'e ExpectedBinds) -> Self {
        Self::at_places(expected, &HashMap::new())
    }

    /// Starts with no mount. `places` has the places of entries whose destination leads elsewhere,
    /// and after the entries those of the masked paths.
    pub fn at_places(expected: &'e ExpectedBinds, places: &HashMap<usize, PathBuf>) -> Self {
        let mut masked = Vec::with_capacity(expected.masked.len());
        for (index, path) in expected.masked.iter().enumerate() {
            let place = places.get(&(expected.entries.len() + index));
            masked.push(as_printed(place.unwrap_or(path)));
        }
        let mut entries = Vec::with_capacity(expected.entries.len());
        for (index, entry) in expected.entries.iter().enumerate() {
            let mut place = places.get(&index).unwrap_or(&entry.destination).clone();
            if !place.as_os_str().is_empty() {
                place = as_printed(&place);
            }
            entries.push(Entry { place, bind: None });
        }
        for bind in &expected.binds {
            // The record of an earlier version has no entries.
            if entries.len() <= bind.bind {
                entries.resize_with(bind.bind + 1, Entry::default);
            }
            let entry = &mut entries[bind.bind];
            if entry.place.as_os_str().is_empty() {
                let place = places.get(&bind.bind).unwrap_or(&bind.destination);
                entry.place = as_printed(place);
            }
            entry.bind = Some(bind);
        }
        Self {
            entries,
            masked,
            mounts: Vec::new(),
            is_of_container: false,
        }
    }

    /// Adds the next mount of the table.
    pub fn add(&mut self, mount: &MountEntry) {
        let point = mount.mount_point.as_os_str().as_bytes();
        self.is_of_container |= point == b"/proc";
        let mut is_on_the_way = false;
        for entry in &self.entries {
            if entry.bind.is_some() && is_at_or_above(point, &entry.place) {
                is_on_the_way = true;
                self.is_of_container |= point == entry.place.as_os_str().as_bytes();
            }
        }
        if is_on_the_way {
            self.mounts.push(mount.clone());
        }
    }

    pub fn differences(self) -> Vec<(&'e ExpectedBind, Difference)> {
        let tree = by_parent(&self.mounts);
        let mut at: HashMap<&OsStr, Vec<usize>> = HashMap::new();
        for (index, entry) in self.entries.iter().enumerate() {
            at.entry(entry.place.as_os_str()).or_default().push(index);
        }
        let mut found = Vec::new();
        for (place, indices) in &at {
            let place = Path::new(place);
            if self.masked.iter().any(|masked| place.starts_with(masked)) {
                continue;
            }
            // An entry at a folder above hides all earlier entries.
            let mut first_seen = 0;
            for above in place.ancestors().skip(1) {
                if let Some(above) = at.get(above.as_os_str()).and_then(|it| it.last()) {
                    first_seen = first_seen.max(above + 1);
                }
            }
            let indices = indices.iter().filter(|index| **index >= first_seen);
            let binds: Vec<_> = indices.map(|index| self.entries[*index].bind).collect();
            if binds.iter().any(Option::is_some) {
                compare_stacks(&binds, &stack_at(&tree, place), &mut found);
            }
        }
        found.sort_by_key(|(bind, _)| bind.bind);
        found
    }
}

/// Compares the entries at a place with the mounts there, both from the lowest. The container sees
/// the topmost mount. The mounts below must be there: a mount proves a single bind. Further mounts
/// between are no difference: the runtime binds a read-only path over itself.
fn compare_stacks<'e>(
    binds: &[Option<&'e ExpectedBind>],
    stack: &[&MountEntry],
    found: &mut Vec<(&'e ExpectedBind, Difference)>,
) {
    let mut below = stack.len().saturating_sub(1);
    for (depth, bind) in binds.iter().rev().enumerate() {
        let Some(bind) = bind else { continue };
        let difference = if depth == 0 {
            match stack.last() {
                Some(topmost) => bind.difference(topmost),
                None => Some(Difference::NotMounted),
            }
        } else if let Some(mount) = stack[..below].iter().rposition(|it| bind.is_shown_by(it)) {
            below = mount;
            None
        } else {
            Some(Difference::NotMounted)
        };
        if let Some(difference) = difference {
            found.push((bind, difference));
        }
    }
}

/// The mounts of a table by their parents; without one, the roots.
type ByParent<'m> = HashMap<Option<MountId>, Vec<&'m MountEntry>>;

fn by_parent(mounts: &[MountEntry]) -> ByParent<'_> {
    let ids: HashSet<MountId> = mounts.iter().map(|mount| mount.id).collect();
    let mut tree = ByParent::new();
    for mount in mounts {
        // The parent of the root is in no table.
        let has_parent = mount.parent != mount.id && ids.contains(&mount.parent);
        let siblings = tree.entry(has_parent.then_some(mount.parent));
        siblings.or_default().push(mount);
    }
    tree
}

/// The mounts at a place that the container can see or that lie below such a mount, the lowest
/// first. Mirrors the kernel's look-up: path_resolution(7).
fn stack_at<'m>(tree: &ByParent<'m>, place: &Path) -> Vec<&'m MountEntry> {
    let (mut stack, mut parent) = (Vec::new(), None);
    // In a table that was read while it changed, parents can form a circle.
    for _ in 0..=tree.len() {
        // The look-up meets the mount nearest to the root first; the newest mount covers others.
        let mut met: Option<&MountEntry> = None;
        for mount in tree.get(&parent).into_iter().flatten() {
            let point = mount.mount_point.as_os_str();
            if is_at_or_above(point.as_bytes(), place)
                && met.is_none_or(|it| point.len() <= it.mount_point.as_os_str().len())
            {
                met = Some(mount);
            }
        }
        let Some(mount) = met else { break };
        if mount.mount_point.as_os_str() == place.as_os_str() {
            stack.push(mount);
        }
        parent = Some(mount.id);
    }
    stack
}

/// A destination as the kernel prints a mount point. A runtime takes a relative path from the root.
fn as_printed(destination: &Path) -> PathBuf {
    let names = destination.components();
    let names = names.filter(|name| *name != Component::CurDir);
    Path::new("/").components().chain(names).collect()
}

/// Compares bytes: `Path` compares component by component, which costs 0.1 ms for 30 binds and 100
/// mounts.
fn is_at_or_above(point: &[u8], place: &Path) -> bool {
    let place = place.as_os_str().as_bytes();
    match place.strip_prefix(point) {
        Some(rest) => rest.is_empty() || rest[0] == b'/' || point == b"/",
        None => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;
    use crate::mount_table::MountTable;
    use crate::spec::SpecView;

    fn place(minor: u32) -> FilePlace {
        FilePlace {
            device: Device { major: 0, minor },
            path: "/".into(),
        }
    }

    fn expected() -> ExpectedBind {
        ExpectedBind {
            bind: 0,
            destination: "/data".into(),
            device: place(0).device,
            root: "/".into(),
            fs_type: "tmpfs".into(),
            resolved: None,
            inode: None,
            refreshed: Vec::new(),
            denied: MountAttributes::from_bits(0),
            propagation: ExpectedPropagation::Any,
        }
    }

    /// The kernel gives the number of a device that is gone to the next device.
    #[test]
    fn the_shown_place_stays_recorded_while_numbers_of_devices_come_again() {
        let mut bind = expected();
        let mut shown = place(0);
        for minor in [1, 2, 3, 4, 5, 6, 7, 8, 1, 9, 1, 10, 2] {
            bind.add_refreshed(shown.clone(), place(minor));
            let places = bind.places();
            assert!(places.contains(&shown), "{shown:?} {places:?}");
            assert!(places.contains(&place(minor)), "{minor} {places:?}");
            shown = place(minor);
        }
        for minor in 11..30 {
            bind.add_refreshed(shown.clone(), place(minor));
        }
        assert!(bind.places().contains(&shown), "no refresh was finished");
        assert_eq!(bind.refreshed.len(), MAX_REFRESHED);
    }

    #[test]
    fn a_refresh_that_changes_no_place_is_not_recorded() {
        let mut bind = expected();
        assert!(!bind.add_refreshed(place(0), place(0)));
        assert!(bind.add_refreshed(place(0), place(1)));
        assert!(bind.add_refreshed(place(1), place(0)));
        assert!(!bind.add_refreshed(place(1), place(1)));
        assert!(bind.add_refreshed(place(2), place(2)), "it was not known");
        assert_eq!(bind.refreshed, [place(1), place(0), place(2)]);
    }

    #[test]
    fn a_way_may_lead_to_a_later_payload_and_nowhere_else() {
        let is_same = |one: Option<&str>, other: Option<&str>| {
            let [one, other] = [one, other].map(|way| ExpectedBind {
                resolved: way.map(PathBuf::from),
                ..expected()
            });
            assert_eq!(one.has_same_way(&other), other.has_same_way(&one));
            one.has_same_way(&other)
        };
        let first = Some("/conf/..2026_11_21_05_10_00.1/app");
        assert!(is_same(None, None));
        assert!(!is_same(first, None));
        assert!(is_same(first, first));
        assert!(is_same(first, Some("/conf/..2026_11_21_05_10_01.2/app")));
        assert!(!is_same(first, Some("/conf/..2026_11_21_05_10_01.2/other")));
        assert!(!is_same(first, Some("/conf/app")));
        assert!(!is_same(Some("/a"), Some("/b")));
    }

    #[test]
    fn a_moved_source_keeps_the_bind() {
        let mount = |line: &str| {
            let table = MountTable::from_mountinfo(line.as_bytes()).unwrap();
            table.entries()[0].clone()
        };
        let disk = mount("2 1 8:3 /disk /mnt rw - xfs d rw\n");
        let moved = ExpectedBind {
            device: disk.device,
            root: "/disk/file".into(),
            fs_type: "xfs".into(),
            ..expected()
        };
        assert_eq!(
            expected().moved_to(&disk, "/mnt/file".as_ref()),
            Some(moved)
        );
        assert_eq!(expected().moved_to(&disk, "/other".as_ref()), None);
        let server = mount("2 1 0:50 / /mnt rw - nfs4 server:/x rw\n");
        assert_eq!(expected().moved_to(&server, "/mnt/file".as_ref()), None);
    }

    #[test]
    fn only_fuse_may_lose_its_subtype() {
        for (recorded, shown, is_same) in [
            ("fuse.sshfs", "fuse.sshfs", true),
            ("fuse.sshfs", "fuse", true),
            ("fuse.sshfs", "ext4", false),
            ("fuse.sshfs", "fuse.other", false),
            ("ext4", "fuse", false),
        ] {
            let bind = ExpectedBind {
                fs_type: recorded.to_owned(),
                ..expected()
            };
            let line = format!("2 1 0:0 / /data rw - {shown} d rw\n");
            let table = MountTable::from_mountinfo(line.as_bytes()).unwrap();
            let found = bind.is_shown_by(&table.entries()[0]);
            assert_eq!(found, is_same, "{recorded} {shown}");
        }
    }

    #[test]
    fn the_request_decides_the_propagation_unless_the_root_is_shared() {
        use RequestedPropagation::{Nothing, Private, RecursiveSlave, Shared, Slave, Unbindable};
        let root = |words: &str| {
            let spec = format!(r#"{{"linux":{{"rootfsPropagation":"{words}"}}}}"#);
            let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
            spec.rootfs_propagation.clone()
        };
        for (request, expected) in [
            (Shared, ExpectedPropagation::Any),
            (Nothing, ExpectedPropagation::Any),
            (Private, ExpectedPropagation::Private),
            (Unbindable, ExpectedPropagation::Private),
            (Slave, ExpectedPropagation::NoPeer),
            (RecursiveSlave, ExpectedPropagation::NoPeer),
        ] {
            let of = |words| ExpectedPropagation::of_request(request, &root(words));
            assert_eq!(of("rslave"), expected, "{request:?}");
            assert_eq!(of("rshared"), ExpectedPropagation::Any, "{request:?}");
        }
    }
}
