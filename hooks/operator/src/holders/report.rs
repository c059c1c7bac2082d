//! The report of the holders of mounts, and of the commands that release them.

use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use serde::Serialize;

use crate::pods::Pods;
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable, Propagation};
use bindguard_core::places::Places;
use bindguard_core::text::{serialize_path, shell_word};

use super::cgroup::looks_like_an_id;
use super::release::{ReleaseCommand, releases};
use super::spread::Spread;
use super::system::SystemMounts;
use super::{MountsToFind, container_ids, pod_uid};
use crate::namespaces::{Checked, HeldBy, NamespaceMounts};

/// The holders of the mounts at or below a path; `holders --json` prints this report.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HoldersReport {
    /// The path in question.
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

/// The kinds of holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HolderKind {
    /// [`HeldBy::Process`]
    Process,
    /// [`HeldBy::Descriptor`]
    Descriptor,
    /// [`HeldBy::BindMount`]
    BindMount,
    /// The reader's own mount namespace, at another place.
    OwnNamespace,
}

/// A mount namespace that has a searched mount.
#[derive(Debug, Clone, Serialize)]
pub struct Holder {
    /// The namespace's number.
    pub namespace: u64,
    /// The kind of the holder.
    pub held_by: HolderKind,
    /// The process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_name: Option<String>,
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldMount {
    /// Its path in that namespace.
    #[serde(serialize_with = "serialize_path")]
    pub mount_point: PathBuf,
    /// The mount's root: a path within the filesystem.
    pub root: String,
    /// Its filesystem's type.
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    /// `private`, `slave`, `shared`, `shared,slave` or `unbindable`.
    pub propagation: &'static str,
    /// A umount in the reader's namespace reaches it.
    pub unmount_propagates: bool,
}

impl HeldMount {
    fn from_entry(entry: &MountEntry, table: &MountIndex<'_>, spread: &Spread<'_>) -> Self {
        Self {
            mount_point: entry.mount_point.clone(),
            root: entry.root.display_name(),
            fs_type: entry.fs_type.0.clone(),
            device: entry.device.to_string(),
            propagation: in_words(&entry.propagation),
            unmount_propagates: spread.reaching(entry, table).is_some(),
        }
    }
}

fn in_words(propagation: &Propagation) -> &'static str {
    match (
        propagation.peer_group.is_some(),
        propagation.master.is_some(),
        propagation.unbindable,
    ) {
        (_, _, true) => "unbindable",
        (true, true, false) => "shared,slave",
        (true, false, false) => "shared",
        (false, true, false) => "slave",
        (false, false, false) => "private",
    }
}

/// The reader's own namespace.
struct Own<'t> {
    table: &'t MountTable,
    index: MountIndex<'t>,
    /// The mounts at or below the path in question.
    here: Vec<&'t MountEntry>,
    /// The effect of their umounts.
    spread: Spread<'t>,
    system: SystemMounts<'t>,
}

impl HoldersReport {
    /// Finds the holders of the wanted mounts. `own`: the reader's own namespace; `places`: the
    /// directories in which the kubelet and the runtimes mount. No command is advised for a path
    /// whose mounts the node needs.
    pub fn find(
        path: &Path,
        wanted: &MountsToFind,
        own: &MountTable,
        others: &[NamespaceMounts],
        pods: &Pods,
        places: &Places,
    ) -> Self {
        let index = MountIndex::of(own);
        let here: Vec<&MountEntry> = own
            .entries()
            .iter()
            .filter(|it| it.mount_point.starts_with(path))
            .collect();
        let tables = others
            .iter()
            .filter_map(|namespace| namespace.table.as_ref().ok());
        let spread = Spread::of(&here, &index, tables.chain([own]));
        let own = Own {
            table: own,
            index,
            here,
            spread,
            system: SystemMounts::of(own, places),
        };
        let mut report = Self {
            path: path.to_owned(),
            mounts: own
                .here
                .iter()
                .map(|entry| HeldMount::from_entry(entry, &own.index, &own.spread))
                .collect(),
            ..Self::default()
        };
        report.holders.extend(in_own_namespace(path, wanted, &own));
        for namespace in others {
            match &namespace.table {
                Ok(table) => report
                    .holders
                    .extend(holder(namespace, table, wanted, &own, pods)),
                Err(_) => report.problems.extend(namespace.unread()),
            }
        }
        if !own.here.is_empty() && own.system.is_at(path) {
            report
                .holders
                .iter_mut()
                .for_each(|holder| holder.release.clear());
            let words = "holds system mounts, which must stay: run bindguard holders with the mount point that is busy";
            report.note = Some(format!("{} {words}", path.display()));
        }
        report
    }
}

/// The same filesystem at another place of the reader's own namespace.
fn in_own_namespace(path: &Path, wanted: &MountsToFind, own: &Own<'_>) -> Option<Holder> {
    let elsewhere = own
        .table
        .entries()
        .iter()
        .filter(|entry| !entry.mount_point.starts_with(path));
    let others: Vec<&MountEntry> = elsewhere
        .filter(|entry| wanted.is(entry, &own.index))
        .collect();
    let first = others.iter().find(|entry| !own.system.must_stay(entry));
    let release = |entry: &&MountEntry| ReleaseCommand {
        effect: "unmount this other mount of it",
        command: format!("umount {}", shell_word(&entry.mount_point)),
    };
    let free = first.map(release).into_iter().collect();
    let mounts: Vec<_> = others
        .iter()
        .map(|entry| HeldMount::from_entry(entry, &own.index, &own.spread))
        .collect();
    (!mounts.is_empty()).then(|| Holder {
        held_by: HolderKind::OwnNamespace,
        mounts,
        release: free,
        ..Holder::unknown()
    })
}

fn holder(
    namespace: &NamespaceMounts,
    table: &MountTable,
    wanted: &MountsToFind,
    own: &Own<'_>,
    pods: &Pods,
) -> Option<Holder> {
    let index = MountIndex::of(table);
    let found: Vec<&MountEntry> = table
        .entries()
        .iter()
        .filter(|entry| wanted.is(entry, &index))
        .collect();
    let reaching = |entry: &MountEntry| own.spread.reaching(entry, &index);
    let may_go = || {
        found
            .iter()
            .copied()
            .filter(|entry| !own.system.must_stay(entry))
    };
    let first = may_go()
        .find(|entry| reaching(entry).is_none())
        .or_else(|| may_go().next());
    let goes_with = first
        .and_then(reaching)
        .filter(|here| !own.system.must_stay(here));
    let mut holder = Holder {
        namespace: namespace.id,
        processes: namespace.processes,
        ..Holder::unknown()
    };
    holder.keep(&namespace.held_by, pods);
    let parent = first.and_then(|entry| index.parent(entry));
    let is_in_bind = parent.is_some_and(|parent| parent.mount_point != Path::new("/"));
    let pod = holder.pod.as_ref();
    holder.release = releases(&namespace.held_by, pod, first, goes_with, is_in_bind);
    holder.mounts = found
        .iter()
        .map(|entry| HeldMount::from_entry(entry, &index, &own.spread))
        .collect();
    (!holder.mounts.is_empty()).then_some(holder)
}

impl Holder {
    fn unknown() -> Self {
        Self {
            namespace: 0,
            held_by: HolderKind::OwnNamespace,
            pid: None,
            process_name: None,
            processes: 0,
            container: None,
            pod: None,
            mounts: Vec::new(),
            release: Vec::new(),
        }
    }

    fn keep(&mut self, held_by: &HeldBy, pods: &Pods) {
        match held_by {
            HeldBy::Process {
                pid,
                command,
                cgroup,
            } => {
                (self.held_by, self.pid, self.process_name) =
                    (HolderKind::Process, Some(*pid), Some(command.clone()));
                let ids = container_ids(cgroup);
                let known = ids.iter().find_map(|id| pods.with_id(id));
                let id = known
                    .map(|known| known.id.as_str())
                    .or_else(|| ids.into_iter().find(|id| looks_like_an_id(id)));
                self.container = id.map(str::to_owned);
                let named = known
                    .map(|known| known.pod.clone())
                    .filter(|pod| *pod != PodName::default());
                self.pod = named.or_else(|| pod_uid(cgroup).map(|uid| pods.of_uid(&uid)));
            }
            HeldBy::Descriptor { pid, command } => {
                (self.held_by, self.pid, self.process_name) =
                    (HolderKind::Descriptor, Some(*pid), Some(command.clone()));
            }
            HeldBy::BindMount(_) => self.held_by = HolderKind::BindMount,
        }
    }
}

#[cfg(test)]
mod tests {
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
            Some((major, minor)) => {
                MountsToFind::of_device(bindguard_core::mount_table::Device { major, minor })
            }
            None => MountsToFind::at_or_below(Path::new(path), &own),
        };
        let report = HoldersReport::find(
            Path::new(path),
            &wanted,
            &own,
            &others,
            &Pods::default(),
            &Places::default(),
        );
        assert!(!report.holders.is_empty(), "{path}");
        (
            report
                .holders
                .into_iter()
                .flat_map(|holder| holder.release)
                .map(|way| way.command)
                .collect(),
            report.note,
        )
    }

    /// A pod chooses its mountPath.
    #[test]
    fn a_mount_point_that_a_pod_named_ends_no_command() {
        let table = |lines: &str| {
            MountTable::from_mountinfo(lines.replace("/mnt/disk", "/mnt/disk;reboot").as_bytes())
                .unwrap()
        };
        let others = [held_by_exporter(table(CONTAINER))];
        let wanted =
            MountsToFind::of_device(bindguard_core::mount_table::Device { major: 8, minor: 2 });
        let (path, places) = (Path::new("/dev/sdb"), Places::default());
        let report = HoldersReport::find(
            path,
            &wanted,
            &table(HOST),
            &others,
            &Pods::default(),
            &places,
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
}
