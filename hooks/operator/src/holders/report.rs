//! The report of the holders of mounts, and of the commands that release them.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::pods::{PodName, Pods};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable, Propagation};
use bindguard_core::policy::Policy;
use bindguard_core::text::shell_word;

use super::cgroup::looks_like_an_id;
use super::free::{Way, ways};
use super::spread::Spread;
use super::system::SystemMounts;
use super::{KeptBy, SeenNamespace, Wanted, container_ids, pod_uid};

/// The holders of the mounts at or below a path. Its JSON form is what `holders --json` prints.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HoldersReport {
    /// The path in question.
    pub path: PathBuf,
    /// The mounts there in the reader's own namespace.
    pub mounts: Vec<KeptMount>,
    /// All other holders of these mounts.
    pub holders: Vec<Holder>,
    /// Why no command is advised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The number of objects checked.
    pub looked_at: Looked,
    /// Errors that left the search incomplete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// The number of objects checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Looked {
    /// Processes whose namespace was queried.
    pub processes: usize,
    /// Mount namespaces; the table of each was read once.
    pub namespaces: usize,
}

/// A mount namespace that has a searched mount.
#[derive(Debug, Clone, Serialize)]
pub struct Holder {
    /// The namespace's number.
    pub namespace: u64,
    /// `process`, `descriptor`, `bind-mount`, or `here` for the reader's own.
    pub kept_by: &'static str,
    /// The process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The number of processes in it.
    pub processes: usize,
    /// Their container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Their pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The searched mounts in it.
    pub mounts: Vec<KeptMount>,
    /// Commands that would release them.
    pub free: Vec<Way>,
}

/// A mount of a holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptMount {
    /// Its path in that namespace.
    pub mount_point: PathBuf,
    /// Its root: the path in its filesystem that it shows.
    pub root: String,
    /// Its filesystem's type.
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    /// `private`, `slave`, `shared`, `shared,slave` or `unbindable`.
    pub propagation: &'static str,
    /// A umount in the reader's namespace reaches it.
    pub follows: bool,
}

impl KeptMount {
    fn from_entry(entry: &MountEntry, table: &MountIndex<'_>, spread: &Spread<'_>) -> Self {
        Self {
            mount_point: entry.mount_point.clone(),
            root: entry.root.for_people(),
            fs_type: entry.fs_type.0.clone(),
            device: entry.device.to_string(),
            propagation: in_words(&entry.propagation),
            follows: spread.reaching(entry, table).is_some(),
        }
    }
}

fn in_words(propagation: &Propagation) -> &'static str {
    match (propagation.peer_group.is_some(), propagation.master.is_some(), propagation.unbindable) {
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
    /// Finds the holders of the wanted mounts. `own`: the reader's own namespace; `policy`: the directories in which the kubelet
    /// and the runtimes mount. No command is advised for a path whose mounts the node needs.
    pub fn find(
        path: &Path,
        wanted: &Wanted,
        own: &MountTable,
        others: &[SeenNamespace],
        pods: &Pods,
        policy: &Policy,
    ) -> Self {
        let index = MountIndex::of(own);
        let here: Vec<&MountEntry> = own.entries().iter().filter(|it| it.mount_point.starts_with(path)).collect();
        let tables = others.iter().filter_map(|namespace| namespace.table.as_ref().ok());
        let spread = Spread::of(&here, &index, tables.chain([own]));
        let own = Own { table: own, index, here, spread, system: SystemMounts::of(own, policy) };
        let mut report = Self {
            path: path.to_owned(),
            mounts: own.here.iter().map(|entry| KeptMount::from_entry(entry, &own.index, &own.spread)).collect(),
            ..Self::default()
        };
        report.holders.extend(elsewhere_here(path, wanted, &own));
        for namespace in others {
            match &namespace.table {
                Ok(table) => report.holders.extend(holder(namespace, table, wanted, &own, pods)),
                Err(why) => report.problems.push(format!("mount namespace {}: {why}", namespace.id)),
            }
        }
        if !own.here.is_empty() && own.system.is_at(path) {
            report.holders.iter_mut().for_each(|holder| holder.free.clear());
            let words = "holds system mounts, which must stay: run bindguard holders with the mount point that is busy";
            report.note = Some(format!("{} {words}", path.display()));
        }
        report
    }
}

/// The same filesystem at another place of the reader's own namespace.
fn elsewhere_here(path: &Path, wanted: &Wanted, own: &Own<'_>) -> Option<Holder> {
    let elsewhere = own.table.entries().iter().filter(|entry| !entry.mount_point.starts_with(path));
    let others: Vec<&MountEntry> = elsewhere.filter(|entry| wanted.is(entry, &own.index)).collect();
    let first = others.iter().find(|entry| !own.system.must_stay(entry));
    let way = |entry: &&MountEntry| Way {
        what: "unmount this other mount of it",
        run: format!("umount {}", shell_word(&entry.mount_point)),
    };
    let free = first.map(way).into_iter().collect();
    let mounts: Vec<_> = others.iter().map(|entry| KeptMount::from_entry(entry, &own.index, &own.spread)).collect();
    (!mounts.is_empty()).then(|| Holder { kept_by: "here", mounts, free, ..Holder::nobody() })
}

fn holder(
    namespace: &SeenNamespace,
    table: &MountTable,
    wanted: &Wanted,
    own: &Own<'_>,
    pods: &Pods,
) -> Option<Holder> {
    let index = MountIndex::of(table);
    let found: Vec<&MountEntry> = table.entries().iter().filter(|entry| wanted.is(entry, &index)).collect();
    let reaching = |entry: &MountEntry| own.spread.reaching(entry, &index);
    let may_go = || found.iter().copied().filter(|entry| !own.system.must_stay(entry));
    let first = may_go().find(|entry| reaching(entry).is_none()).or_else(|| may_go().next());
    let goes_with = first.and_then(reaching).filter(|here| !own.system.must_stay(here));
    let mut holder = Holder { namespace: namespace.id, processes: namespace.processes, ..Holder::nobody() };
    holder.keep(&namespace.kept_by, pods);
    holder.free = ways(&namespace.kept_by, &holder, first, goes_with);
    holder.mounts = found.iter().map(|entry| KeptMount::from_entry(entry, &index, &own.spread)).collect();
    (!holder.mounts.is_empty()).then_some(holder)
}

impl Holder {
    fn nobody() -> Self {
        Self {
            namespace: 0,
            kept_by: "here",
            pid: None,
            command: None,
            processes: 0,
            container: None,
            pod: None,
            mounts: Vec::new(),
            free: Vec::new(),
        }
    }

    fn keep(&mut self, kept_by: &KeptBy, pods: &Pods) {
        match kept_by {
            KeptBy::Process { pid, command, cgroup } => {
                (self.kept_by, self.pid, self.command) = ("process", Some(*pid), Some(command.clone()));
                let ids = container_ids(cgroup);
                let known = ids.iter().find_map(|id| pods.with_id(id));
                let id =
                    known.map(|known| known.id.as_str()).or_else(|| ids.into_iter().find(|id| looks_like_an_id(id)));
                self.container = id.map(str::to_owned);
                let named = known.map(|known| known.pod.clone()).filter(|pod| *pod != PodName::default());
                self.pod = named.or_else(|| pod_uid(cgroup).map(|uid| pods.of_uid(&uid)));
            }
            KeptBy::Descriptor { pid, command } => {
                (self.kept_by, self.pid, self.command) = ("descriptor", Some(*pid), Some(command.clone()));
            }
            KeptBy::BindMount(_) => self.kept_by = "bind-mount",
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

    fn ways_for(path: &str, device: Option<(u32, u32)>) -> (Vec<String>, Option<String>) {
        let table = |lines: &str| MountTable::from_mountinfo(lines.as_bytes()).unwrap();
        let kept_by = KeptBy::Process { pid: 7, command: "exporter".to_owned(), cgroup: String::new() };
        let others = [SeenNamespace { id: 9, kept_by, processes: 1, table: Ok(table(CONTAINER)) }];
        let own = table(HOST);
        let wanted = match device {
            Some((major, minor)) => Wanted::of_device(bindguard_core::mount_table::Device { major, minor }),
            None => Wanted::at_or_below(Path::new(path), &own),
        };
        let report = HoldersReport::find(Path::new(path), &wanted, &own, &others, &Pods::default(), &Policy::default());
        assert!(!report.holders.is_empty(), "{path}");
        (report.holders.into_iter().flat_map(|holder| holder.free).map(|way| way.run).collect(), report.note)
    }

    /// A pod chooses its mountPath.
    #[test]
    fn a_mount_point_that_a_pod_named_ends_no_command() {
        let table = |lines: &str| {
            MountTable::from_mountinfo(lines.replace("/mnt/disk", "/mnt/disk;reboot").as_bytes()).unwrap()
        };
        let kept_by = KeptBy::Process { pid: 7, command: "exporter".to_owned(), cgroup: String::new() };
        let others = [SeenNamespace { id: 9, kept_by, processes: 1, table: Ok(table(CONTAINER)) }];
        let wanted = Wanted::of_device(bindguard_core::mount_table::Device { major: 8, minor: 2 });
        let (path, policy) = (Path::new("/dev/sdb"), Policy::default());
        let report = HoldersReport::find(path, &wanted, &table(HOST), &others, &Pods::default(), &policy);
        let ways: Vec<_> = report.holders.iter().flat_map(|holder| &holder.free).map(|way| way.run.as_str()).collect();
        assert_eq!(ways[0], "umount '/mnt/disk;reboot'");
        assert!(ways[1].ends_with(" --lazy '/proc/7/root/host/mnt/disk;reboot'"), "{ways:?}");
    }

    #[test]
    fn no_root_and_no_system_mount_is_ever_unmounted() {
        let (ways, note) = ways_for("/mnt/disk", None);
        assert!(ways.len() == 1 && ways[0].ends_with("/proc/7/root/host/mnt/disk") && note.is_none(), "{ways:?}");
        let (ways, note) = ways_for("/", None);
        assert!(ways.is_empty() && note.is_some(), "{ways:?}");
        let of_a_task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs";
        assert_eq!(ways_for(of_a_task, None), (Vec::new(), None), "it is the root of the container");
        assert_eq!(ways_for("/dev/sda1", Some((8, 1))), (Vec::new(), None), "it is the root of the host");
        assert_eq!(ways_for("/dev/sdb", Some((8, 2))).0.len(), 2, "here, and in the container");
    }
}
