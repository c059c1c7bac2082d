//! Commands to release a mount from its holder. None unmounts a volume of a living pod, and none is
//! refused where it is printed.

use std::path::Path;

use bindguard_core::identity::PodName;
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::MountEntry;
use bindguard_core::text::shell_word;
use serde::Serialize;

use super::report::Own;
use crate::namespaces::HeldBy;
use crate::pod_deletion::{Deletion, removed_volume};

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

/// The warning about a mount of the host in a volume that goes with its pod.
const ERASES: &str = "unmount it here before the pod is deleted: the kubelet would erase its files (kubernetes#129550)";

/// A command that releases a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReleaseCommand {
    /// The effect of the command.
    pub effect: &'static str,
    pub command: String,
}

impl ReleaseCommand {
    /// True if the deletion of the pod would erase files of the host.
    pub(super) fn is_warning(&self) -> bool {
        self.effect == ERASES
    }
}

/// Unmounts in another namespace with the caller's umount(8): most images have none. The root
/// directory stays the caller's, and the path leads through the root of the process.
/// `umount --namespace` requires a working /proc in the other namespace.
pub(super) fn from_outside(pid: u32, mount: &MountEntry) -> ReleaseCommand {
    let path = format!("/proc/{pid}/root{}", mount.mount_point.display());
    ReleaseCommand {
        effect: "unmount it in that namespace only",
        command: format!(
            "nsenter --target {pid} --mount --root=/ umount --no-canonicalize --internal-only --lazy {}",
            shell_word(path.as_ref())
        ),
    }
}

/// The command that unmounts a mount of the reader's own namespace. `None` if the mount must stay,
/// if the kubelet unmounts it, or if another mount is on it: umount(8) would fail.
pub(super) fn umount_here(
    entry: &MountEntry,
    own: &Own<'_>,
    effect: &'static str,
) -> Option<ReleaseCommand> {
    let is_removed = removed_volume(&entry.mount_point, own.places).is_some();
    if own.system.must_stay(entry)
        || own.table.has_mounts_on(entry)
        || (own.is_in_kubelet_root(&entry.mount_point) && !is_removed)
    {
        return None;
    }
    Some(ReleaseCommand {
        effect: if is_removed { ERASES } else { effect },
        command: format!("umount {}", shell_word(&entry.mount_point)),
    })
}

/// The command that makes the kubelet give up a mount of its own.
pub(super) fn of_the_kubelet(path: &Path, own: &Own<'_>) -> Vec<ReleaseCommand> {
    let Some(path) = PodPath::from_path(path, own.places.kubelet_roots()) else {
        return Vec::new();
    };
    let is_of_pod = |uid: &Option<String>| uid.as_deref() == Some(path.pod_uid);
    if !own.pods.containers.iter().any(|it| is_of_pod(&it.pod.uid)) {
        return Vec::new();
    }
    let effect = "or delete the pod: the kubelet unmounts the pod's volumes";
    delete_pod(&own.pods.of_uid(path.pod_uid), own, effect)
}

/// The deletion of a pod. Where it would erase files of the host, their mounts instead.
pub(super) fn delete_pod(
    pod: &PodName,
    own: &Own<'_>,
    effect: &'static str,
) -> Vec<ReleaseCommand> {
    match Deletion::of(pod, own.table, own.places) {
        Deletion::Unnamed => Vec::new(),
        Deletion::Command(command) => vec![ReleaseCommand { effect, command }],
        Deletion::Erases(mounts) => {
            let mounts = mounts.iter().take(MAX_COMMANDS);
            let umount = |mount| ReleaseCommand {
                effect: ERASES,
                command: format!("umount {}", shell_word(mount)),
            };
            mounts.map(|mount| umount(mount)).collect()
        }
    }
}

/// The commands for the other mounts of the reader's own namespace, the umounts first.
pub(super) fn umounts_elsewhere(elsewhere: &[&MountEntry], own: &Own<'_>) -> Vec<ReleaseCommand> {
    let (mut commands, mut of_kubelet) = (Vec::new(), Vec::new());
    // the innermost first
    for entry in elsewhere.iter().rev() {
        if own.is_of_a_living_container(entry) {
            continue;
        }
        match umount_here(entry, own, "unmount this other mount of it") {
            Some(command) => commands.push(command),
            None => of_kubelet.extend(of_the_kubelet(&entry.mount_point, own)),
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

/// The commands for a namespace without a process in it.
pub(super) fn release_empty(held_by: &HeldBy, own: &Own<'_>) -> Option<ReleaseCommand> {
    match held_by {
        HeldBy::Process { .. } => None,
        HeldBy::Descriptor { pid, command } => {
            let is_daemon = *pid == 1 || DAEMONS.iter().any(|name| command.starts_with(name));
            (!is_daemon).then(|| ReleaseCommand {
                effect: "end the process that has the namespace open",
                command: format!("kill {pid}"),
            })
        }
        HeldBy::BindMount(path) => (!own.is_in_kubelet_root(path)).then(|| ReleaseCommand {
            effect: "release the namespace",
            command: format!("umount {}", shell_word(path)),
        }),
    }
}
