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
        Some((major, minor)) => MountsToFind::of_device(Device { major, minor }),
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
    let wanted = MountsToFind::of_device(Device { major: 8, minor: 2 });
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
    let table =
        |lines: &str| MountTable::from_mountinfo(lines.replace("$POD", POD).as_bytes()).unwrap();
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
