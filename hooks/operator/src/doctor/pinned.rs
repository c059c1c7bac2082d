//! Filesystems that the host has unmounted and another mount namespace keeps: causes of "device or
//! resource busy".

use crate::host_mounts::HostMounts;
use crate::namespaces::NamespaceMounts;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::text::shell_word;

use super::Point;

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
    let tables = others
        .iter()
        .filter_map(|namespace| namespace.table.as_ref().ok());
    let mut found: Vec<_> = tables.flat_map(|table| host.pinned_by(table)).collect();
    found.sort();
    found.dedup();
    if let Some(first) = found.first() {
        let places: Vec<String> = found
            .iter()
            .take(NAMED)
            .map(|place| place.display().to_string())
            .collect();
        let more = found.len().checked_sub(NAMED).filter(|more| *more > 0);
        let more = more
            .map(|more| format!(" and {more} more"))
            .unwrap_or_default();
        let message = format!(
            "the host unmounted these, and other mount namespaces keep them: {}{more}",
            places.join(", ")
        );
        return Point::failed(
            NAME,
            message,
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
