//! Commands to release a mount from its holder. None unmounts a volume of a living pod, or a mount
//! that the node or a container runs on, and none is refused where it is printed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::{Device, MountEntry, MountIndex, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_core::text::shell_word;
use serde::Serialize;

use super::{Holder, Spread, Trial};
use crate::kubelet_roots::is_of_the_kernel;
use crate::namespaces::{HeldBy, NamespaceMounts};
use crate::pods::{Deletion, PodContainer, Pods, removed_volume};

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReleaseCommand {
    /// The effect of the command.
    pub effect: &'static str,
    pub command: String,
}

/// The reader's own namespace, and the other evidence of a search.
pub(super) struct Own<'t> {
    path: &'t Path,
    pub(super) table: &'t MountTable,
    pub(super) index: MountIndex<'t>,
    /// The mounts at or below the path.
    pub(super) here: Vec<&'t MountEntry>,
    /// The effect of their umounts.
    pub(super) spread: Spread<'t>,
    /// Mounts that must stay, regardless of the holder: the node or a container runs on them.
    system: HashSet<(Device, &'t Path)>,
    places: &'t Places,
    others: Vec<&'t MountTable>,
    pods: &'t Pods,
    trial: &'t dyn Fn(&PodContainer) -> Trial,
}

impl<'t> Own<'t> {
    pub(super) fn of(
        path: &'t Path,
        table: &'t MountTable,
        others: &'t [NamespaceMounts],
        pods: &'t Pods,
        places: &'t Places,
        trial: &'t dyn Fn(&PodContainer) -> Trial,
    ) -> Self {
        let mut own = Self {
            path,
            table,
            index: MountIndex::of(table),
            here: Vec::new(),
            spread: Spread::default(),
            system: HashSet::new(),
            places,
            others: others.iter().flat_map(|other| &other.table).collect(),
            pods,
            trial,
        };
        for entry in table.entries() {
            if entry.mount_point.starts_with(path) {
                own.here.push(entry);
            }
            if own.is_system(&entry.mount_point) {
                own.system.insert((entry.device, &entry.root.path));
            }
        }
        own.spread = own.spread_of(&own.here);
        own
    }

    fn spread_of(&self, mounts: &[&'t MountEntry]) -> Spread<'t> {
        let tables = self.others.iter().copied();
        Spread::of(mounts, &self.index, tables.chain([self.table]))
    }

    /// True for the path of a system mount, or of a directory in or below which the kubelet or a
    /// runtime mounts things.
    pub(super) fn is_system(&self, path: &Path) -> bool {
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
        Some(ReleaseCommand {
            effect: if is_removed { ERASES } else { effect },
            command: format!("umount {}", shell_word(&entry.mount_point)),
        })
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
                let umount = |mount: &PathBuf| ReleaseCommand {
                    effect: ERASES,
                    command: format!("umount {}", shell_word(mount)),
                };
                mounts.iter().take(MAX_COMMANDS).map(umount).collect()
            }
        }
    }

    /// The commands for the other mounts of the reader's own namespace, the umounts first.
    pub(super) fn umounts_elsewhere(&self, elsewhere: &[&'t MountEntry]) -> Vec<ReleaseCommand> {
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
    pub(super) fn releases(
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
                let kill = (!is_daemon).then(|| ReleaseCommand {
                    effect: "end the process that has the namespace open",
                    command: format!("kill {pid}"),
                });
                return Vec::from_iter(kill);
            }
            HeldBy::BindMount(path) => {
                let umount = (!self.is_in_kubelet_root(path)).then(|| ReleaseCommand {
                    effect: "release the namespace",
                    command: format!("umount {}", shell_word(path)),
                });
                return Vec::from_iter(umount);
            }
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
            let copy = copies.find(|entry| trial.is_copy(entry, index, table));
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
pub(super) fn is_in_bind(entry: &MountEntry, table: &MountIndex<'_>) -> bool {
    let parent = table.parent(entry);
    parent.is_some_and(|parent| parent.mount_point != Path::new("/"))
}
