//! Sources whose FUSE daemon died: the guard detects them by their answer, and policy decides if
//! the container starts.

use std::fs;
use std::path::PathBuf;

use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::report::{Outcome, PlannedAction};
use bindguard_guard::{Attempt, admit, check_bundle};
use bindguard_testing::Fuse;
use bindguard_testing::{Pod, mount_of, own_namespace, test_if};
use nix::mount::{MntFlags, umount2};

/// A pod whose second bind is of a FUSE mount that lost its daemon.
fn pod_on_a_dead_daemon() -> Option<(Fuse, Pod)> {
    let mut fuse = Fuse::mounted()?;
    fuse.device = None;
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(&fuse.path(), "/data", "rprivate")]);
    Some((fuse, pod))
}

/// The verdict and the reason of the bind at this position.
fn verdict_of(pod: &Pod, policy: &Policy, position: usize) -> (&'static str, String) {
    let report = admit(&pod.bundle(), policy, &pod.places(), Attempt::First).report;
    (
        report.binds[position].verdict().as_str(),
        report.binds[position].reason().unwrap_or_default(),
    )
}

#[test_if(own_namespace)]
fn a_dead_daemon_is_detected_by_its_answer() {
    let Some((_fuse, pod)) = pod_on_a_dead_daemon() else {
        return;
    };
    let (verdict, reason) = verdict_of(&pod, &pod.policy(), 1);
    assert_eq!(verdict, "dead");
    // In its words: "Transport endpoint is not connected", from Linux 7 on "Connection refused".
    assert!(
        reason.contains("it answers: ") && reason.to_lowercase().contains("connect"),
        "{reason}"
    );
}

#[test_if(own_namespace)]
fn a_volume_of_a_dead_daemon_is_dead_and_not_just_mounted() {
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else {
        return;
    };
    let volume = pod
        .directory()
        .join("volumes/kubernetes.io~csi/pvc-1/mount");
    fs::create_dir_all(&volume).unwrap();
    bindguard_testing::bind(&fuse.path(), &volume);
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "dead");
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "unmounted");
}

#[test_if(own_namespace)]
fn policy_refuses_a_dead_source_or_does_not_look() {
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else {
        return;
    };
    let refuse = Policy {
        dead_sources: Alarm::Refuse,
        ..pod.policy()
    };
    let refusal = admit(&pod.bundle(), &refuse, &pod.places(), Attempt::First)
        .refusal
        .unwrap();
    assert!(
        refusal.contains(fuse.path().to_str().unwrap()) && refusal.contains("is dead"),
        "{refusal}"
    );
    // In a refused container nothing else is done, and a check reports that.
    pod.update(1);
    let outcomes: Vec<_> = check_bundle(&pod.bundle(), &refuse, &pod.places())
        .binds
        .into_iter()
        .map(|bind| bind.outcome)
        .collect();
    assert_eq!(
        outcomes,
        [
            None,
            Some(Outcome::Planned {
                action: PlannedAction::Refuse
            })
        ]
    );
    let binds = admit(&pod.bundle(), &refuse, &pod.places(), Attempt::First)
        .report
        .binds;
    let outcomes: Vec<_> = binds.into_iter().map(|bind| bind.outcome).collect();
    assert_eq!(outcomes, [None, Some(Outcome::Refused)]);
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "0");
    let off = Policy {
        dead_sources: Alarm::Off,
        ..pod.policy()
    };
    let admission = admit(&pod.bundle(), &off, &pod.places(), Attempt::First);
    assert_eq!((admission.refusal, admission.report.foreign), (None, 1));
}

/// A volume at this path of the pod, on the daemon's file system; the path that is mounted.
fn volume_on(fuse: &Fuse, pod: &Pod, below_volumes: &str) -> PathBuf {
    let volume = pod.directory().join("volumes").join(below_volumes);
    fs::create_dir_all(&volume).unwrap();
    bindguard_testing::bind(&fuse.path(), &volume);
    volume
}

#[test_if(own_namespace)]
fn each_check_is_independent_of_the_others() {
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else {
        return;
    };
    let volume = volume_on(&fuse, &pod, "kubernetes.io~csi/pvc-1/mount");
    let subpath = pod.directory().join("volume-subpaths/pvc-1/app/0");
    fs::create_dir_all(&subpath).unwrap();
    bindguard_testing::bind(&fuse.path(), &subpath);
    let only_dead = Policy {
        stale_subpaths: Mode::Off,
        host_root: Mode::Off,
        unmounted_volumes: Alarm::Off,
        dead_sources: Alarm::Refuse,
        ..pod.policy()
    };
    let only_unmounted = Policy {
        unmounted_volumes: Alarm::Refuse,
        dead_sources: Alarm::Off,
        ..only_dead
    };
    for source in [&volume, &subpath] {
        pod.write_spec(&[mount_of(source, "/data", "rprivate")]);
        let admission = admit(&pod.bundle(), &only_dead, &pod.places(), Attempt::First);
        assert!(
            admission.refusal.is_some_and(|why| why.contains("is dead")),
            "{source:?}: {:?}",
            admission.report
        );
        let admission = admit(
            &pod.bundle(),
            &only_unmounted,
            &pod.places(),
            Attempt::First,
        );
        let is_dead = admission
            .report
            .binds
            .iter()
            .any(|bind| bind.verdict().as_str() == "dead");
        assert_eq!((admission.refusal, is_dead), (None, false), "{source:?}");
    }
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    for source in [&volume, &subpath] {
        pod.write_spec(&[mount_of(source, "/data", "rprivate")]);
        let admission = admit(
            &pod.bundle(),
            &only_unmounted,
            &pod.places(),
            Attempt::First,
        );
        assert!(
            admission
                .refusal
                .is_some_and(|why| why.contains("not mounted")),
            "{source:?}: {:?}",
            admission.report
        );
    }
    // Neither check reports an updated key.
    pod.update(1);
    pod.write_spec(&[]);
    let admission = admit(
        &pod.bundle(),
        &only_unmounted,
        &pod.places(),
        Attempt::First,
    );
    assert_eq!(
        (admission.refusal, admission.report.foreign),
        (None, 1),
        "{:?}",
        admission.report.binds
    );
    umount2(&subpath, MntFlags::MNT_DETACH).unwrap();
}

/// A sidecar's mount on a shared emptyDir, a flexVolume driver's mount, and a global mount.
#[test_if(own_namespace)]
fn a_dead_daemon_is_detected_in_all_of_the_kubelets_folders() {
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else {
        return;
    };
    let (volumes, kubelet) = (
        pod.directory().join("volumes"),
        pod.directory().ancestors().nth(2).unwrap().to_owned(),
    );
    let places = [
        volumes.join("kubernetes.io~empty-dir/shared"),
        volumes.join("vendor~driver/disk"),
        kubelet.join("plugins/driver/globalmount"),
    ];
    for volume in places {
        fs::create_dir_all(&volume).unwrap();
        pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
        let admission = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First);
        assert_eq!(
            (admission.report.foreign, admission.report.binds.len()),
            (1, 1),
            "{volume:?}: {:?}",
            admission.report
        );
        bindguard_testing::bind(&fuse.path(), &volume);
        assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "dead", "{volume:?}");
        umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    }
}

/// The guard sends no request for a check that is off: a server that hangs costs nothing then.
#[test_if(own_namespace)]
fn a_volume_is_not_probed_when_the_check_is_off() {
    // If a test fails, its files are removed only once the daemon is dead.
    let pod = Pod::with_keys(0);
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    let volume = volume_on(&fuse, &pod, "kubernetes.io~csi/pvc-1/mount");
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    fuse.begin();
    let off = Policy {
        dead_sources: Alarm::Off,
        ..pod.policy()
    };
    assert_eq!(
        fuse.receives_a_request_during(|| verdict_of(&pod, &off, 0).0),
        ("current", false)
    );
    assert_eq!(
        fuse.receives_a_request_during(|| verdict_of(&pod, &pod.policy(), 0).0),
        ("dead", true)
    );
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
}
