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

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_core::text::{serialize_path, shell_word};
use serde::Serialize;

use crate::kubelet_roots::is_of_the_kernel;
use crate::namespaces::{Checked, HeldBy, NamespaceMounts};
use crate::node::{container_ids, looks_like_an_id, pod_uid};
use crate::pods::{Deletion, PodContainer, Pods, removed_volume};

pub use crate::old_binds::Trial;

/// The mounts whose holders are searched: those at or below a path, or of a device, described in a
/// way that is valid in every namespace.
#[derive(Debug)]
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

// The report of the holders, and of the commands that release the mounts.

/// The holders of the mounts at or below a path; `holders --json` prints this report.
#[derive(Debug, Default, Serialize)]
pub struct HoldersReport {
    #[serde(serialize_with = "serialize_path")]
    pub path: PathBuf,
    /// The mounts there in the reader's own namespace.
    pub mounts: Vec<HeldMount>,
    /// The holders in other mount namespaces.
    pub holders: Vec<Holder>,
    /// Why no command is advised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The number of objects checked.
    pub checked: Checked,
    /// Errors that left the search incomplete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// A mount namespace that has a searched mount.
#[derive(Debug, Default, Serialize)]
pub struct Holder {
    /// The namespace's number.
    pub namespace: u64,
    #[serde(flatten)]
    pub held_by: HeldBy,
    /// The number of processes in it.
    pub processes: usize,
    /// Their container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Their pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The searched mounts in it.
    pub mounts: Vec<HeldMount>,
    /// Commands that would release them.
    pub release: Vec<ReleaseCommand>,
}

/// A mount of a holder.
#[derive(Debug, Serialize)]
pub struct HeldMount {
    /// Its path in that namespace.
    #[serde(serialize_with = "serialize_path")]
    pub mount_point: PathBuf,
    /// The mount's root: a path within the filesystem.
    pub root: String,
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    /// `private`, `slave`, `shared`, `shared,slave` or `unbindable`.
    pub propagation: &'static str,
    /// A umount in the reader's namespace reaches it.
    pub unmount_propagates: bool,
}

impl HeldMount {
    fn of(entry: &MountEntry, unmount_propagates: bool) -> Self {
        let propagation = &entry.propagation;
        let propagation = match (propagation.peer_group, propagation.master) {
            _ if propagation.unbindable => "unbindable",
            (Some(_), Some(_)) => "shared,slave",
            (Some(_), None) => "shared",
            (None, Some(_)) => "slave",
            (None, None) => "private",
        };
        Self {
            mount_point: entry.mount_point.clone(),
            root: entry.root.display_name(),
            fs_type: entry.fs_type.0.clone(),
            device: entry.device.to_string(),
            propagation,
            unmount_propagates,
        }
    }
}

impl HoldersReport {
    /// Finds the holders of the wanted mounts. `own`: the reader's own namespace; `places`: the
    /// directories in which the kubelet and the runtimes mount. `trial` tries commands on a
    /// container. No command is advised for a path whose mounts the node needs.
    pub fn find(
        path: &Path,
        wanted: &MountsToFind,
        own: &MountTable,
        others: &[NamespaceMounts],
        pods: &Pods,
        places: &Places,
        trial: &dyn Fn(&PodContainer) -> Trial,
    ) -> Self {
        let places = &pods
            .with_runtime(places)
            .with_runtimes_at(own.mount_points());
        let mut own = Own {
            path,
            table: own,
            index: MountIndex::of(own),
            here: Vec::new(),
            spread: Spread::default(),
            system: HashSet::new(),
            places,
            others: others.iter().flat_map(|other| &other.table).collect(),
            pods,
            trial,
        };
        for entry in own.table.entries() {
            if entry.mount_point.starts_with(path) {
                own.here.push(entry);
            }
            if own.is_system(&entry.mount_point) {
                own.system.insert((entry.device, &*entry.root.path));
            }
        }
        own.spread = own.spread_of(&own.here);
        let held = |entries: &[&MountEntry], index: &MountIndex<'_>| -> Vec<HeldMount> {
            let is_reached = |entry: &MountEntry| own.spread.reaching(entry, index).is_some();
            let entries = entries.iter();
            entries
                .map(|entry| HeldMount::of(entry, is_reached(entry)))
                .collect()
        };
        let mut report = Self {
            path: path.to_owned(),
            mounts: held(&own.here, &own.index),
            ..Self::default()
        };
        // The same filesystem at another place of the reader's own namespace.
        let mut elsewhere = wanted.among(own.table, &own.index);
        elsewhere.retain(|entry| !entry.mount_point.starts_with(path));
        if !elsewhere.is_empty() {
            report.holders.push(Holder {
                mounts: held(&elsewhere, &own.index),
                release: own.umounts_elsewhere(&elsewhere),
                ..Holder::default()
            });
        }
        for namespace in others {
            let Ok(table) = &namespace.table else {
                report.problems.extend(namespace.unread());
                continue;
            };
            let index = MountIndex::of(table);
            let found = wanted.among(table, &index);
            if !found.is_empty() {
                let mut holder = Holder::of(namespace, pods);
                holder.mounts = held(&found, &index);
                holder.release = own.releases(&holder, namespace, &found, table, &index);
                report.holders.push(holder);
            }
        }
        if own.table.skipped().is_some() {
            let why = "no command is safe while a line of the mount table cannot be read";
            report.note = Some(why.to_owned());
        } else if !own.here.is_empty() && own.is_system(path) {
            report.note = Some(format!(
                "{} holds system mounts, which must stay: run bindguard holders with the mount point that is busy",
                path.display()
            ));
        }
        if report.note.is_some() {
            for holder in &mut report.holders {
                holder.release.clear();
            }
        }
        report
    }
}

impl Holder {
    fn of(namespace: &NamespaceMounts, pods: &Pods) -> Self {
        let mut holder = Self {
            namespace: namespace.id,
            held_by: namespace.held_by.clone(),
            processes: namespace.processes,
            ..Self::default()
        };
        if let HeldBy::Process { cgroup, .. } = &namespace.held_by {
            let ids = container_ids(cgroup);
            let known = ids.iter().find_map(|id| pods.with_id(id));
            let id = known.map(|known| known.id.as_str());
            let id = id.or_else(|| ids.into_iter().find(|id| looks_like_an_id(id)));
            holder.container = id.map(str::to_owned);
            let named = known.map(|known| known.pod.clone());
            let named = named.filter(|pod| *pod != PodName::default());
            holder.pod = named.or_else(|| pod_uid(cgroup).map(|uid| pods.of_uid(&uid)));
        }
        holder
    }
}

// Commands to release a mount from its holder. None unmounts a volume of a living pod, or a mount that
// the node or a container runs on, and none is refused where it is printed.

/// The limit of commands for a holder.
const MAX_COMMANDS: usize = 5;

/// Daemons whose end would end containers, or that open namespaces for a moment.
const DAEMONS: [&str; 8] = [
    "systemd",
    "containerd",
    "containerd-shim",
    "dockerd",
    "crio",
    "conmon",
    "kubelet",
    "bindguard-agent",
];

/// Directories of the node, in addition to those of the kubelet and the runtimes, whose mounts the
/// node needs.
const DIRECTORIES: [&str; 8] = [
    "/boot",
    "/boot/efi",
    "/etc",
    "/run/lock",
    "/tmp",
    "/usr",
    "/var/log",
    "/var/tmp",
];

/// The warning about a mount of the host in a volume that goes with its pod.
const ERASES: &str = "unmount it here before the pod is deleted: the kubelet would erase its files (kubernetes#129550)";

/// A command that releases a mount.
#[derive(Debug, PartialEq, Serialize)]
pub struct ReleaseCommand {
    /// The effect of the command.
    pub effect: &'static str,
    pub command: String,
}

impl ReleaseCommand {
    fn umount(effect: &'static str, path: &Path) -> Self {
        let command = format!("umount {}", shell_word(path));
        Self { effect, command }
    }
}

/// The reader's own namespace, and the other evidence of a search.
struct Own<'t> {
    path: &'t Path,
    table: &'t MountTable,
    index: MountIndex<'t>,
    /// The mounts at or below the path.
    here: Vec<&'t MountEntry>,
    /// The effect of their umounts.
    spread: Spread<'t>,
    /// Mounts that must stay, regardless of the holder: the node or a container runs on them.
    system: HashSet<(Device, &'t Path)>,
    places: &'t Places,
    others: Vec<&'t MountTable>,
    pods: &'t Pods,
    trial: &'t dyn Fn(&PodContainer) -> Trial,
}

impl<'t> Own<'t> {
    fn spread_of(&self, mounts: &[&'t MountEntry]) -> Spread<'t> {
        let tables = self.others.iter().copied();
        Spread::of(mounts, &self.index, tables.chain([self.table]))
    }

    /// True for the path of a system mount, or of a directory in or below which the kubelet or a
    /// runtime mounts things.
    fn is_system(&self, path: &Path) -> bool {
        let mut directories = self.places.directories();
        directories.any(|directory| lies_in(directory, path))
            || DIRECTORIES.iter().any(|it| path == Path::new(it))
            || is_of_the_kernel(path)
    }

    /// True if a mount of any namespace is its root, a kernel mount, or shows the same as a system
    /// mount.
    fn must_stay(&self, entry: &MountEntry) -> bool {
        entry.mount_point == Path::new("/")
            || is_of_the_kernel(&entry.mount_point)
            || self.system.contains(&(entry.device, &*entry.root.path))
    }

    fn is_in_kubelet_root(&self, path: &Path) -> bool {
        self.places.kubelet_roots().any(|root| lies_in(path, root))
    }

    /// True for a mount of a runtime that a container has as its root, or that a umount here would
    /// take from a container. Other mounts of a runtime are left from containers that ended.
    fn is_of_a_living_container(&self, entry: &'t MountEntry) -> bool {
        let mut folders = self.places.runtime_directories.iter();
        if !folders.any(|folder| lies_in(&entry.mount_point, folder)) {
            return false;
        }
        let spread = self.spread_of(&[entry]);
        self.others.iter().any(|table| {
            let index = MountIndex::of(table);
            table.entries().iter().any(|it| {
                let is_root = it.mount_point == Path::new("/")
                    && (it.device, &it.root) == (entry.device, &entry.root);
                is_root || spread.reaching(it, &index).is_some()
            })
        })
    }

    /// The command that unmounts a mount of the reader's own namespace. `None` if the mount must
    /// stay, if the kubelet unmounts it, or if another mount is on it: umount(8) would fail.
    fn umount_here(&self, entry: &MountEntry, effect: &'static str) -> Option<ReleaseCommand> {
        let is_removed = removed_volume(&entry.mount_point, self.places).is_some();
        if self.must_stay(entry)
            || self.table.has_mounts_on(entry)
            || (self.is_in_kubelet_root(&entry.mount_point) && !is_removed)
        {
            return None;
        }
        let effect = if is_removed { ERASES } else { effect };
        Some(ReleaseCommand::umount(effect, &entry.mount_point))
    }

    /// The command that makes the kubelet give up a mount of its own.
    fn of_the_kubelet(&self, path: &Path) -> Vec<ReleaseCommand> {
        let Some(path) = PodPath::from_path(path, self.places.kubelet_roots()) else {
            return Vec::new();
        };
        let pod = self.pods.of_uid(path.pod_uid);
        if !self.pods.containers.iter().any(|it| it.pod.uid == pod.uid) {
            return Vec::new();
        }
        let effect = "or delete the pod: the kubelet unmounts the pod's volumes";
        self.delete_pod(&pod, effect)
    }

    /// The deletion of a pod. Where it would erase files of the host, their mounts instead.
    fn delete_pod(&self, pod: &PodName, effect: &'static str) -> Vec<ReleaseCommand> {
        match Deletion::of(pod, self.table, self.places) {
            Deletion::Unnamed => Vec::new(),
            Deletion::Command(command) => vec![ReleaseCommand { effect, command }],
            Deletion::Erases(mounts) => {
                let umount = |mount: &PathBuf| ReleaseCommand::umount(ERASES, mount);
                mounts.iter().take(MAX_COMMANDS).map(umount).collect()
            }
        }
    }

    /// The commands for the other mounts of the reader's own namespace, the umounts first.
    fn umounts_elsewhere(&self, elsewhere: &[&'t MountEntry]) -> Vec<ReleaseCommand> {
        let (mut commands, mut of_kubelet) = (Vec::new(), Vec::new());
        // the innermost first
        for entry in elsewhere.iter().rev() {
            if self.is_of_a_living_container(entry) {
                continue;
            }
            match self.umount_here(entry, "unmount this other mount of it") {
                Some(command) => commands.push(command),
                None => of_kubelet.extend(self.of_the_kubelet(&entry.mount_point)),
            }
        }
        commands.truncate(MAX_COMMANDS);
        for command in of_kubelet {
            if !commands.contains(&command) && commands.len() < 2 * MAX_COMMANDS {
                commands.push(command);
            }
        }
        commands
    }

    /// The commands that release the `found` mounts of a holder, mildest first.
    fn releases(
        &self,
        holder: &Holder,
        namespace: &NamespaceMounts,
        found: &[&MountEntry],
        table: &MountTable,
        index: &MountIndex<'_>,
    ) -> Vec<ReleaseCommand> {
        // Mounts that no umount of the reader reaches.
        let (mut private, mut reached) = (Vec::new(), None);
        for entry in found.iter().filter(|entry| !self.must_stay(entry)) {
            match self.spread.reaching(entry, index) {
                Some(here) => reached = reached.or(Some(here)),
                None => private.push(*entry),
            }
        }
        let Some(first) = private.first() else {
            let Some(here) = reached else {
                return Vec::new();
            };
            return match self.umount_here(here, "an unmount here reaches it") {
                Some(umount) => vec![umount],
                None => self.of_the_kubelet(&here.mount_point),
            };
        };
        let pid = match &namespace.held_by {
            HeldBy::Process { pid, .. } => *pid,
            HeldBy::Descriptor { pid, command } => {
                let is_daemon = *pid == 1 || DAEMONS.iter().any(|name| command.starts_with(name));
                let kill = ReleaseCommand {
                    effect: "end the process that has the namespace open",
                    command: format!("kill {pid}"),
                };
                return if is_daemon { Vec::new() } else { vec![kill] };
            }
            HeldBy::BindMount { path } if !self.is_in_kubelet_root(path) => {
                return vec![ReleaseCommand::umount("release the namespace", path)];
            }
            HeldBy::BindMount { .. } | HeldBy::OwnNamespace => return Vec::new(),
        };
        if holder.pod.is_none() && holder.container.is_none() {
            // a service's namespace has copies alone
            return vec![from_outside(pid, first)];
        }
        let mut deletion = Vec::new();
        if let Some(pod) = &holder.pod {
            let effect = "or delete the pod, so that its controller creates a new one";
            deletion = self.delete_pod(pod, effect);
        }
        let container = holder.container.as_deref();
        let container = container.and_then(|id| self.pods.with_id(id));
        let trial = container.map(self.trial).unwrap_or_default();
        let mut releases = Vec::new();
        if let Some((pod_namespace, name)) = holder.pod.as_ref().and_then(PodName::names)
            && trial.refreshes
            && private.iter().any(|entry| is_in_bind(entry, index))
        {
            releases.push(ReleaseCommand {
                effect: "give a private bind of the host's root the mounts of now, while the pod runs on",
                command: format!("bindguard refresh --pod {pod_namespace}/{name} --what host-root"),
            });
        }
        let is_found = |mount: &MountEntry| private.iter().any(|it| it.id == mount.id);
        if trial.releases.iter().any(is_found) {
            releases.push(ReleaseCommand {
                effect: "unmount the copies that the create made",
                command: format!("bindguard release {}", shell_word(self.path)),
            });
        } else if deletion.iter().all(|command| command.effect != ERASES) {
            let mut copies = private.iter();
            // a mount in a bind that is no mount of the spec, and has no mount on it, is no volume
            let copy = copies.find(|entry| {
                let spec = trial.spec.as_ref();
                let is_other = spec.is_some_and(|spec| !spec.has_mount_at(&entry.mount_point));
                is_in_bind(entry, index) && is_other && !table.has_mounts_on(entry)
            });
            releases.extend(copy.map(|entry| from_outside(pid, entry)));
        }
        releases.extend(deletion);
        releases
    }
}

/// Unmounts in another namespace with the caller's umount(8): most images have none. The root
/// directory stays the caller's, and the path leads through the root of the process.
/// `umount --namespace` requires a working /proc in the other namespace.
fn from_outside(pid: u32, mount: &MountEntry) -> ReleaseCommand {
    let path = format!("/proc/{pid}/root{}", mount.mount_point.display());
    ReleaseCommand {
        effect: "unmount it in that namespace only",
        command: format!(
            "nsenter --target {pid} --mount --root=/ umount --no-canonicalize --internal-only --lazy {}",
            shell_word(path.as_ref())
        ),
    }
}

/// True for a mount in a bind of a container, and not on the container's own root.
fn is_in_bind(entry: &MountEntry, table: &MountIndex<'_>) -> bool {
    let parent = table.parent(entry);
    parent.is_some_and(|parent| parent.mount_point != Path::new("/"))
}

#[cfg(test)]
mod tests {
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

#[cfg(test)]
mod report_tests {
    use bindguard_core::spec::SpecUsers;

    use super::*;

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 8:2 / /mnt/disk rw shared:2 - ext4 /dev/sdb rw\n\
         3 1 0:50 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs rw shared:3 - overlay overlay rw\n";
    const CONTAINER: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n\
         13 12 8:2 / /host/mnt/disk rw - ext4 /dev/sdb rw\n";

    fn held_by_exporter(table: MountTable) -> NamespaceMounts {
        NamespaceMounts {
            id: 9,
            held_by: HeldBy::Process {
                pid: 7,
                command: "exporter".to_owned(),
                cgroup: String::new(),
            },
            processes: 1,
            table: Ok(table),
        }
    }

    fn ways_for(path: &str, device: Option<(u32, u32)>) -> (Vec<String>, Option<String>) {
        let table = |lines: &str| MountTable::from_mountinfo(lines.as_bytes()).unwrap();
        let others = [held_by_exporter(table(CONTAINER))];
        let own = table(HOST);
        let wanted = match device {
            Some((major, minor)) => MountsToFind::of_device(Device { major, minor }),
            None => MountsToFind::at_or_below(Path::new(path), &own),
        };
        let report = HoldersReport::find(
            Path::new(path),
            &wanted,
            &own,
            &others,
            &Pods::default(),
            &Places::default(),
            &|_| Trial::default(),
        );
        assert!(!report.holders.is_empty(), "{path}");
        let note = report.note.clone();
        (commands(report), note)
    }

    fn commands(report: HoldersReport) -> Vec<String> {
        let ways = report.holders.into_iter().flat_map(|holder| holder.release);
        ways.map(|way| way.command).collect()
    }

    /// The line may be the mount of a system directory on the path, or of a living container.
    #[test]
    fn while_a_line_cannot_be_read_holders_are_named_and_no_command_is() {
        let own = MountTable::from_mountinfo_in_part(format!("{HOST}no mount\n").as_bytes());
        let others = [held_by_exporter(
            MountTable::from_mountinfo(CONTAINER.as_bytes()).unwrap(),
        )];
        let path = Path::new("/mnt/disk");
        let report = HoldersReport::find(
            path,
            &MountsToFind::at_or_below(path, &own),
            &own,
            &others,
            &Pods::default(),
            &Places::default(),
            &|_| Trial::default(),
        );
        assert_eq!((report.holders.len(), report.mounts.len()), (1, 1));
        assert!(report.note.is_some());
        assert_eq!(commands(report), Vec::<String>::new());
    }

    /// A pod chooses its mountPath.
    #[test]
    fn a_mount_point_that_a_pod_named_ends_no_command() {
        let table = |lines: &str| {
            MountTable::from_mountinfo(lines.replace("/mnt/disk", "/mnt/disk;reboot").as_bytes())
                .unwrap()
        };
        let others = [held_by_exporter(table(CONTAINER))];
        let wanted = MountsToFind::of_device(Device { major: 8, minor: 2 });
        let (path, places) = (Path::new("/dev/sdb"), Places::default());
        let report = HoldersReport::find(
            path,
            &wanted,
            &table(HOST),
            &others,
            &Pods::default(),
            &places,
            &|_| Trial::default(),
        );
        let ways: Vec<_> = report
            .holders
            .iter()
            .flat_map(|holder| &holder.release)
            .map(|way| way.command.as_str())
            .collect();
        assert_eq!(ways[0], "umount '/mnt/disk;reboot'");
        assert!(
            ways[1].ends_with(" --lazy '/proc/7/root/host/mnt/disk;reboot'"),
            "{ways:?}"
        );
    }

    #[test]
    fn no_root_and_no_system_mount_is_ever_unmounted() {
        let (ways, note) = ways_for("/mnt/disk", None);
        assert!(
            ways.len() == 1 && ways[0].ends_with("/proc/7/root/host/mnt/disk") && note.is_none(),
            "{ways:?}"
        );
        let (ways, note) = ways_for("/", None);
        assert!(ways.is_empty() && note.is_some(), "{ways:?}");
        let of_a_task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs";
        assert_eq!(
            ways_for(of_a_task, None),
            (Vec::new(), None),
            "it is the root of the container"
        );
        assert_eq!(
            ways_for("/dev/sda1", Some((8, 1))),
            (Vec::new(), None),
            "it is the root of the host"
        );
        assert_eq!(
            ways_for("/dev/sdb", Some((8, 2))).0.len(),
            2,
            "here, and in the container"
        );
    }

    const POD: &str = "/var/lib/kubelet/pods/0c1d0000-0000-0000-0000-000000000001";
    const APP: &str = "2fdc5572f480c0eaa35b0b793e187da2930c2c41bef4b3d51483e5ff90038bea";

    /// The commands for a path on a host, with a container of the pod shop/web. `$POD` is the pod's
    /// folder.
    fn for_pod(
        path: &str,
        host: &str,
        container: &str,
        is_known: bool,
        trial: &dyn Fn() -> Trial,
    ) -> Vec<String> {
        let table = |lines: &str| {
            MountTable::from_mountinfo(lines.replace("$POD", POD).as_bytes()).unwrap()
        };
        let uid = POD.rsplit('/').next().unwrap();
        let mut app = held_by_exporter(table(container));
        app.held_by = HeldBy::Process {
            pid: 7,
            command: "app".to_owned(),
            cgroup: format!("0::/kubepods/pod{uid}/{APP}"),
        };
        let known = PodContainer {
            id: APP.to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: PodName {
                namespace: Some("shop".to_owned()),
                name: Some("web".to_owned()),
                ..PodName::of_uid(uid)
            },
            guarded: None,
            shim_version: None,
        };
        let pods = Pods {
            containers: is_known.then_some(known).into_iter().collect(),
            ..Pods::default()
        };
        let own = table(host);
        let wanted = MountsToFind::at_or_below(Path::new(path), &own);
        commands(HoldersReport::find(
            Path::new(path),
            &wanted,
            &own,
            &[app],
            &pods,
            &Places::default(),
            &|_| trial(),
        ))
    }

    fn trial_of(spec: &str) -> Trial {
        Trial {
            spec: SpecUsers::from_spec(spec.as_bytes()).ok(),
            ..Trial::default()
        }
    }

    /// A busy staging mount of a CSI driver, and what a container of Docker's left.
    #[test]
    fn no_volume_of_a_living_pod_is_unmounted() {
        const STAGING: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/d/1/globalmount";
        let host = format!(
            "1 0 8:1 / / rw shared:1 - ext4 a rw\n2 1 8:2 / {STAGING} rw shared:2 - ext4 b rw\n\
             3 1 8:2 / $POD/volumes/kubernetes.io~csi/pvc/mount rw shared:2 - ext4 b rw\n\
             4 1 8:2 / /var/lib/docker/overlay2/x/merged/data rw - ext4 b rw\n"
        );
        let container = "11 10 0:50 / / rw - overlay o rw\n12 11 8:2 / /data rw - ext4 b rw\n13 12 0:9 / /data/x rw - tmpfs t rw\n";
        let spec = || trial_of(r#"{"mounts":[{"destination":"/data"}]}"#);
        let of_docker = "umount /var/lib/docker/overlay2/x/merged/data";
        let delete = "kubectl -n shop delete pod web";
        assert_eq!(
            for_pod(STAGING, &host, container, true, &spec),
            [of_docker, delete, delete]
        );
        assert_eq!(
            for_pod(STAGING, &host, container, false, &spec),
            [of_docker]
        );
        // the umount would reach a container that has the host's / as rslave
        let follows = "11 10 0:50 / / rw - overlay o rw\n12 11 8:1 / /host rw master:1 - ext4 a rw\n\
             13 12 8:2 / /host$POD/volumes/kubernetes.io~csi/pvc/mount rw master:2 - ext4 b rw\n";
        let path = format!("{POD}/volumes/kubernetes.io~csi/pvc/mount");
        let only_pod: String = host
            .lines()
            .filter(|line| !line.starts_with(['2', '4']))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_eq!(for_pod(&path, &only_pod, follows, true, &spec), [delete]);
    }

    #[test]
    fn the_root_of_a_living_container_is_not_unmounted() {
        let merged = "/var/lib/docker/overlay2/x/merged";
        let host = format!(
            "1 0 8:1 / / rw shared:1 - ext4 a rw\n2 1 0:50 / /mnt rw - overlay o rw\n3 1 0:50 / {merged} rw - overlay o rw\n"
        );
        let none = || Trial::default();
        let lives = "11 10 0:50 / / rw - overlay o rw\n";
        assert_eq!(for_pod("/mnt", &host, lives, false, &none), [""; 0]);
        let other = "11 10 0:51 / / rw - overlay o rw\n";
        assert_eq!(
            for_pod("/mnt", &host, other, false, &none),
            [format!("umount {merged}")]
        );
    }

    /// The kubelet would erase the disk with the volume: kubernetes#129550.
    #[test]
    fn a_pod_with_a_mount_of_the_host_in_its_empty_dir_is_not_deleted() {
        const DIR: &str = "$POD/volumes/kubernetes.io~empty-dir/scratch";
        let host = format!(
            "1 0 8:1 / / rw shared:1 - ext4 a rw\n2 1 8:2 / /mnt/disk rw shared:2 - ext4 b rw\n\
             3 1 8:2 / {DIR}/disk rw shared:2 - ext4 b rw\n"
        );
        let container = format!(
            "11 10 0:50 / / rw - overlay o rw\n12 11 8:1 {DIR} /scratch rw master:1 - ext4 a rw\n13 12 8:2 / /scratch/disk rw master:2 - ext4 b rw\n"
        );
        let spec = || trial_of(r#"{"mounts":[{"destination":"/scratch"}]}"#);
        let umount = format!("umount {}/disk", DIR.replace("$POD", POD));
        let all = for_pod("/mnt/disk", &host, &container, true, &spec);
        assert_eq!(all, [umount.clone(), umount.clone()]);
        let path = format!("{}/disk", DIR.replace("$POD", POD));
        let here: Vec<String> = for_pod(&path, &host, &container, true, &spec);
        assert_eq!(here, ["umount /mnt/disk", &umount]);
    }

    #[test]
    fn a_command_that_would_be_refused_is_not_advised() {
        let host = "1 0 8:1 / / rw shared:1 - ext4 a rw\n";
        let container = "11 10 0:50 / / rw - overlay o rw\n12 11 8:1 / /host rw - ext4 a rw\n13 12 8:2 / /host/mnt/disk rw - ext4 b rw\n";
        let spec = r#"{"mounts":[{"destination":"/host"}]}"#;
        let copy = || {
            MountTable::from_mountinfo(container.as_bytes())
                .unwrap()
                .entries()[2]
                .clone()
        };
        let refresh = "bindguard refresh --pod shop/web --what host-root";
        let delete = "kubectl -n shop delete pod web";
        let all = for_pod("/mnt/disk", host, container, true, &|| trial_of(spec));
        assert!(
            all.len() == 2 && all[0].starts_with("nsenter ") && all[1] == delete,
            "{all:?}"
        );
        let unknown = for_pod("/mnt/disk", host, container, true, &|| Trial::default());
        assert_eq!(unknown, [delete], "the mount may be the container's own");
        let both = || Trial {
            refreshes: true,
            releases: vec![copy()],
            ..trial_of(spec)
        };
        assert_eq!(
            for_pod("/mnt/disk", host, container, true, &both),
            [refresh, "bindguard release /mnt/disk", delete]
        );
    }

    #[test]
    fn no_daemon_is_killed() {
        for (pid, command, is_killed) in [
            (1, "init", false),
            (9, "containerd-shim", false),
            (9, "sleep", true),
        ] {
            let table = |lines: &str| MountTable::from_mountinfo(lines.as_bytes()).unwrap();
            let mut kept = held_by_exporter(table(CONTAINER));
            kept.held_by = HeldBy::Descriptor {
                pid,
                command: command.to_owned(),
            };
            let own = table("1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n");
            let path = Path::new("/mnt/disk");
            let wanted = MountsToFind::at_or_below(path, &own);
            let (pods, places) = (Pods::default(), Places::default());
            let found = HoldersReport::find(path, &wanted, &own, &[kept], &pods, &places, &|_| {
                Trial::default()
            });
            assert_eq!(!commands(found).is_empty(), is_killed, "{command}");
        }
    }
}
