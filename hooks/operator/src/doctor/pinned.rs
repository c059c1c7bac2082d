//! Filesystems that the host has unmounted and another mount namespace keeps: causes of "device or
//! resource busy".

use std::collections::BTreeSet;

use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::text::shell_word;

use crate::doctor::{Point, first_of};
use crate::kubelet_roots::HostMounts;
use crate::namespaces::NamespaceMounts;
use crate::node_report::{NodeBind, NodeReport};

const NAME: &str = "pinned";
/// The number of places that the point names.
const NAMED: usize = 3;

/// The point for them. `problems`: namespaces that could not be read.
pub fn pinned(
    own: &MountTable,
    others: &[NamespaceMounts],
    problems: &[String],
    places: &Places,
) -> Point {
    // A filesystem of a skipped line would look unmounted.
    if let Some(skipped) = own.skipped() {
        return Point::unknown(NAME, skipped.to_string());
    }
    let places = &places.with_runtimes_at(own.mount_points());
    let host = HostMounts::of(own, places);
    let mut found = BTreeSet::new();
    for table in others.iter().flat_map(|other| &other.table) {
        found.extend(host.pinned_by(table));
    }
    if let Some(first) = found.first() {
        let places: Vec<String> = found.iter().map(|it| it.display().to_string()).collect();
        return Point::failed(
            NAME,
            format!(
                "the host unmounted these, and other mount namespaces keep them: {}",
                first_of(&places, NAMED)
            ),
            format!("bindguard holders {}", shell_word(first)),
        );
    }
    let unread = || others.iter().find_map(NamespaceMounts::unread);
    match problems.first().cloned().or_else(unread) {
        Some(why) => Point::unknown(NAME, why),
        None => Point::ok(
            NAME,
            format!(
                "no filesystem that the host has unmounted is kept by any of the {} other mount namespaces",
                others.len()
            ),
        ),
    }
}

// Subpaths that are stale now, and volumes that are not mounted now.
//
// A configMap that changes makes the subpaths of running containers stale. The node is not at
// fault if the guard runs before the pod's next create: then the point is good, with a note.

const SUBPATHS_NAME: &str = "subpaths";
const NEXT: &str = "bindguard diagnose";

/// The point for them. `policy`: the guard's action at a create.
pub fn subpaths(report: &NodeReport, policy: &Policy) -> Point {
    let is_repair = policy.stale_subpaths == Mode::Repair;
    let describe = |bind: &NodeBind| {
        let why = match bind.guarded {
            _ if !bind.would_be_repaired() => "",
            _ if !is_repair => {
                ", and [checks] stale-subpaths in config.toml keeps the guard from repairing it"
            }
            Some(false) => ", and its pod runs under another shim: no guard repairs it",
            Some(true) | None => "",
        };
        let path = bind.bind.source().display();
        format!("{path} is {}{why}", bind.bind.verdict())
    };
    // The first that only the operator repairs, and the first of which it is not known whether its
    // pod runs under the guard.
    let (mut count, mut of_operator, mut unknown) = (0, None, None);
    for bind in report.binds.iter().filter(|bind| bind.is_finding()) {
        count += 1;
        if !is_repair || !bind.would_be_repaired() || bind.guarded == Some(false) {
            of_operator = of_operator.or(Some(bind));
        } else if bind.guarded.is_none() {
            unknown = unknown.or(Some(bind));
        }
    }
    let checked = report.checked;
    if let Some(first) = of_operator {
        let message = format!("{count} of {checked} have findings: {}", describe(first));
        return Point::failed(SUBPATHS_NAME, message, NEXT);
    }
    if let Some(first) = unknown {
        let why = "no process shows whether its pod runs under the guard";
        return Point {
            command: Some(NEXT.to_owned()),
            ..Point::unknown(SUBPATHS_NAME, format!("{}, and {why}", describe(first)))
        };
    }
    if let Some(problem) = report.problems.first() {
        return Point::unknown(SUBPATHS_NAME, problem.clone());
    }
    let mut message = format!("{checked} subpaths and volumes checked");
    if count > 0 {
        message +=
            &format!("; {count} stale, the guard repairs each when its container is created next");
    }
    Point::ok(SUBPATHS_NAME, message)
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;
    use crate::namespaces::HeldBy;

    fn table(lines: &str) -> MountTable {
        MountTable::from_mountinfo(lines.as_bytes()).unwrap()
    }

    fn container(table: MountTable) -> Vec<NamespaceMounts> {
        let held_by = HeldBy::Process {
            pid: 7,
            command: "exporter".to_owned(),
            cgroup: String::new(),
        };
        vec![NamespaceMounts {
            id: 9,
            held_by,
            processes: 1,
            table: Ok(table),
        }]
    }

    fn of(host: &str, copy: &str) -> Point {
        pinned(
            &table(host),
            &container(table(copy)),
            &[],
            &Places::default(),
        )
    }

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 0:20 / /run rw shared:2 - tmpfs tmpfs rw\n";
    const NETNS: &str = "3 2 0:4 net:[1] /run/netns/cni-1 rw shared:3 - nsfs nsfs rw\n";
    const COPY: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n13 12 0:20 / /host/run rw - tmpfs tmpfs rw\n14 13 0:4 net:[1] /host/run/netns/cni-1 rw - nsfs nsfs rw\n15 11 0:60 / /proc rw - proc proc rw\n";

    #[test]
    fn a_private_copy_of_a_removed_mount_is_pinned() {
        assert_eq!(of(&format!("{HOST}{NETNS}"), COPY).status, PointStatus::Ok);
        assert_eq!(
            of(HOST, COPY).command.as_deref(),
            Some("bindguard holders /run/netns/cni-1")
        );
        let another = NETNS
            .replace("net:[1]", "net:[2]")
            .replace("cni-1", "cni-2");
        assert_eq!(
            of(&format!("{HOST}{another}"), COPY).status,
            PointStatus::Failed,
            "all namespaces have one device"
        );
        let incomplete = MountTable::from_mountinfo_in_part(format!("{HOST}no mount\n").as_bytes());
        assert_eq!(
            pinned(
                &incomplete,
                &container(table(COPY)),
                &[],
                &Places::default()
            )
            .status,
            PointStatus::Unknown
        );
        let problems = ["no".to_owned()];
        assert_eq!(
            pinned(&table(HOST), &[], &problems, &Places::default()).status,
            PointStatus::Unknown
        );
    }

    #[test]
    fn a_umount_arrives_by_the_mount_below() {
        let receiving = |line: &str| COPY.replace(line, &line.replace("rw -", "rw master:2 -"));
        assert_eq!(
            of(HOST, &receiving("0:20 / /host/run rw -")).status,
            PointStatus::Ok
        );
        assert_eq!(
            of(HOST, &receiving("net:[1] /host/run/netns/cni-1 rw -")).status,
            PointStatus::Failed
        );
        let peer = COPY.replace("0:20 / /host/run rw -", "0:20 / /host/run rw shared:2 -");
        assert_eq!(of(HOST, &peer).status, PointStatus::Ok);
    }

    #[test]
    fn any_place_of_the_host_counts() {
        let kept = format!("{COPY}16 12 0:77 / /host/mnt/a rw - tmpfs a rw\n");
        let point = of(&format!("{HOST}{NETNS}"), &kept);
        assert_eq!(point.command.as_deref(), Some("bindguard holders /mnt/a"));
        let elsewhere = format!("{HOST}{NETNS}4 1 0:77 / /mnt/b rw shared:4 - tmpfs a rw\n");
        assert_eq!(
            of(&elsewhere, &kept).status,
            PointStatus::Ok,
            "the host has it at another place"
        );
    }

    fn with_a_task() -> String {
        format!(
            "{HOST}{NETNS}4 1 0:5 / /proc rw shared:5 - proc proc rw\n5 1 0:6 / /dev rw shared:6 - devtmpfs udev rw\n\
             6 1 0:90 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs rw shared:7 - overlay overlay rw\n"
        )
    }

    #[test]
    fn a_mount_of_a_runtime_or_a_container_was_never_the_hosts() {
        let host = with_a_task();
        for (what, lines) in [
            (
                "a mask on the host's /proc",
                "16 11 0:5 / /proc rw - proc proc rw\n17 16 0:77 / /proc/scsi ro - tmpfs tmpfs ro\n",
            ),
            (
                "shm on the host's /dev",
                "16 11 0:6 / /dev rw - devtmpfs udev rw\n17 16 0:77 / /dev/pts rw - devpts devpts rw\n",
            ),
            (
                "a container in its own emptyDir",
                "16 11 8:1 /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/docker /var/lib/docker rw - ext4 /dev/sda1 rw\n\
                 17 16 0:77 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw\n",
            ),
        ] {
            assert_eq!(
                of(&host, &format!("{COPY}{lines}")).status,
                PointStatus::Ok,
                "{what}"
            );
        }
    }

    /// The mounts of runc before it makes the root filesystem its root.
    #[test]
    fn mounts_on_a_root_filesystem_in_the_making_are_the_runtimes() {
        let host = with_a_task();
        let setting_up = "11 10 8:1 / / rw - ext4 /dev/sda1 rw\n\
             12 11 0:90 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs rw - overlay overlay rw\n\
             13 12 0:77 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs/dev rw - tmpfs tmpfs rw\n\
             14 12 0:6 /null /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs/null rw - devtmpfs udev rw\n";
        assert_eq!(of(&host, setting_up).status, PointStatus::Ok);
    }
}

#[cfg(test)]
mod subpaths_tests {
    use super::super::PointStatus;
    use super::*;
    use std::path::Path;

    use bindguard_core::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use bindguard_core::places::Places;
    use bindguard_core::policy::Scope;
    use bindguard_core::report::{BindReport, Outcome, PlannedAction};
    use bindguard_core::source::SourceKind;

    fn stale(guarded: Option<bool>, outcome: Option<Outcome>) -> NodeReport {
        let source = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0");
        let finding = Finding {
            bind: None,
            source: source.to_owned(),
            destination: None,
            kind: SourceKind::from_path(source, &Places::default(), Scope::default()),
            verdict: Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            },
        };
        let bind = BindReport { finding, outcome };
        let bind = NodeBind {
            bind,
            pod: None,
            container: None,
            origin: None,
            guarded,
            notes: Vec::new(),
            command: None,
        };
        NodeReport {
            binds: vec![bind],
            checked: 1,
            ..NodeReport::default()
        }
    }

    #[test]
    fn an_unchecked_subpath_is_not_good() {
        let of = |report: &NodeReport| subpaths(report, &Policy::default()).status;
        let problems = vec!["list /x: no".to_owned()];
        assert_eq!(
            of(&NodeReport {
                problems,
                ..NodeReport::default()
            }),
            PointStatus::Unknown
        );
        assert_eq!(of(&NodeReport::default()), PointStatus::Ok);
    }

    #[test]
    fn a_repairable_bind_is_no_fault_of_the_node() {
        let planned = || {
            Some(Outcome::Planned {
                action: PlannedAction::Rebind,
            })
        };
        let of = |report: &NodeReport| subpaths(report, &Policy::default());
        let guarded = of(&stale(Some(true), planned()));
        assert_eq!(guarded.status, PointStatus::Ok);
        assert!(
            guarded.message.contains("1 stale, the guard repairs"),
            "{guarded:?}"
        );
        let stock = of(&stale(Some(false), planned()));
        assert!(
            stock.status == PointStatus::Failed && stock.message.contains("another shim"),
            "{stock:?}"
        );
        assert_eq!(of(&stale(None, planned())).status, PointStatus::Unknown);
        assert_eq!(
            of(&stale(Some(true), None)).status,
            PointStatus::Failed,
            "the guard cannot repair it"
        );
        let report_only = Policy {
            stale_subpaths: Mode::Report,
            ..Policy::default()
        };
        assert_eq!(
            subpaths(&stale(Some(true), planned()), &report_only).status,
            PointStatus::Failed
        );
    }
}
