//! Commands that release a mount from its holder.

use serde::Serialize;

use bindguard_core::mount_table::MountEntry;
use bindguard_core::text::shell_word;

use super::KeptBy;
use super::report::Holder;

/// One way to release it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Way {
    /// The effect of the command.
    pub what: &'static str,
    /// The command.
    pub run: String,
}

/// A umount in another namespace with this one's umount(8): most images have none. The root directory stays this one's,
/// and the path leads through the process's own root. `umount --namespace` requires a /proc in there that shows itself.
fn from_outside(pid: u32, mount: &MountEntry) -> String {
    let path = format!("/proc/{pid}/root{}", mount.mount_point.display());
    format!(
        "nsenter --target {pid} --mount --root=/ umount --no-canonicalize --internal-only --lazy {}",
        shell_word(path.as_ref())
    )
}

/// The commands that release a mount, mildest first. `mount`: none if all mounts of the holder must stay; `goes_with`: the
/// mount here whose umount also unmounts it.
pub(super) fn ways(
    kept_by: &KeptBy,
    holder: &Holder,
    mount: Option<&MountEntry>,
    goes_with: Option<&MountEntry>,
) -> Vec<Way> {
    let mut ways = Vec::new();
    if let Some(own) = goes_with {
        let run = format!("umount {}", shell_word(&own.mount_point));
        ways.push(Way { what: "a umount here reaches it", run });
        return ways;
    }
    match kept_by {
        KeptBy::Process { pid, .. } => {
            ways.extend(
                mount.map(|mount| Way {
                    what: "take it from that namespace alone, now",
                    run: from_outside(*pid, mount),
                }),
            );
            if let Some((namespace, name)) =
                holder.pod.as_ref().and_then(|p| Some((p.namespace.as_ref()?, p.name.as_ref()?)))
            {
                let run = format!("kubectl -n {namespace} delete pod {name}");
                ways.push(Way { what: "or make the pod anew", run });
            }
        }
        KeptBy::Descriptor { pid, .. } => {
            ways.push(Way { what: "end the process that has the namespace open", run: format!("kill {pid}") });
        }
        KeptBy::BindMount(path) => {
            ways.push(Way { what: "release the namespace", run: format!("umount {}", shell_word(path)) });
        }
    }
    ways
}
