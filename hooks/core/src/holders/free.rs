//! What would free a mount that somebody holds.

use serde::Serialize;

use crate::mount_table::MountEntry;

use super::KeptBy;
use super::report::{Here, Holder, KeptMount};
use super::system::SystemMounts;

/// One way to free it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Way {
    /// What it does.
    pub what: &'static str,
    /// The command.
    pub run: String,
}

/// A umount in another namespace with this one's umount(8): most images have none. The root directory stays this one's,
/// and the path goes through the process's own root; `umount --namespace` wants a /proc inside that shows itself.
fn from_outside(pid: u32, mount: &KeptMount) -> String {
    format!(
        "nsenter --target {pid} --mount --root=/ umount --no-canonicalize --internal-only --lazy /proc/{pid}/root{}",
        mount.mount_point.display()
    )
}

/// The mount of this namespace that a umount has to name for another namespace's mount to go.
fn own_mount_of<'t>(mount: &KeptMount, here: &Here<'t>, system: &SystemMounts<'_>) -> Option<&'t MountEntry> {
    let may_go = || here.mounts.iter().copied().filter(|own| !system.must_stay(own));
    let shows_the_same =
        |own: &&MountEntry| own.device.to_string() == mount.device && own.root.for_people() == mount.root;
    may_go().find(shows_the_same).or_else(|| may_go().next())
}

/// What frees a mount, mildest first. `mount`: none when all that the holder has must stay.
pub(super) fn ways(
    kept_by: &KeptBy,
    holder: &Holder,
    mount: Option<&KeptMount>,
    here: &Here<'_>,
    system: &SystemMounts<'_>,
) -> Vec<Way> {
    let mut ways = Vec::new();
    let following = mount.filter(|mount| mount.follows);
    if let Some(own) = following.and_then(|mount| own_mount_of(mount, here, system)) {
        let run = format!("umount {}", own.mount_point.display());
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
            ways.push(Way { what: "let go of the namespace", run: format!("umount {}", path.display()) });
        }
    }
    ways
}
