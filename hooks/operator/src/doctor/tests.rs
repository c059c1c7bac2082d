mod host_root_tests {
    use crate::doctor::*;

    #[test]
    fn private_is_bad() {
        let of = |tags: &str| {
            let line = format!("1 0 8:1 / / rw{tags} - ext4 /dev/sda1 rw\n");
            host_root(&MountTable::from_mountinfo(line.as_bytes()).unwrap()).status
        };
        assert_eq!(
            (of(" shared:1"), of(" master:1"), of("")),
            (PointStatus::Ok, PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(
            host_root(&MountTable::default()).status,
            PointStatus::Unknown
        );
    }
}

mod detach_mounts_tests {
    use crate::doctor::*;

    #[test]
    fn only_a_zero_is_bad() {
        let of = |text: &str| detach_mounts(&Observed::Seen(text.to_owned())).status;
        assert_eq!(
            (of("1\n"), of("0\n")),
            (PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(detach_mounts(&Observed::Absent).status, PointStatus::Ok);
        assert_eq!(
            detach_mounts(&Observed::Unreadable("no".to_owned())).status,
            PointStatus::Unknown
        );
    }
}

mod below_emptydirs_tests {
    use crate::doctor::*;

    #[test]
    fn a_mount_below_an_emptydir_is_reported_with_its_umount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/scratch";
        let point = |mount_point: &str, policy| {
            let text =
                format!("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / {mount_point} rw - ext4 b rw\n");
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            below_emptydirs(&table, &Places::default(), policy)
        };
        let found = point(&format!("{ED}/disk"), BelowEmptyDirs::Report);
        assert_eq!(found.status, PointStatus::Failed);
        assert_eq!(found.command, Some(format!("umount {ED}/disk")));
        // medium Memory
        let own = point(ED, BelowEmptyDirs::Report);
        assert_eq!(own.status, PointStatus::Ok);
        for policy in [BelowEmptyDirs::Off, BelowEmptyDirs::Detach] {
            let quiet = point(&format!("{ED}/disk"), policy);
            assert_eq!(quiet.status, PointStatus::Ok);
        }
    }
}

mod fuse_daemons_tests {
    use crate::doctor::*;

    fn process(pid: u32, cgroup: &str) -> Process {
        Process {
            pid,
            command: "sshfs".to_owned(),
            cgroup: cgroup.to_owned(),
        }
    }

    #[test]
    fn a_process_in_or_below_the_kubelets_cgroup_dies_with_it() {
        let kubelet = [process(1, "0::/system.slice/kubelet.service\n")];
        for (cgroup, state) in [
            ("0::/system.slice/kubelet.service\n", PointStatus::Failed),
            (
                "0::/system.slice/kubelet.service/below\n",
                PointStatus::Failed,
            ),
            ("0::/system.slice/kubelet.service-not\n", PointStatus::Ok),
            ("0::/system.slice/run-1.scope\n", PointStatus::Ok),
        ] {
            assert_eq!(
                fuse_daemons(&kubelet, &[process(7, cgroup)]).status,
                state,
                "{cgroup}"
            );
        }
        assert_eq!(
            fuse_daemons(&[], &[process(7, "0::/\n")]).status,
            PointStatus::Ok
        );
    }

    #[test]
    fn without_systemd_any_hierarchy_is_used() {
        let text = "5:pids:/n/node\n1:name=systemd:/\n0::/\n";
        assert_eq!(
            fuse_daemons(&[process(1, text)], &[process(7, text)]).status,
            PointStatus::Failed
        );
        let slice = "5:cpu:/system.slice\n1:name=systemd:/system.slice/kubelet.service\n";
        let other = "5:cpu:/system.slice\n1:name=systemd:/system.slice/sshfs.service\n";
        assert_eq!(
            fuse_daemons(&[process(1, slice)], &[process(7, other)]).status,
            PointStatus::Ok
        );
    }
}

mod pinned_tests {
    use crate::doctor::*;
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

    fn of(host: &str, copy: &str) -> Check {
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

mod subpaths_tests {
    use crate::doctor::*;
    use std::path::Path;

    use bindguard_core::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use bindguard_core::places::{Places, SourceKind};
    use bindguard_core::policy::Scope;
    use bindguard_core::report::{BindReport, Outcome, PlannedAction};

    use crate::node_report::NodeBind;

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
        let mut unread = stale(Some(true), None);
        unread.binds[0].bind.finding.verdict = Verdict::Unknown("why".to_owned());
        assert_eq!(of(&unread), PointStatus::Unknown);
    }

    #[test]
    fn each_finding_fails_and_its_cure_is_named() {
        let planned = || {
            Some(Outcome::Planned {
                action: PlannedAction::Rebind,
            })
        };
        let of = |report: &NodeReport| subpaths(report, &Policy::default());
        let guarded = of(&stale(Some(true), planned()));
        assert!(
            guarded.status == PointStatus::Failed && guarded.message.contains("the guard repairs"),
            "{guarded:?}"
        );
        let stock = of(&stale(Some(false), planned()));
        assert!(
            stock.status == PointStatus::Failed && stock.message.contains("another shim"),
            "{stock:?}"
        );
        assert_eq!(of(&stale(None, planned())).status, PointStatus::Failed);
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

mod containerd_tests {
    use crate::doctor::*;

    #[test]
    fn only_the_default_reaches_pods_that_are_created_anew() {
        let pods = RunningPods {
            all: 3,
            unguarded: 2,
        };
        assert!(
            pods.not_reached(true)
                .contains("until they are created anew")
        );
        let selected = pods.not_reached(false);
        assert!(
            selected.contains("2 of 3 running pods do not select it") && !selected.contains("anew"),
            "{selected}"
        );
    }

    fn seen(version: &str, entry: RuntimeEntry) -> ContainerdSeen {
        ContainerdSeen {
            version: version.to_owned(),
            runtimes: vec![entry],
            default_runtime: "runc".to_owned(),
            loaded: None,
            restart: "systemctl restart k3s".to_owned(),
            pods: RunningPods::default(),
            unusable: Vec::new(),
        }
    }

    #[test]
    fn a_file_that_the_running_containerd_has_not_read_is_no_guard() {
        let shim = RuntimeEntry {
            name: "bindguard".to_owned(),
            runtime_path: "/usr/local/bin/containerd-shim-bindguard-v2".to_owned(),
            ..RuntimeEntry::default()
        };
        let loaded = |runtimes: &[&str], default| {
            let runtimes = runtimes.iter().map(|name| (*name).to_owned()).collect();
            let loaded = GuardedRuntimes {
                daemon: "containerd",
                runtimes,
                default,
            };
            let default_runtime = "bindguard".to_owned();
            let seen = ContainerdSeen {
                loaded: Some(loaded),
                default_runtime,
                ..seen("2.1.9", shim.clone())
            };
            containerd(&seen)
        };
        assert_eq!(loaded(&["bindguard"], true).status, PointStatus::Ok);
        for (runtimes, said) in [
            (&[][..], "no new pod is guarded"),
            (&["bindguard"], "only if they select bindguard"),
        ] {
            let point = loaded(runtimes, false);
            assert!(point.message.contains(said), "{point:?}");
            assert_eq!(point.command.as_deref(), Some("systemctl restart k3s"));
        }
    }

    #[test]
    fn each_way_into_the_guard_counts() {
        let entry = RuntimeEntry {
            name: "bindguard".to_owned(),
            runtime_type: "io.containerd.runc.v2".to_owned(),
            runtime_path: "/usr/local/bin/containerd-shim-bindguard-v2".to_owned(),
            binary_name: String::new(),
            systemd_cgroup: false,
        };
        for version in ["1.7.24", "2.1.9"] {
            let status = containerd(&seen(version, entry.clone())).status;
            assert_eq!(status, PointStatus::Ok, "{version}");
        }
        let noexec = ContainerdSeen {
            unusable: vec!["/opt/x: Permission denied".to_owned()],
            ..seen("2.1.9", entry.clone())
        };
        assert_eq!(containerd(&noexec).status, PointStatus::Failed);
        let plain = RuntimeEntry {
            runtime_path: String::new(),
            ..entry
        };
        assert_eq!(
            containerd(&seen("2.1.9", plain.clone())).status,
            PointStatus::Failed
        );
        let wrapper = RuntimeEntry {
            binary_name: "/opt/bindguard-runtime".to_owned(),
            ..plain
        };
        assert_eq!(containerd(&seen("2.1.9", wrapper)).status, PointStatus::Ok);
    }

    #[test]
    fn the_cgroup_driver_is_runcs() {
        let runc = RuntimeEntry {
            name: "runc".to_owned(),
            systemd_cgroup: true,
            ..RuntimeEntry::default()
        };
        let entry = |systemd_cgroup| RuntimeEntry {
            name: "bindguard".to_owned(),
            runtime_path: "/bin/containerd-shim-bindguard-v2".to_owned(),
            systemd_cgroup,
            ..RuntimeEntry::default()
        };
        let gpu = RuntimeEntry {
            name: "nvidia".to_owned(),
            ..RuntimeEntry::default()
        };
        for (systemd_cgroup, more, state) in [
            (true, None, PointStatus::Ok),
            (false, None, PointStatus::Failed),
            (false, Some(gpu), PointStatus::Ok),
        ] {
            let runtimes = [runc.clone(), entry(systemd_cgroup)]
                .into_iter()
                .chain(more)
                .collect();
            let seen = ContainerdSeen {
                runtimes,
                ..seen("2.1.9", runc.clone())
            };
            assert_eq!(containerd(&seen).status, state);
        }
    }
}

mod programs_tests {
    use crate::doctor::*;

    fn seen(name: &str, found: Option<&str>) -> ProgramSeen {
        ProgramSeen {
            name: name.to_owned(),
            found: found.map(|message| (format!("/bin/{name}"), message.to_owned())),
        }
    }

    #[test]
    fn a_missing_program_or_another_version_is_bad() {
        let runc = seen("runc", Some("runc version 1.1.5"));
        let programs = |version: &str, ours: &[ProgramSeen], runtime: &ProgramSeen| {
            programs(version, ours, runtime, "6.12.0", &[])
        };
        let crun = seen("crun", Some("crun version 1.27"));
        assert_eq!(programs("0.2.0", &[], &crun).status, PointStatus::Failed);
        assert_eq!(
            programs("0.2.0", &[seen("shim", Some("shim 0.2.0"))], &runc).status,
            PointStatus::Ok
        );
        assert_eq!(
            programs("0.2.0", &[seen("shim", Some("shim 0.0.9"))], &runc).status,
            PointStatus::Failed
        );
        assert_eq!(
            programs("0.2.0", &[seen("shim", None)], &runc).status,
            PointStatus::Failed
        );
        assert!(
            programs("0.2.0", &[], &seen("runc", None))
                .message
                .contains("runc is not found")
        );
    }
}

mod guarded_tests {
    use serde_json::json;

    use crate::doctor::*;

    #[test]
    fn each_way_into_the_guard_is_found() {
        let config = json!({ "containerd": { "defaultRuntimeName": "wrapped", "runtimes": {
            "path": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "/b/containerd-shim-bindguard-v2" },
            "runc": { "runtimeType": "io.containerd.runc.v2", "runtimePath": "" },
            "typed": { "runtimeType": "io.containerd.bindguard.v2" },
            "wrapped": { "runtimeType": "io.containerd.runc.v2", "options": { "BinaryName": "/b/bindguard-runtime" } },
        } } });
        let found = GuardedRuntimes::of_containerd(&config);
        assert_eq!(found.runtimes, ["path", "typed", "wrapped"]);
        assert!(found.default);
        assert!(!GuardedRuntimes::of_containerd(&json!({ "containerd": {} })).default);
    }
}
