//! The roots of this node's kubelets, as far as they answer.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use anyhow::anyhow;
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable, Propagation};
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::text::{below, join};
use bindguard_guard::{Probes, in_real_folder};
use bindguard_sys::Handle;
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// Time limit for a kubelet's directories when an operator waits.
const PROBE_TIMEOUT: Duration = Duration::from_millis(700);

/// The roots of this node's kubelets that exist and answer, each directory once.
#[derive(Debug, Default)]
pub struct Roots {
    pub known: Vec<Root>,
    /// The reasons why other roots are not inspected.
    pub problems: Vec<String>,
}

#[derive(Debug)]
pub struct Root {
    /// The first name that the places have for it.
    pub named: PathBuf,
    /// Its name in the mount table.
    pub real: PathBuf,
}

impl Roots {
    /// Probes each root in a separate process.
    pub fn of(places: &Places) -> Self {
        let names = places.kubelet_roots.clone();
        let mut roots = Self::default();
        let Ok(answers) = probe_side_by_side(&names, PROBE_TIMEOUT) else {
            // If no process can be started, the configured names are used unchecked.
            let unchecked = names.into_iter().map(|named| Root {
                real: named.clone(),
                named,
            });
            roots.known.extend(unchecked);
            return roots;
        };
        let mut seen = Vec::new();
        for (named, answer) in names.into_iter().zip(answers) {
            match answer {
                Answer::Reached(real) => {
                    // A bind, as on minikube, is another name as much as a symlink is.
                    let identity = Handle::of(&real).and_then(|handle| handle.identity()).ok();
                    let is_known = roots.known.iter().any(|known| known.real == real)
                        || identity.is_some() && seen.contains(&identity);
                    if !is_known {
                        seen.push(identity);
                        roots.known.push(Root { named, real });
                    }
                }
                Answer::Refused(error) if error.kind() == ErrorKind::NotFound => {}
                Answer::Refused(error) => roots
                    .problems
                    .push(format!("probe {}: {error}", named.display())),
                Answer::Silent(_) | Answer::NotProbed => roots.problems.push(format!(
                    "{} did not answer within {} ms: its pods are not checked",
                    named.display(),
                    PROBE_TIMEOUT.as_millis()
                )),
            }
        }
        roots
    }

    pub fn names(&self) -> impl Iterator<Item = &Path> + Clone {
        self.known.iter().map(|root| root.named.as_path())
    }

    /// The mount table with these names instead of the kernel's.
    pub fn name_mounts(&self, mut table: MountTable) -> MountTable {
        for root in self.known.iter().filter(|root| root.named != root.real) {
            table = table.with_name(&root.real, &root.named);
        }
        table
    }

    /// The subpath at a path, given by any name.
    fn subpath(&self, path: &Path) -> Option<VolumeSubpath> {
        self.known.iter().find_map(|root| {
            let subpath = VolumeSubpath::from_path(path, [root.named.as_path(), &root.real])?;
            Some(subpath.at_root(&root.named))
        })
    }

    /// Why an operator's path was not accepted: the kubelet's directories could not be checked, or
    /// the path is no exact path of a volume-subpath.
    fn not_a_subpath(self, path: &Path) -> anyhow::Error {
        match self.problems.into_iter().next() {
            Some(problem) => anyhow!(problem),
            None => anyhow!(
                "{} is not a volume-subpath below a kubelet root: see [kubelet] roots in config.toml",
                path.display()
            ),
        }
    }
}

/// The kubelet roots that exist and answer, and the reasons why other roots are not inspected.
pub fn kubelets_here(places: &Places) -> (Vec<PathBuf>, Vec<String>) {
    let roots = Roots::of(places);
    (roots.names().map(Path::to_owned).collect(), roots.problems)
}

/// The volume-subpath at a path that is written as the kubelet or the mount table writes it: below
/// a kubelet's root, without symlinks, `..`, `.` or doubled slashes.
///
/// # Errors
/// If the path is no such path, or if the kubelet's directories do not answer.
pub fn exact_subpath(path: &Path, places: &Places) -> anyhow::Result<VolumeSubpath> {
    /// `pods/UID/volume-subpaths/VOLUME/CONTAINER`
    const FOLDERS: usize = 5;
    let roots = Roots::of(places);
    let normal: PathBuf = path.components().collect();
    if normal.as_os_str() == path.as_os_str()
        && let Some(subpath) = roots.subpath(path)
    {
        // The subpath itself may be on a server that does not answer; where it is a symlink, no
        // mount is at its path.
        let mut folders = path.ancestors().skip(1).take(FOLDERS);
        if !folders.any(Path::is_symlink) {
            return Ok(subpath);
        }
    }
    Err(roots.not_a_subpath(path))
}

/// The volume-subpath at an operator's path, given by any name of a kubelet's root.
///
/// # Errors
/// If the path is no volume-subpath, or if the kubelet's directories do not answer.
pub fn named_subpath(path: &Path, places: &Places) -> anyhow::Result<VolumeSubpath> {
    let roots = Roots::of(places);
    let found = roots
        .subpath(path)
        .or_else(|| roots.subpath(&in_real_folder(path, &Probes::for_create())?));
    found.ok_or_else(|| roots.not_a_subpath(path))
}

// Kubelets that bindguard's config does not name.

/// The unknown kubelet roots below which volume-subpaths are mounted: no check covers their pods. A
/// known root that is bound from another folder, as on minikube, has two names.
pub fn other_roots(table: &MountTable, places: &Places) -> BTreeSet<PathBuf> {
    let mut others = BTreeSet::new();
    for path in table.mount_points() {
        // Six names below its root: `pods/<uid>/volume-subpaths/<volume>/<container>/<index>`
        let Some(root) = path.ancestors().nth(6) else {
            continue;
        };
        let is_known = others.contains(root) || places.kubelet_roots().any(|known| known == root);
        if !is_known && VolumeSubpath::from_path(path, [root]).is_some() {
            others.insert(root.to_owned());
        }
    }
    others.retain(|root| {
        let place = place_in(table, root);
        let mut known = places.kubelet_roots();
        place.is_none() || !known.any(|known| place_in(table, known) == place)
    });
    others
}

/// The filesystem and the folder in it that a path shows. A subpath's place is no clue: it has the
/// same file at both names of a root.
pub fn place_in(table: &MountTable, path: &Path) -> Option<(Device, PathBuf)> {
    let mount = table.mount_over(path)?;
    Some((mount.device, mount.place_in_filesystem(path)?))
}

// The host's mounts, and their copies in another mount namespace.
//
// A mount of another namespace is pinned if all of this is true (docs/decisions/0025):
//
// ```text
// it is on a copy of a host's mount        mounts on the namespace's own root are the container's
// the host shows its filesystem nowhere    a filesystem that is still mounted is in use anyway
// no umount of the host reaches it         the mount below it is private
// no runtime or container made it there    /proc, /sys and /dev, root filesystems, volumes
// ```

/// Limit of places that are named for a namespace. A container can make thousands of such mounts.
const MAX_PLACES: usize = 1000;

pub struct HostMounts<'t> {
    /// The mounts with their positions in the table, by device and root. A look-up for each mount of
    /// a container, not a search: the container decides how many there are.
    by_root: HashMap<(Device, &'t Path), Vec<(usize, &'t MountEntry)>>,
    devices: HashSet<Device>,
    peer_groups: HashSet<u32>,
    places: &'t Places,
}

impl<'t> HostMounts<'t> {
    pub fn of(own: &'t MountTable, places: &'t Places) -> Self {
        let mut host = Self {
            by_root: HashMap::new(),
            devices: HashSet::new(),
            peer_groups: HashSet::new(),
            places,
        };
        for (position, entry) in own.entries().iter().enumerate() {
            host.peer_groups.extend(entry.propagation.peer_group);
            host.devices.insert(entry.device);
            let of_root = host.by_root.entry((entry.device, &*entry.root.path));
            of_root.or_default().push((position, entry));
        }
        host
    }

    /// The places on the host of the mounts that a namespace pins, each once; at most
    /// [`MAX_PLACES`].
    pub fn pinned_by(&self, table: &MountTable) -> Vec<PathBuf> {
        let index = MountIndex::of(table);
        let entries = table.entries().iter();
        let places = entries.filter_map(|entry| self.place_of_pinned(entry, &index));
        let mut found: Vec<_> = places.take(MAX_PLACES).collect();
        found.sort();
        found.dedup();
        found
    }

    /// The host-root binds of a container, each with whether the host's mounts and umounts reach it.
    pub fn host_root_binds<'c>(
        &self,
        table: &'c MountTable,
        scope: Scope,
    ) -> Vec<(&'c MountEntry, bool)> {
        let index = MountIndex::of(table);
        let root = Path::new("/");
        let mut binds = Vec::new();
        for entry in table.entries() {
            let parent = index.parent(entry);
            if entry.mount_point == root || parent.is_none_or(|it| it.mount_point != root) {
                continue;
            }
            let paths = self.paths_of(entry, &entry.root.path);
            let mut paths = paths.iter().map(|(_, path)| path);
            if paths.any(|path| self.places.holds_runtime_mounts(path, scope)) {
                binds.push((entry, self.unmounts_below(&entry.propagation)));
            }
        }
        binds
    }

    /// The place of a pinned mount on the host; `None`: it is not pinned.
    fn place_of_pinned(&self, entry: &MountEntry, table: &MountIndex<'_>) -> Option<PathBuf> {
        // The files of all namespaces are on the same device.
        let is_shown = match entry.fs_type.0.as_str() {
            "nsfs" => {
                let mut shown = self.with_root(entry.device, &entry.root.path).iter();
                shown.any(|(_, mount)| mount.root == entry.root)
            }
            _ => self.devices.contains(&entry.device),
        };
        if is_shown {
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
        let (mount, path) = self.paths_of(parent, &place).into_iter().next()?;
        let starts = self.paths_of(parent, &parent.root.path);
        let mut starts = starts.iter();
        let is_made_there = is_of_the_kernel(&path)
            || self.is_root_of_a_container(mount)
            || starts.any(|(_, start)| self.places.lies_in_volume(start));
        (!is_made_there).then_some(path)
    }

    /// True if host umounts reach mounts on `parent`: a umount propagates from a peer or a master
    /// of the parent mount.
    fn unmounts_below(&self, parent: &Propagation) -> bool {
        let group = parent.peer_group;
        parent.master.is_some() || group.is_some_and(|group| self.peer_groups.contains(&group))
    }

    fn with_root<'s>(&'s self, device: Device, root: &'s Path) -> &'s [(usize, &'t MountEntry)] {
        self.by_root.get(&(device, root)).map_or(&[], Vec::as_slice)
    }

    /// The host's mounts that show a place in the filesystem of `of`, and the paths of that place,
    /// in the order of the table.
    fn paths_of(&self, of: &MountEntry, place: &Path) -> Vec<(&'t MountEntry, PathBuf)> {
        let mut mounts = Vec::new();
        for above in place.ancestors() {
            mounts.extend(self.with_root(of.device, above));
        }
        mounts.sort_by_key(|(position, _)| *position);
        let mut paths = Vec::new();
        for (_, mount) in mounts {
            if let Some(below) = below(place, &mount.root.path) {
                paths.push((mount, join(mount.mount_point.clone(), below)));
            }
        }
        paths
    }

    /// True for a container's root. The runtime mounts on it before the container's init makes it
    /// the root of its namespace.
    fn is_root_of_a_container(&self, mount: &MountEntry) -> bool {
        let name = mount.mount_point.file_name();
        let is_named = name.is_some_and(|name| name == "rootfs" || name == "merged");
        let is_overlay = matches!(mount.fs_type.0.as_str(), "overlay" | "fuse.fuse-overlayfs");
        (is_named || is_overlay) && self.places.is_mounted_below(&mount.mount_point)
    }
}

/// True for a kernel directory: every namespace needs its mounts. Runtimes mount there for
/// containers, also in a copy of the host's; no host mount is busy there.
pub fn is_of_the_kernel(path: &Path) -> bool {
    let mut folders = ["/proc", "/sys", "/dev"].iter();
    folders.any(|folder| path.starts_with(folder))
}

/// The device of a block special file; `None` for any other file. Follows symlinks, for example in
/// `/dev/disk`.
///
/// # Errors
/// stat(2)'s.
pub fn block_device(path: &Path) -> io::Result<Option<Device>> {
    let metadata = fs::metadata(path)?;
    let number = metadata.rdev();
    let device = Device {
        major: rustix::fs::major(number),
        minor: rustix::fs::minor(number),
    };
    Ok(metadata.file_type().is_block_device().then_some(device))
}

#[cfg(test)]
mod other_roots_tests {
    use super::*;

    #[test]
    fn only_unconfigured_roots_are_reported() {
        let line = |root: &str| {
            format!("1 0 8:1 /x {root}/pods/u/volume-subpaths/v/c/0 rw - ext4 /dev/sda1 rw\n")
        };
        let text = [
            line("/var/lib/kubelet"),
            line("/data/kubelet"),
            line("/data/kubelet"),
        ]
        .concat();
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let others = other_roots(&table, &Places::default());
        assert_eq!(others, BTreeSet::from([PathBuf::from("/data/kubelet")]));
    }

    /// minikube binds `/var/lib/kubelet` from its disk.
    #[test]
    fn another_name_of_a_known_root_is_no_other_root() {
        let text = "\
267 47 0:46 / /var/lib rw shared:186 - tmpfs v rw
269 47 0:74 / /mnt rw shared:187 - tmpfs d rw
270 267 0:74 /d/kubelet /var/lib/kubelet rw shared:187 - tmpfs d rw
271 270 0:74 /d/kubelet/pods/u/f /var/lib/kubelet/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
280 269 0:74 /d/kubelet/pods/u/f /mnt/d/kubelet/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
281 269 0:74 /d/kubelet/pods/u/f /mnt/d/other/pods/u/volume-subpaths/v/c/0 rw shared:187 - tmpfs d rw
";
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let others = other_roots(&table, &Places::default());
        assert_eq!(others, BTreeSet::from([PathBuf::from("/mnt/d/other")]));
    }
}

#[cfg(test)]
mod host_mounts_tests {
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
