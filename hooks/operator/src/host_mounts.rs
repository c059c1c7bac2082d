//! The host's mounts, and their copies in another mount namespace.
//!
//! A mount of another namespace is pinned if all of this is true (docs/decisions/0025):
//!
//! ```text
//! it is on a copy of a host's mount        mounts on the namespace's own root are the container's
//! the host shows its filesystem nowhere    a filesystem that is still mounted is in use anyway
//! no umount of the host reaches it         the mount below it is private
//! no runtime or container made it there    /proc, /sys and /dev, root filesystems, volumes
//! ```

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable, Propagation};
use bindguard_core::paths::below;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;

/// Limit of places that are named for a namespace. A container can make thousands of such mounts.
const MAX_PLACES: usize = 1000;

/// The mounts of a device with their positions in the table, by root.
type MountsByRoot<'t> = HashMap<&'t Path, Vec<(usize, &'t MountEntry)>>;

/// The reader's own mounts.
pub(crate) struct HostMounts<'t> {
    /// A look-up for each mount of a container, not a search: the container decides how many there
    /// are.
    by_root: HashMap<Device, MountsByRoot<'t>>,
    peer_groups: HashSet<u32>,
    places: &'t Places,
}

impl<'t> HostMounts<'t> {
    pub(crate) fn of(own: &'t MountTable, places: &'t Places) -> Self {
        let peer_groups = own
            .entries()
            .iter()
            .filter_map(|entry| entry.propagation.peer_group)
            .collect();
        let mut by_root: HashMap<Device, MountsByRoot<'t>> = HashMap::new();
        for (position, entry) in own.entries().iter().enumerate() {
            let of_device = by_root.entry(entry.device).or_default();
            of_device
                .entry(entry.root.path.as_path())
                .or_default()
                .push((position, entry));
        }
        Self {
            by_root,
            peer_groups,
            places,
        }
    }

    /// The places on the host of the mounts that a namespace pins, each once; at most
    /// [`MAX_PLACES`].
    pub(crate) fn pinned_by(&self, table: &MountTable) -> Vec<PathBuf> {
        let index = MountIndex::of(table);
        let places = table
            .entries()
            .iter()
            .filter_map(|entry| self.place_of_pinned(entry, &index));
        let mut found: Vec<_> = places.take(MAX_PLACES).collect();
        found.sort();
        found.dedup();
        found
    }

    /// The host-root binds of a container, each with whether the host's mounts and umounts reach it.
    pub(crate) fn host_root_binds<'c>(
        &self,
        table: &'c MountTable,
        scope: Scope,
    ) -> Vec<(&'c MountEntry, bool)> {
        let index = MountIndex::of(table);
        let is_on_its_root = |entry: &&MountEntry| {
            let parent = index
                .parent(entry)
                .map(|parent| parent.mount_point.as_path());
            entry.mount_point != Path::new("/") && parent == Some(Path::new("/"))
        };
        let is_host_root = |entry: &&MountEntry| {
            self.paths_of(entry, &entry.root.path)
                .any(|(_, path)| self.places.holds_runtime_mounts(&path, scope))
        };
        let binds = table
            .entries()
            .iter()
            .filter(is_on_its_root)
            .filter(is_host_root);
        binds
            .map(|entry| (entry, self.unmounts_below(&entry.propagation)))
            .collect()
    }

    /// The place of a pinned mount on the host; `None`: it is not pinned.
    fn place_of_pinned(&self, entry: &MountEntry, table: &MountIndex<'_>) -> Option<PathBuf> {
        if self.shows(entry) {
            return None;
        }
        let parent = table.parent(entry)?;
        let root = table.stack_at(Path::new("/")).last()?;
        // The host also has a container's root mounted. Mounts in it, or in a copy of it, are the
        // container's.
        let is_its_own =
            parent.device == root.device && parent.root.path.starts_with(&root.root.path);
        if is_its_own || self.unmounts_below(&parent.propagation) {
            return None;
        }
        let place = parent.place_in_filesystem(&entry.mount_point)?;
        let (mount, path) = self.paths_of(parent, &place).next()?;
        let mut starts = self.paths_of(parent, &parent.root.path);
        let is_made_there = is_of_the_kernel(&path)
            || self.is_root_of_a_container(mount)
            || starts.any(|(_, start)| self.places.lies_in_volume(&start));
        (!is_made_there).then_some(path)
    }

    /// True if host umounts reach mounts on `parent`: a umount propagates from a peer or a master
    /// of the parent mount.
    fn unmounts_below(&self, parent: &Propagation) -> bool {
        parent.master.is_some()
            || parent
                .peer_group
                .is_some_and(|group| self.peer_groups.contains(&group))
    }

    /// True if the host has the same filesystem mounted anywhere. The files of all namespaces are
    /// on the same device.
    fn shows(&self, entry: &MountEntry) -> bool {
        if entry.fs_type.0 != "nsfs" {
            return self.by_root.contains_key(&entry.device);
        }
        self.with_root(entry.device, &entry.root.path)
            .iter()
            .any(|(_, mount)| mount.root == entry.root)
    }

    fn with_root(&self, device: Device, root: &Path) -> &[(usize, &'t MountEntry)] {
        self.by_root
            .get(&device)
            .and_then(|roots| roots.get(root))
            .map_or(&[], Vec::as_slice)
    }

    /// The host's mounts that show a place in the filesystem of `of`, and the paths of that place,
    /// in the order of the table.
    fn paths_of(
        &self,
        of: &MountEntry,
        place: &Path,
    ) -> impl Iterator<Item = (&'t MountEntry, PathBuf)> {
        let showing = place
            .ancestors()
            .flat_map(|above| self.with_root(of.device, above));
        let mut mounts: Vec<(usize, &'t MountEntry)> = showing.copied().collect();
        mounts.sort_by_key(|(position, _)| *position);
        let path = |(_, mount): (usize, &'t MountEntry)| {
            let below = below(place, &mount.root.path)?;
            // Joining an empty path would leave a slash at the end.
            let is_root = below.as_os_str().is_empty();
            Some((
                mount,
                if is_root {
                    mount.mount_point.clone()
                } else {
                    mount.mount_point.join(below)
                },
            ))
        };
        mounts
            .into_iter()
            .filter_map(path)
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// True for a container's root. The runtime mounts on it before the container's init makes it
    /// the root of its namespace.
    fn is_root_of_a_container(&self, mount: &MountEntry) -> bool {
        let is_named = mount
            .mount_point
            .file_name()
            .is_some_and(|name| name == "rootfs" || name == "merged");
        let is_overlay = matches!(mount.fs_type.0.as_str(), "overlay" | "fuse.fuse-overlayfs");
        (is_named || is_overlay) && self.places.is_mounted_below(&mount.mount_point)
    }
}

/// True for a kernel directory. Runtimes mount there for containers, also in a copy of the host's;
/// no host mount is busy there.
/// True for a path of the mounts of the kernel and of container runtimes, which every namespace
/// needs.
pub(crate) fn is_of_the_kernel(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"]
        .iter()
        .any(|folder| path.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 0:20 / /run rw shared:2 - tmpfs tmpfs rw\n";

    /// A container with a bind of the host's `/`, which includes `/run`, and with a file of the
    /// kubelet's.
    const CONTAINER: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rwTAGS - ext4 /dev/sda1 rw\n\
        13 12 0:20 / /host/run rw - tmpfs tmpfs rw\n14 11 8:1 /var/lib/kubelet/pods/u/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n";

    fn binds(container: &str) -> Vec<bool> {
        let table = |lines: &str| MountTable::from_mountinfo(lines.as_bytes()).unwrap();
        let (host, places, container) = (table(HOST), Places::default(), table(container));
        let host = HostMounts::of(&host, &places);
        let found = host.host_root_binds(&container, Scope::default());
        found
            .into_iter()
            .map(|(_, is_reached)| is_reached)
            .collect()
    }

    #[test]
    fn a_host_root_bind_is_counted_once_and_with_its_propagation() {
        for (tags, expected) in [
            ("", false),
            (" master:1", true),
            (" shared:1", true),
            (" shared:9", false),
        ] {
            assert_eq!(
                binds(&CONTAINER.replace("TAGS", tags)),
                [expected],
                "{tags:?}"
            );
        }
        let runtime = "11 10 0:50 / / rw - overlay overlay rw\n12 11 0:20 /containerd /runtime rw - tmpfs tmpfs rw\n";
        assert_eq!(
            binds(runtime),
            [false],
            "a directory in which a runtime mounts is one, too"
        );
        assert!(
            binds("11 10 8:1 / / rw - ext4 /dev/sda1 rw\n").is_empty(),
            "the root itself is no bind"
        );
    }
}
