//! Sources whose daemon is dead or never answers (containerd#10828): the guard reports them and never waits for them.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod fuse;
mod pod;

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::report::{Outcome, PlannedAction, Report};
use bindguard_guard::{Attempt, JournalEntry, admit, check_bundle, read_file, record};
use fuse::Fuse;
use nix::mount::{MntFlags, umount2};
use pod::{Pod, mount_of, own_namespace};

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
    (report.binds[position].verdict().as_str(), report.binds[position].reason().unwrap_or_default())
}

/// More than are probed side by side: there is no time for the last.
#[test]
fn a_source_for_which_no_time_is_left_is_unknown() {
    if !own_namespace() {
        return;
    }
    let Some(first) = Fuse::mounted() else { return };
    let silent: Vec<Fuse> = [first].into_iter().chain((1..40).filter_map(|_| Fuse::mounted())).collect();
    let pod = Pod::with_keys(1);
    let binds: Vec<_> = silent.iter().map(|fuse| mount_of(&fuse.path(), "/data", "rprivate")).collect();
    pod.write_spec(&binds);
    let (verdict, reason) = verdict_of(&pod, &pod.policy(), 40);
    assert_eq!(verdict, "unknown", "{reason}");
    assert!(reason.contains("not probed"), "{reason}");
}

#[test]
fn a_source_that_never_answers_is_reported_in_time_and_the_others_are_repaired() {
    if !own_namespace() {
        return;
    }
    let Some(mut fuse) = Fuse::mounted() else { return };
    let pod = Pod::with_keys(1);
    pod.write_spec(&[
        mount_of(&fuse.path(), "/root", "rprivate"),
        mount_of(&fuse.path().join("below"), "/below", "rprivate"),
    ]);
    pod.update(1);
    // A request that the daemon took and never answers: from here on SIGKILL does not reach a process that waits for it.
    fuse.take_request();

    // A waiting process gets another answer in the end, instead of none: then the test fails and does not hang.
    let device = fuse.device.take();
    let (over, wait) = mpsc::channel::<()>();
    let daemon = thread::spawn(move || {
        let _ = wait.recv_timeout(Duration::from_secs(300));
        drop(device);
    });
    let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
    drop(over);
    daemon.join().unwrap();
    let verdicts: Vec<_> = report.binds.iter().map(|bind| bind.verdict().as_str()).collect();
    assert_eq!(verdicts, ["stale", "dead", "dead"], "one that is silent hides no other: {report:?}");
    assert_eq!(report.binds[0].outcome, Some(Outcome::Rebound { tries: 1 }));
    assert!(report.binds[1].reason().unwrap().contains("did not answer within 700 ms"));
    assert!(report.binds[2].reason().unwrap().contains("did not answer within "));
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "1");
}

#[test]
fn after_a_source_that_never_answers_the_others_are_probed() {
    if !own_namespace() {
        return;
    }
    let (Some(one), Some(other)) = (Fuse::mounted(), Fuse::mounted()) else { return };
    let Some((dead, pod)) = pod_on_a_dead_daemon() else { return };
    pod.write_spec(&[&one, &other, &dead].map(|fuse| mount_of(&fuse.path().join("below"), "/data", "rprivate")));
    let verdicts = || -> Vec<_> {
        let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
        report.binds.into_iter().map(|bind| (bind.verdict().as_str(), bind.reason().unwrap_or_default())).collect()
    };
    let expected = |found: &[(&str, String)]| {
        let words = ["did not answer within 700 ms", "did not answer within", "it answers: "];
        found.len() == 4
            && found[1..].iter().zip(words).all(|((verdict, why), words)| *verdict == "dead" && why.contains(words))
    };
    // A machine may be too slow to probe all of them in the time of one create.
    let tries: Vec<_> = (0..5).map(|_| verdicts()).take_while(|found| !expected(found)).collect();
    assert!(tries.len() < 5, "{tries:?}");
}

#[test]
fn a_dead_daemon_is_detected_by_its_answer() {
    if !own_namespace() {
        return;
    }
    let Some((_fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let (verdict, reason) = verdict_of(&pod, &pod.policy(), 1);
    assert_eq!(verdict, "dead");
    // In its words: "Transport endpoint is not connected", from Linux 7 on "Connection refused".
    assert!(reason.contains("it answers: ") && reason.to_lowercase().contains("connect"), "{reason}");
}

#[test]
fn a_volume_of_a_dead_daemon_is_dead_and_not_just_mounted() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let volume = pod.directory().join("volumes/kubernetes.io~csi/pvc-1/mount");
    fs::create_dir_all(&volume).unwrap();
    pod::bind(&fuse.path(), &volume);
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "dead");
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "unmounted");
}

#[test]
fn policy_refuses_a_dead_source_or_does_not_look() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let refuse = Policy { dead_sources: Alarm::Refuse, ..pod.policy() };
    let refusal = admit(&pod.bundle(), &refuse, &pod.places(), Attempt::First).refusal.unwrap();
    assert!(refusal.contains(fuse.path().to_str().unwrap()) && refusal.contains("is dead"), "{refusal}");
    // In a refused container nothing else is done, and a check reports that.
    pod.update(1);
    let outcomes: Vec<_> =
        check_bundle(&pod.bundle(), &refuse, &pod.places()).binds.into_iter().map(|bind| bind.outcome).collect();
    assert_eq!(outcomes, [None, Some(Outcome::Planned { action: PlannedAction::Refuse })]);
    let binds = admit(&pod.bundle(), &refuse, &pod.places(), Attempt::First).report.binds;
    let outcomes: Vec<_> = binds.into_iter().map(|bind| bind.outcome).collect();
    assert_eq!(outcomes, [None, Some(Outcome::Refused)]);
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "0");
    let off = Policy { dead_sources: Alarm::Off, ..pod.policy() };
    let admission = admit(&pod.bundle(), &off, &pod.places(), Attempt::First);
    assert_eq!((admission.refusal, admission.report.foreign), (None, 1));
}

/// A volume at this path of the pod, on the daemon's file system; the path that is mounted.
fn volume_on(fuse: &Fuse, pod: &Pod, below_volumes: &str) -> PathBuf {
    let volume = pod.directory().join("volumes").join(below_volumes);
    fs::create_dir_all(&volume).unwrap();
    pod::bind(&fuse.path(), &volume);
    volume
}

#[test]
fn each_check_is_made_whatever_the_others_are() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let volume = volume_on(&fuse, &pod, "kubernetes.io~csi/pvc-1/mount");
    let subpath = pod.directory().join("volume-subpaths/pvc-1/app/0");
    fs::create_dir_all(&subpath).unwrap();
    pod::bind(&fuse.path(), &subpath);
    let only_dead = Policy {
        stale_subpaths: Mode::Off,
        host_root: Mode::Off,
        unmounted_volumes: Alarm::Off,
        dead_sources: Alarm::Refuse,
        ..pod.policy()
    };
    let only_unmounted = Policy { unmounted_volumes: Alarm::Refuse, dead_sources: Alarm::Off, ..only_dead };
    for source in [&volume, &subpath] {
        pod.write_spec(&[mount_of(source, "/data", "rprivate")]);
        let admission = admit(&pod.bundle(), &only_dead, &pod.places(), Attempt::First);
        assert!(admission.refusal.is_some_and(|why| why.contains("is dead")), "{source:?}: {:?}", admission.report);
        let admission = admit(&pod.bundle(), &only_unmounted, &pod.places(), Attempt::First);
        let is_dead = admission.report.binds.iter().any(|bind| bind.verdict().as_str() == "dead");
        assert_eq!((admission.refusal, is_dead), (None, false), "{source:?}");
    }
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    for source in [&volume, &subpath] {
        pod.write_spec(&[mount_of(source, "/data", "rprivate")]);
        let admission = admit(&pod.bundle(), &only_unmounted, &pod.places(), Attempt::First);
        assert!(admission.refusal.is_some_and(|why| why.contains("not mounted")), "{source:?}: {:?}", admission.report);
    }
    // A key that was updated is none of these two checks' business.
    pod.update(1);
    pod.write_spec(&[]);
    let admission = admit(&pod.bundle(), &only_unmounted, &pod.places(), Attempt::First);
    assert_eq!((admission.refusal, admission.report.foreign), (None, 1), "{:?}", admission.report.binds);
    umount2(&subpath, MntFlags::MNT_DETACH).unwrap();
}

/// A sidecar that mounts its filesystem on the emptyDir which it shares, another vendor's driver, a global mount.
#[test]
fn a_dead_daemon_is_detected_in_all_of_the_kubelets_folders() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let (volumes, kubelet) = (pod.directory().join("volumes"), pod.directory().ancestors().nth(2).unwrap().to_owned());
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
        pod::bind(&fuse.path(), &volume);
        assert_eq!(verdict_of(&pod, &pod.policy(), 1).0, "dead", "{volume:?}");
        umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    }
}

/// A kubelet whose directories lie on a server that hangs: the guard never walks there.
#[test]
fn a_kubelet_root_that_never_answers_is_reported_in_time() {
    if !own_namespace() {
        return;
    }
    let bundle = tempfile::tempdir().unwrap();
    let Some(mut fuse) = Fuse::mounted() else { return };
    fuse.take_request();
    let places = Places { kubelet_roots: vec![fuse.path()], ..Places::default() };
    let policy = Policy { dead_sources: Alarm::Refuse, ..Policy::default() };
    let source = fuse.path().join("pods/uid-1/volume-subpaths/conf/app/0");
    let spec = serde_json::json!({"mounts": [mount_of(&source, "/data", "rprivate")]});
    fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();

    let admission = admit(bundle.path(), &policy, &places, Attempt::First);
    assert_eq!(admission.report.binds[0].verdict().as_str(), "dead", "{:?}", admission.report);
    assert!(admission.refusal.is_some_and(|why| why.contains("did not answer")));
    assert_eq!(check_bundle(bundle.path(), &policy, &places).binds[0].verdict().as_str(), "dead");
}

#[test]
fn a_journal_that_never_answers_is_not_waited_for() {
    if !own_namespace() {
        return;
    }
    let Some(mut fuse) = Fuse::mounted() else { return };
    fuse.take_request();
    let entry = JournalEntry { id: None, attempt: 0, pid: None, report: &Report::default() };
    for name in ["journal.jsonl", "new/journal.jsonl"] {
        let why = record(&fuse.path().join(name), &entry).unwrap_err();
        let why = error_chain(&why);
        assert!(why.contains("did not answer within 300 ms"), "{why}");
    }
}

/// Every verb of a runtime reads the config: those of a running container, too.
#[test]
fn a_config_that_never_answers_is_not_waited_for() {
    if !own_namespace() {
        return;
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let version: Vec<u32> = release.split(['.', '-']).map_while(|number| number.parse().ok()).collect();
    if version < vec![6, 8] {
        return pod::skipped("before Linux 6.8 it is read as it is: docs/decisions/0017");
    }
    let Some(mut fuse) = Fuse::mounted() else { return };
    fuse.take_request();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("config.toml");
    std::os::unix::fs::symlink(fuse.path().join("config.toml"), &link).unwrap();
    for path in [fuse.path().join("config.toml"), link] {
        let error = read_file(&path, 1000).unwrap_err();
        assert!(error.to_string().contains("did not answer within 700 ms"), "{error}");
    }
}

/// The guard sends no request for a check that is off: a server that hangs costs nothing then.
#[test]
fn a_volume_is_not_probed_when_the_check_is_off() {
    if !own_namespace() {
        return;
    }
    // If a test fails, its files are removed only once the daemon is dead.
    let pod = Pod::with_keys(0);
    let Some(mut fuse) = Fuse::mounted() else { return };
    let volume = volume_on(&fuse, &pod, "kubernetes.io~csi/pvc-1/mount");
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    fuse.begin();
    let off = Policy { dead_sources: Alarm::Off, ..pod.policy() };
    assert_eq!(fuse.receives_a_request_during(|| verdict_of(&pod, &off, 0).0), ("current", false));
    assert_eq!(fuse.receives_a_request_during(|| verdict_of(&pod, &pod.policy(), 0).0), ("dead", true));
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
}
