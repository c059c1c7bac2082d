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
use bindguard_core::places::Places;
use bindguard_core::text::{lies_in, serialize_path, shell_word};
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
mod report_tests;
#[cfg(test)]
mod spread_tests;
#[cfg(test)]
mod tests;
