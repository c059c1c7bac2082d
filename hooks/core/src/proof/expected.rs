//! The record beside a bundle: the mount that the kernel will show for each bind.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::evidence::FilePlace;
use crate::kubelet::{DATA_LINK, TimestampDirectory};
use crate::mount_table::{Device, MountAttributes, MountEntry};
use crate::spec::{Bind, RequestedPropagation, RootfsPropagation};

/// Limit of places of later refreshes that are kept for a bind.
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
        for place in [shown, attached] {
            self.refreshed.retain(|known| *known != place);
            self.refreshed.push(place);
        }
        let excess = self.refreshed.len().saturating_sub(MAX_REFRESHED);
        self.refreshed.drain(..excess);
        true
    }

    /// True if the mount shows the bind's source. A root that was deleted since is still the
    /// source.
    pub(super) fn is_shown_by(&self, mount: &MountEntry) -> bool {
        // statmount(2) reports the subtype of a FUSE filesystem since Linux 6.13.
        let has_lost_subtype = mount.fs_type.0 == "fuse" && self.fs_type.starts_with("fuse.");
        mount.device == self.device
            && mount.root.path == self.root
            && (mount.fs_type.0 == self.fs_type || has_lost_subtype)
    }
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
            spec.rootfs_propagation().clone()
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
