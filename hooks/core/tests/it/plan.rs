//! For any evidence about a subpath: the planned repair makes the subpath current; unreadable and
//! foreign binds get no plan.

use std::path::{Path, PathBuf};

use bindguard_core::evidence::{
    FileIdentity, FileKind, HostMount, Observed, Reach, SubpathEvidence, SubpathMount, Target,
    Volume,
};
use bindguard_core::judge::{
    Finding, PathInVolume, Pinning, Plan, Rebind, Remedy, RepairMethod, StaleCause, Verdict,
    judge_host_root, judge_subpath,
};
use bindguard_core::kubelet::{Plugin, TimestampDirectory, VolumeLayout, VolumeSubpath, Writer};
use bindguard_core::mount_table::{Device, FsType, MountRoot};
use bindguard_core::places::SourceKind;
use bindguard_core::policy::{Alarm, Kept, Mode, Policy};
use bindguard_core::spec::{RequestedPropagation, RootfsPropagation, SpecEdit};
use proptest::prelude::*;

const SUBPATH: &str = "/var/lib/kubelet/pods/u/volume-subpaths/v/c/0";
const PLACE: &str = "/fs/volumes/v";

fn observed<T: Clone + std::fmt::Debug + 'static>(
    seen: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Observed<T>> {
    prop_oneof![8 => seen.prop_map(Observed::Seen), 1 => Just(Observed::Absent), 1 => Just(Observed::Unreadable("EIO".into()))].boxed()
}

fn identity() -> impl Strategy<Value = FileIdentity> {
    let kind = prop_oneof![5 => Just(FileKind::File), 1 => Just(FileKind::Directory)];
    (1..4u64, kind).prop_map(|(inode, kind)| FileIdentity {
        device: 1,
        inode,
        kind,
    })
}

fn reach() -> impl Strategy<Value = Reach> {
    let refused = |number| {
        Just(Reach::Refused {
            number,
            words: "no".into(),
        })
    };
    prop_oneof![
        1 => Just(Reach::NotProbed),
        4 => Just(Reach::NotNeeded),
        2 => Just(Reach::Alive),
        1 => Just(Reach::Silent(700)),
        1 => refused(2),
        2 => refused(107),
    ]
}

fn timestamp() -> impl Strategy<Value = TimestampDirectory> {
    (0..3).prop_map(|n| {
        TimestampDirectory::from_name(format!("..2026_11_21_05_10_00.{n}").as_ref()).unwrap()
    })
}

fn device() -> impl Strategy<Value = Device> {
    prop_oneof![5 => Just(Device { major: 8, minor: 1 }), 1 => Just(Device { major: 0, minor: 44 })]
}

fn fs_type() -> impl Strategy<Value = FsType> {
    prop::sample::select(vec!["ext4", "tmpfs", "nfs4", "fuse.sshfs"])
        .prop_map(|name| FsType(name.into()))
}

prop_compose! {
    fn mount()(place in prop::sample::select(vec![PLACE, "/", "/elsewhere"]), timestamp in prop::option::of(timestamp()),
               deleted: bool, device in device(), fs_type in fs_type(), identity in observed(identity()),
               covers_its_equal: bool) -> SubpathMount {
        let payload = timestamp.map(|t| t.name().to_owned()).unwrap_or_default();
        let root = MountRoot { path: Path::new(place).join(payload).join("app.conf"), deleted };
        SubpathMount { root, device, fs_type, identity, covers_its_equal }
    }
}

prop_compose! {
    fn volume()(plugin in prop::sample::select(Plugin::all().collect::<Vec<_>>()), device in device(), fs_type in fs_type(),
                own in any::<bool>(), is_newer in any::<bool>()) -> Volume {
        let place = if own { "/" } else { PLACE };
        Volume { plugin, directory: "/var/lib/kubelet/pods/u/volumes/p/v".into(), device, fs_type, place: place.into(), is_mount_point: own, is_newer, layout: plugin.layout() }
    }
}

prop_compose! {
    fn evidence()(mount in observed(mount()), reach in reach(), volume in observed(volume()),
                  target in observed((prop::option::of(timestamp()), observed(identity())))) -> SubpathEvidence {
        let target = match target {
            Observed::Seen((timestamp, file)) => Observed::Seen(Target { timestamp, file }),
            Observed::Absent => Observed::Absent,
            Observed::Unreadable(why) => Observed::Unreadable(why),
        };
        SubpathEvidence { mount, reach, volume, target }
    }
}

fn subpath() -> VolumeSubpath {
    VolumeSubpath::from_path(Path::new(SUBPATH), [Path::new("/var/lib/kubelet")]).unwrap()
}

fn finding(verdict: Verdict) -> Finding {
    Finding {
        bind: Some(0),
        source: SUBPATH.into(),
        destination: Some("/etc/app.conf".into()),
        kind: SourceKind::Subpath(subpath()),
        verdict,
    }
}

/// The evidence after the current target was bound in place of the stale target.
fn rebound(before: &SubpathEvidence, sub_path: &Path) -> SubpathEvidence {
    let mut after = before.clone();
    let (Observed::Seen(mount), Observed::Seen(volume), Observed::Seen(target)) =
        (&mut after.mount, &before.volume, &before.target)
    else {
        panic!("planned without evidence: {before:?}");
    };
    let payload = target
        .timestamp
        .as_ref()
        .map(|t| PathBuf::from(t.name()))
        .unwrap_or_default();
    mount.root = MountRoot {
        path: volume.place.join(payload).join(sub_path),
        deleted: false,
    };
    mount.device = volume.device;
    mount.identity = target.file.clone();
    mount.covers_its_equal = false;
    after.reach = Reach::Alive;
    after
}

fn was_read(evidence: &SubpathEvidence) -> bool {
    matches!(&evidence.mount, Observed::Seen(mount) if matches!(mount.identity, Observed::Seen(_)))
        && matches!(&evidence.volume, Observed::Seen(_))
        && matches!(&evidence.target, Observed::Seen(target) if matches!(target.file, Observed::Seen(_)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn carrying_out_a_plan_leaves_nothing_to_do(evidence in evidence()) {
        let plan = Plan::from_findings(&[finding(judge_subpath(&subpath(), &evidence))], &Policy::default());
        for order in &plan.rebinds {
            prop_assert!(was_read(&evidence), "planned on what was not read: {evidence:?}");
            // The subpath of a payload is bound from the current payload, any other subpath from
            // its own path.
            let after = rebound(&evidence, &order.remedy.sub_path.path);
            let payload_is_whole = matches!(&evidence.target, Observed::Seen(t) if t.timestamp.is_some())
                == (order.remedy.writer == Writer::Kubelet);
            if payload_is_whole {
                prop_assert_eq!(judge_subpath(&subpath(), &after), Verdict::Current);
            }
        }
    }

    #[test]
    fn unreadable_evidence_is_never_stale_nor_planned(evidence in evidence()) {
        let verdict = judge_subpath(&subpath(), &evidence);
        if matches!(evidence.mount, Observed::Unreadable(_)) || matches!(evidence.volume, Observed::Unreadable(_)) {
            // The kernel marked the mount itself as deleted, which is sufficient: no runtime can
            // bind from this mount.
            let is_deleted = matches!(&evidence.mount, Observed::Seen(mount) if mount.root.deleted);
            let is_certain = is_deleted && matches!(verdict, Verdict::Stale { remedy: Err(_), .. });
            let is_stale = matches!(verdict, Verdict::Stale { .. } | Verdict::Orphaned { .. });
            prop_assert!(is_certain || !is_stale, "{verdict:?}");
        }
        if !was_read(&evidence) {
            prop_assert!(Plan::from_findings(&[finding(verdict)], &Policy::default()).is_empty());
        }
    }

    #[test]
    fn a_directory_is_never_bound_where_a_file_was(evidence in evidence()) {
        for order in Plan::from_findings(&[finding(judge_subpath(&subpath(), &evidence))], &Policy::default()).rebinds {
            let (Observed::Seen(mount), Observed::Seen(target)) = (&evidence.mount, &evidence.target) else { panic!() };
            let (Observed::Seen(shown), Observed::Seen(file)) = (&mount.identity, &target.file) else { panic!() };
            prop_assert_eq!(shown.kind, file.kind);
            prop_assert_eq!(order.remedy.method, RepairMethod::Rebind);
        }
    }

    #[test]
    fn a_repair_that_policy_excludes_is_not_planned(evidence in evidence()) {
        let policy = Policy { stale_subpaths: Mode::Report, ..Policy::default() };
        prop_assert!(Plan::from_findings(&[finding(judge_subpath(&subpath(), &evidence))], &policy).is_empty());
    }
}

#[test]
fn a_shared_bind_is_never_lowered() {
    let host = Observed::Seen(HostMount {
        mount_point: "/".into(),
        passes_umounts_on: true,
    });
    let judge = |requested, rootfs: &RootfsPropagation| {
        judge_host_root(requested, true, None, rootfs, true, &host)
    };
    assert_eq!(
        judge(RequestedPropagation::Shared, &RootfsPropagation::Unset),
        Verdict::Current
    );
    let beside = judge(
        RequestedPropagation::Private,
        &RootfsPropagation::Set("shared".into()),
    );
    let mut finding = finding(beside);
    finding.kind = SourceKind::HostRoot;
    assert_eq!(
        Plan::from_findings(&[finding], &Policy::default()).edits,
        [SpecEdit::BindRslave { bind: 0 }]
    );
}

#[test]
fn a_bind_without_the_mounts_below_keeps_none_alive() {
    let host = Observed::Seen(HostMount {
        mount_point: "/".into(),
        passes_umounts_on: true,
    });
    for requested in [
        RequestedPropagation::Nothing,
        RequestedPropagation::Private,
        RequestedPropagation::RecursiveSlave,
    ] {
        let judge = |is_recursive| {
            judge_host_root(
                requested,
                is_recursive,
                None,
                &RootfsPropagation::Unset,
                false,
                &host,
            )
        };
        assert_eq!(judge(false), Verdict::Current);
        assert!(matches!(judge(true), Verdict::Pinning(_)));
    }
}

#[test]
fn a_host_root_that_is_only_to_be_reported_is_not_edited() {
    let host = Observed::Seen(HostMount {
        mount_point: "/".into(),
        passes_umounts_on: true,
    });
    let mut finding = finding(judge_host_root(
        RequestedPropagation::Private,
        true,
        None,
        &RootfsPropagation::Unset,
        false,
        &host,
    ));
    finding.kind = SourceKind::HostRoot;
    for (host_root, edits) in [(Mode::Repair, 2), (Mode::Report, 0), (Mode::Off, 0)] {
        let plan = Plan::from_findings(
            std::slice::from_ref(&finding),
            &Policy {
                host_root,
                ..Policy::default()
            },
        );
        assert_eq!(plan.edits.len(), edits, "{host_root:?}: {plan:?}");
    }
}

/// A mount of another device can be an earlier mount of the same volume only if the volume is a
/// mount of that type.
#[test]
fn a_mount_of_another_filesystem_is_not_mapped_to_the_volume() {
    let evidence = |plugin: &str, is_mount_point, fs_type: &str, is_newer| {
        let file = |inode| FileIdentity {
            device: 1,
            inode,
            kind: FileKind::File,
        };
        let mount = SubpathMount {
            root: MountRoot {
                path: "/app.conf".into(),
                deleted: false,
            },
            device: Device {
                major: 0,
                minor: 44,
            },
            fs_type: FsType("ext4".into()),
            identity: Observed::Seen(file(1)),
            covers_its_equal: false,
        };
        let volume = Volume {
            plugin: Plugin::from_folder(plugin.as_ref()).unwrap(),
            directory: "/var/lib/kubelet/pods/u/volumes/p/v".into(),
            device: Device { major: 8, minor: 1 },
            fs_type: FsType(fs_type.into()),
            place: "/".into(),
            is_mount_point,
            is_newer,
            layout: VolumeLayout::Plain,
        };
        let target = Target {
            timestamp: None,
            file: Observed::Seen(file(2)),
        };
        let (mount, volume, target) = (
            Observed::Seen(mount),
            Observed::Seen(volume),
            Observed::Seen(target),
        );
        SubpathEvidence {
            mount,
            reach: Reach::NotNeeded,
            volume,
            target,
        }
    };
    let is_repaired = |evidence| {
        matches!(
            judge_subpath(&subpath(), &evidence),
            Verdict::Stale { remedy: Ok(_), .. }
        )
    };
    assert!(is_repaired(evidence(
        "kubernetes.io~local-volume",
        true,
        "ext4",
        true
    )));
    assert!(!is_repaired(evidence(
        "kubernetes.io~local-volume",
        true,
        "xfs",
        true
    )));
    assert!(!is_repaired(evidence(
        "kubernetes.io~empty-dir",
        true,
        "ext4",
        true
    )));
    assert!(!is_repaired(evidence(
        "kubernetes.io~empty-dir",
        false,
        "ext4",
        true
    )));
    // The volume was mounted before the subpath was bound: the subpath shows another filesystem.
    assert!(!is_repaired(evidence(
        "kubernetes.io~local-volume",
        true,
        "ext4",
        false
    )));
    assert!(!is_repaired(evidence(
        "kubernetes.io~empty-dir",
        true,
        "tmpfs",
        false
    )));
}

/// The name of a payload identifies it as older, even if an update failed to remove it.
#[test]
fn an_older_payload_is_detected_by_its_name() {
    let payload = |name: &str| TimestampDirectory::from_name(name.as_ref()).unwrap();
    let (shown, current) = (
        payload("..2026_11_21_05_10_00.1"),
        payload("..2026_11_21_05_10_01.2"),
    );
    let device = Device { major: 8, minor: 1 };
    let file = |inode| FileIdentity {
        device: 1,
        inode,
        kind: FileKind::File,
    };
    let root = MountRoot {
        path: Path::new(PLACE).join(shown.name()).join("app.conf"),
        deleted: false,
    };
    let fs_type = FsType("ext4".into());
    let mount = SubpathMount {
        root,
        device,
        fs_type: fs_type.clone(),
        identity: Observed::Seen(file(1)),
        covers_its_equal: false,
    };
    let volume = Volume {
        plugin: Plugin::from_folder("kubernetes.io~configmap".as_ref()).unwrap(),
        directory: "/var/lib/kubelet/pods/u/volumes/p/v".into(),
        device,
        fs_type,
        place: PLACE.into(),
        is_mount_point: false,
        is_newer: true,
        layout: VolumeLayout::Payload,
    };
    let target = Target {
        timestamp: Some(current.clone()),
        file: Observed::Seen(file(2)),
    };
    let (mount, volume, target) = (
        Observed::Seen(mount),
        Observed::Seen(volume),
        Observed::Seen(target),
    );
    let verdict = judge_subpath(
        &subpath(),
        &SubpathEvidence {
            mount,
            reach: Reach::NotNeeded,
            volume,
            target,
        },
    );
    let expected = StaleCause::OlderPayload { shown, current };
    assert!(
        matches!(&verdict, Verdict::Stale { cause, remedy: Ok(_) } if *cause == expected),
        "{verdict:?}"
    );
}

/// A name in a volume that containers write may lead anywhere by the time the runtime resolves it.
#[test]
fn a_spec_is_never_pointed_into_a_volume_that_containers_write() {
    for plugin in Plugin::all() {
        let remedy = Remedy {
            volume: "/v".into(),
            sub_path: PathInVolume {
                timestamp: None,
                path: "app.conf".into(),
            },
            writer: plugin.writer,
            layout: plugin.layout(),
            method: RepairMethod::Rebind,
        };
        let stale = finding(Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Ok(remedy),
        });
        let edit = Rebind::from_finding(&stale, &Policy::default())
            .unwrap()
            .spec_edit();
        assert_eq!(
            edit.is_some(),
            plugin.writer == Writer::Kubelet,
            "{plugin}: {edit:?}"
        );
    }
}

#[test]
fn an_rslave_host_root_bind_of_a_private_mount_is_still_reported() {
    let host = Observed::Seen(HostMount {
        mount_point: "/".into(),
        passes_umounts_on: false,
    });
    let verdict = judge_host_root(
        RequestedPropagation::RecursiveSlave,
        true,
        None,
        &RootfsPropagation::Set("rslave".into()),
        false,
        &host,
    );
    assert!(verdict.reason().unwrap().contains("private"), "{verdict:?}");
    assert!(Plan::from_findings(&[finding(verdict)], &Policy::default()).is_empty());
}

#[test]
fn a_source_that_was_not_probed_counts_as_dead_where_dead_ones_are_refused() {
    let refusal = |dead_sources| {
        let policy = Policy {
            dead_sources,
            ..Policy::default()
        };
        Plan::from_findings(&[finding(Verdict::NotProbed)], &policy).refusal
    };
    assert!(refusal(Alarm::Refuse).is_some_and(|why| why.contains("not probed")));
    assert_eq!((refusal(Alarm::Report), refusal(Alarm::Off)), (None, None));
}

#[test]
fn two_host_root_binds_get_an_edit_each_and_the_rootfs_one() {
    let pinning = |bind, is_bind, kept| Finding {
        bind: Some(bind),
        ..finding(Verdict::Pinning(Pinning {
            bind: is_bind,
            rootfs: true,
            private_mount: None,
            kept,
        }))
    };
    let findings = [
        pinning(1, true, None),
        pinning(3, true, None),
        pinning(4, false, None),
    ];
    let plan = Plan::from_findings(&findings, &Policy::default());
    assert_eq!(
        plan.edits,
        [
            SpecEdit::BindRslave { bind: 1 },
            SpecEdit::RootfsRslave,
            SpecEdit::BindRslave { bind: 3 },
        ]
    );
    assert_eq!(
        [0, 1, 2, 3, 4].map(|bind| plan.edits_bind(bind)),
        [false, true, false, true, false]
    );
    assert!(plan.edits_rootfs() && !plan.is_empty());
    let kept = Plan::from_findings(
        &[pinning(1, true, Some(Kept::ReadOnly))],
        &Policy::default(),
    );
    assert!(
        kept.is_empty() && !kept.edits_bind(1) && !kept.edits_rootfs(),
        "{kept:?}"
    );
}
