//! Commands to release a mount from its holder.

use bindguard_core::identity::PodName;
use serde::Serialize;

use bindguard_core::mount_table::MountEntry;
use bindguard_core::text::shell_word;

use crate::namespaces::HeldBy;

/// A command that releases a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReleaseCommand {
    /// The effect of the command.
    pub effect: &'static str,
    /// The command.
    pub command: String,
}

/// Unmounts in another namespace with the caller's umount(8): most images have none. The root
/// directory stays the caller's, and the path leads through the root of the process.
/// `umount --namespace` requires a working /proc in the other namespace.
fn from_outside(pid: u32, mount: &MountEntry) -> String {
    let path = format!("/proc/{pid}/root{}", mount.mount_point.display());
    format!(
        "nsenter --target {pid} --mount --root=/ umount --no-canonicalize --internal-only --lazy {}",
        shell_word(path.as_ref())
    )
}

/// The commands that release a mount, mildest first. `mount` is `None` if all mounts of the holder
/// must stay. `goes_with` is a mount in this namespace whose umount also unmounts the held mount.
/// `is_in_bind`: the mount is in a bind of the container, not in the root of the namespace.
pub(super) fn releases(
    held_by: &HeldBy,
    pod: Option<&PodName>,
    mount: Option<&MountEntry>,
    goes_with: Option<&MountEntry>,
    is_in_bind: bool,
) -> Vec<ReleaseCommand> {
    let mut releases = Vec::new();
    if let Some(own) = goes_with {
        let run = format!("umount {}", shell_word(&own.mount_point));
        releases.push(ReleaseCommand {
            effect: "an unmount here reaches it",
            command: run,
        });
        return releases;
    }
    match held_by {
        HeldBy::Process { pid, .. } => {
            let pod = pod.and_then(|pod| Some((pod.namespace.as_ref()?, pod.name.as_ref()?)));
            releases.extend(pod.filter(|_| is_in_bind).map(|(namespace, name)| ReleaseCommand {
                effect: "give a private bind of the host's root the mounts of now, while the pod runs on",
                command: format!("bindguard refresh --pod {namespace}/{name} --what host-root"),
            }));
            releases.extend(mount.map(|mount| ReleaseCommand {
                effect: "unmount it in that namespace only",
                command: from_outside(*pid, mount),
            }));
            if let Some((namespace, name)) = pod {
                let run = format!("kubectl -n {namespace} delete pod {name}");
                releases.push(ReleaseCommand {
                    effect: "or delete the pod, so that its controller creates a new one",
                    command: run,
                });
            }
        }
        HeldBy::Descriptor { pid, .. } => {
            releases.push(ReleaseCommand {
                effect: "end the process that has the namespace open",
                command: format!("kill {pid}"),
            });
        }
        HeldBy::BindMount(path) => {
            releases.push(ReleaseCommand {
                effect: "release the namespace",
                command: format!("umount {}", shell_word(path)),
            });
        }
    }
    releases
}
