//! The report of the holders of mounts, and of the commands that release them.

use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use serde::Serialize;

use crate::pods::{PodContainer, Pods};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable, Propagation};
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_core::text::{serialize_path, shell_word};

use super::release::{
    ReleaseCommand, delete_pod, from_outside, of_the_kubelet, release_empty, umount_here,
    umounts_elsewhere,
};
use super::{MountsToFind, Trial, container_ids, pod_uid};
use crate::container_cgroup::looks_like_an_id;
use crate::holders::Spread;
use crate::holders::SystemMounts;
use crate::namespaces::{Checked, HeldBy, NamespaceMounts};

/// The holders of the mounts at or below a path; `holders --json` prints this report.
#[derive(Debug, Clone, Default, Serialize)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
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

/// The reader's own namespace, and the other evidence of a search.
pub(super) struct Own<'t> {
    path: &'t Path,
    pub(super) table: &'t MountTable,
    index: MountIndex<'t>,
    /// The mounts at or below the path.
    here: Vec<&'t MountEntry>,
    /// The effect of their umounts.
    spread: Spread<'t>,
    pub(super) system: SystemMounts<'t>,
    pub(super) places: &'t Places,
    others: &'t [NamespaceMounts],
    pub(super) pods: &'t Pods,
    trial: &'t dyn Fn(&PodContainer) -> Trial,
}

impl Own<'_> {
    fn others(&self) -> impl Iterator<Item = &MountTable> {
        let tables = self.others.iter().map(|namespace| &namespace.table);
        tables.filter_map(|table| table.as_ref().ok())
    }

    pub(super) fn is_in_kubelet_root(&self, path: &Path) -> bool {
        self.places.kubelet_roots().any(|root| lies_in(path, root))
    }

    /// True for a mount of a runtime that a container has as its root, or that a umount here would
    /// take from a container. Other mounts of a runtime are left from containers that ended.
    pub(super) fn is_of_a_living_container(&self, entry: &MountEntry) -> bool {
        let mut folders = self.places.runtime_directories.iter();
        if !folders.any(|folder| lies_in(&entry.mount_point, folder)) {
            return false;
        }
        let spread = Spread::of(&[entry], &self.index, self.others().chain([self.table]));
        self.others().any(|table| {
            let index = MountIndex::of(table);
            table.entries().iter().any(|it| {
                let is_root = it.mount_point == Path::new("/")
                    && (it.device, &it.root) == (entry.device, &entry.root);
                is_root || spread.reaching(it, &index).is_some()
            })
        })
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
            path,
            table: own,
            index,
            here,
            spread,
            system: SystemMounts::of(own, places),
            places,
            others,
            pods,
            trial,
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
        report.holders.extend(in_own_namespace(wanted, &own));
        for namespace in others {
            match &namespace.table {
                Ok(table) => report
                    .holders
                    .extend(holder(namespace, table, wanted, &own)),
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
        if own.table.skipped().is_some() {
            report
                .holders
                .iter_mut()
                .for_each(|holder| holder.release.clear());
            let words = "no command is safe while a line of the mount table cannot be read";
            report.note = Some(words.to_owned());
        }
        report
    }
}

/// The same filesystem at another place of the reader's own namespace.
fn in_own_namespace(wanted: &MountsToFind, own: &Own<'_>) -> Option<Holder> {
    let elsewhere = own
        .table
        .entries()
        .iter()
        .filter(|entry| !entry.mount_point.starts_with(own.path));
    let others: Vec<&MountEntry> = elsewhere
        .filter(|entry| wanted.is(entry, &own.index))
        .collect();
    let mounts: Vec<_> = others
        .iter()
        .map(|entry| HeldMount::from_entry(entry, &own.index, &own.spread))
        .collect();
    (!mounts.is_empty()).then(|| Holder {
        held_by: HolderKind::OwnNamespace,
        mounts,
        release: umounts_elsewhere(&others, own),
        ..Holder::unknown()
    })
}

fn holder(
    namespace: &NamespaceMounts,
    table: &MountTable,
    wanted: &MountsToFind,
    own: &Own<'_>,
) -> Option<Holder> {
    let index = MountIndex::of(table);
    let found: Vec<&MountEntry> = table
        .entries()
        .iter()
        .filter(|entry| wanted.is(entry, &index))
        .collect();
    if found.is_empty() {
        return None;
    }
    let mut holder = Holder {
        namespace: namespace.id,
        processes: namespace.processes,
        ..Holder::unknown()
    };
    holder.keep(&namespace.held_by, own.pods);
    let may_go: Vec<&MountEntry> = found
        .iter()
        .copied()
        .filter(|entry| !own.system.must_stay(entry))
        .collect();
    let (reached, private): (Vec<&MountEntry>, Vec<&MountEntry>) = may_go
        .into_iter()
        .partition(|entry| own.spread.reaching(entry, &index).is_some());
    holder.release = match (private.is_empty(), reached.first()) {
        (false, _) => holder.releases(namespace, &private, table, &index, own),
        (true, Some(first)) => match own.spread.reaching(first, &index) {
            Some(here) => umount_here(here, own, "an unmount here reaches it").map_or_else(
                || of_the_kubelet(&here.mount_point, own),
                |umount| vec![umount],
            ),
            None => Vec::new(),
        },
        (true, None) => Vec::new(),
    };
    holder.mounts = found
        .iter()
        .map(|entry| HeldMount::from_entry(entry, &index, &own.spread))
        .collect();
    Some(holder)
}

/// True for a mount in a bind of a container, and not on the container's own root.
pub(super) fn is_in_bind(entry: &MountEntry, table: &MountIndex<'_>) -> bool {
    let parent = table.parent(entry);
    parent.is_some_and(|parent| parent.mount_point != Path::new("/"))
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

    /// The commands that release mounts which no umount of the reader reaches, mildest first.
    fn releases(
        &self,
        namespace: &NamespaceMounts,
        private: &[&MountEntry],
        table: &MountTable,
        index: &MountIndex<'_>,
        own: &Own<'_>,
    ) -> Vec<ReleaseCommand> {
        let HeldBy::Process { pid, .. } = &namespace.held_by else {
            return Vec::from_iter(release_empty(&namespace.held_by, own));
        };
        if self.pod.is_none() && self.container.is_none() {
            // a service's namespace has copies alone
            return vec![from_outside(*pid, private[0])];
        }
        let delete = "or delete the pod, so that its controller creates a new one";
        let deletion = self.pod.as_ref().map(|pod| delete_pod(pod, own, delete));
        let deletion = deletion.unwrap_or_default();
        let id = self.container.as_deref();
        let container = id.and_then(|id| own.pods.with_id(id));
        let trial = container.map(own.trial).unwrap_or_default();
        let mut releases = Vec::new();
        let names = self.pod.as_ref().and_then(PodName::names);
        let is_in_bind = private.iter().any(|entry| is_in_bind(entry, index));
        if let Some((pod_namespace, name)) = names.filter(|_| trial.refreshes && is_in_bind) {
            releases.push(ReleaseCommand {
                effect: "give a private bind of the host's root the mounts of now, while the pod runs on",
                command: format!("bindguard refresh --pod {pod_namespace}/{name} --what host-root"),
            });
        }
        let is_found = |mount: &MountEntry| private.iter().any(|it| it.id == mount.id);
        if trial.releases.iter().any(is_found) {
            releases.push(ReleaseCommand {
                effect: "unmount the copies that the create made",
                command: format!("bindguard release {}", shell_word(own.path)),
            });
        } else if !deletion.iter().any(ReleaseCommand::is_warning) {
            releases.extend(
                private
                    .iter()
                    .find(|entry| trial.is_copy(entry, index, table))
                    .map(|entry| from_outside(*pid, entry)),
            );
        }
        releases.extend(deletion);
        releases
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
