//! Sources that never answer (containerd#10828): the guard reports them in time, and no file on a
//! silent source delays the guard: journal or config.

use std::fs;
use std::io::Read;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::{CreateLine, Outcome, Report};
use bindguard_guard::{Attempt, admit, check_bundle, read_file, record};
use bindguard_testing::Fuse;
use bindguard_testing::{Pod, mount_of, own_namespace, test_if};

/// More than are probed side by side: there is no time for the last.
#[test_if(own_namespace)]
fn a_source_for_which_no_time_is_left_is_unknown() {
    let Some(first) = Fuse::mounted() else { return };
    let silent: Vec<Fuse> = [first]
        .into_iter()
        .chain((1..40).filter_map(|_| Fuse::mounted()))
        .collect();
    let pod = Pod::with_keys(1);
    let binds: Vec<_> = silent
        .iter()
        .map(|fuse| mount_of(&fuse.path(), "/data", "rprivate"))
        .collect();
    pod.write_spec(&binds);
    let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
    let reason = report.binds[40].reason().unwrap_or_default();
    assert_eq!(report.binds[40].verdict().as_str(), "unknown", "{reason}");
    assert!(reason.contains("not probed"), "{reason}");
}

#[test_if(own_namespace)]
fn a_source_that_never_answers_is_reported_in_time_and_the_others_are_repaired() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    let pod = Pod::with_keys(1);
    pod.write_spec(&[
        mount_of(&fuse.path(), "/root", "rprivate"),
        mount_of(&fuse.path().join("below"), "/below", "rprivate"),
    ]);
    pod.update(1);
    // A request that the daemon took and never answers: from here on SIGKILL does not reach a
    // process that waits for it.
    fuse.take_request();

    // A waiting process gets a different answer in the end, instead of no answer: then the test
    // fails and does not hang.
    let device = fuse.device.take();
    let (over, wait) = mpsc::channel::<()>();
    let daemon = thread::spawn(move || {
        let _ = wait.recv_timeout(Duration::from_secs(300));
        drop(device);
    });
    let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
    drop(over);
    daemon.join().unwrap();
    let verdicts: Vec<_> = report
        .binds
        .iter()
        .map(|bind| bind.verdict().as_str())
        .collect();
    assert_eq!(
        verdicts,
        ["stale", "dead", "dead"],
        "one that is silent hides no other: {report:?}"
    );
    assert_eq!(report.binds[0].outcome, Some(Outcome::Rebound { tries: 1 }));
    assert!(
        report.binds[1]
            .reason()
            .unwrap()
            .contains("did not answer within 700 ms")
    );
    assert!(
        report.binds[2]
            .reason()
            .unwrap()
            .contains("did not answer within ")
    );
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "1");
}

#[test_if(own_namespace)]
fn after_a_source_that_never_answers_the_others_are_probed() {
    let (Some(one), Some(other), Some(mut dead)) =
        (Fuse::mounted(), Fuse::mounted(), Fuse::mounted())
    else {
        return;
    };
    dead.device = None;
    let pod = Pod::with_keys(1);
    pod.write_spec(
        &[&one, &other, &dead]
            .map(|fuse| mount_of(&fuse.path().join("below"), "/data", "rprivate")),
    );
    let verdicts = || -> Vec<_> {
        let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
        report
            .binds
            .into_iter()
            .map(|bind| (bind.verdict().as_str(), bind.reason().unwrap_or_default()))
            .collect()
    };
    let expected = |found: &[(&str, String)]| {
        let words = [
            "did not answer within 700 ms",
            "did not answer within",
            "it answers: ",
        ];
        found.len() == 4
            && found[1..]
                .iter()
                .zip(words)
                .all(|((verdict, why), words)| *verdict == "dead" && why.contains(words))
    };
    // A machine may be too slow to probe all sources in the time of a create.
    let began = Instant::now();
    loop {
        let found = verdicts();
        if expected(&found) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{found:?}");
    }
}

/// A kubelet whose directories lie on a server that hangs: the guard never walks there.
#[test_if(own_namespace)]
fn a_kubelet_root_that_never_answers_is_reported_in_time() {
    let bundle = tempfile::tempdir().unwrap();
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.take_request();
    let places = Places {
        kubelet_roots: vec![fuse.path()],
        ..Places::default()
    };
    let policy = Policy {
        dead_sources: Alarm::Refuse,
        ..Policy::default()
    };
    let source = fuse.path().join("pods/uid-1/volume-subpaths/conf/app/0");
    let spec = serde_json::json!({"mounts": [mount_of(&source, "/data", "rprivate")]});
    fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();

    let admission = admit(bundle.path(), &policy, &places, Attempt::First);
    assert_eq!(
        admission.report.binds[0].verdict().as_str(),
        "dead",
        "{:?}",
        admission.report
    );
    assert!(
        admission
            .refusal
            .is_some_and(|why| why.contains("did not answer"))
    );
    assert_eq!(
        check_bundle(bundle.path(), &policy, &places).binds[0]
            .verdict()
            .as_str(),
        "dead"
    );
}

#[test_if(own_namespace)]
fn a_journal_that_never_answers_is_not_waited_for() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.begin();
    let mut device = fuse.device.take().unwrap();
    let (over, wait) = mpsc::channel::<()>();
    // The daemon takes one request and never answers. If the test hangs, the daemon dies.
    let daemon = thread::spawn(move || {
        let _ = device.read(&mut [0; 8192]);
        let _ = wait.recv_timeout(Duration::from_secs(300));
    });
    let report = Report::default();
    // On a busy machine, 300 ms can end before the daemon has taken the request. And a process of
    // another test that hung can still end, with the number of this device.
    let began = Instant::now();
    let mut name = "journal.jsonl";
    loop {
        let why = record(&fuse.path().join(name), CreateLine::new(&report)).unwrap_err();
        let why = error_chain(&why);
        if why.contains("did not answer within 300 ms") {
            name = "new/journal.jsonl";
        } else {
            assert!(why.contains("an earlier request to its server"), "{why}");
            if name.starts_with("new") {
                break;
            }
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{why}");
    }
    drop(over);
    daemon.join().unwrap();
}

/// Every verb of a runtime reads the config: those of a running container, too.
#[test_if(own_namespace)]
fn a_config_that_never_answers_is_not_waited_for() {
    if bindguard_testing::is_before_linux_6_8() {
        return bindguard_testing::skipped(
            "before Linux 6.8 it is read as it is: docs/decisions/0017",
        );
    }
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.take_request();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("config.toml");
    std::os::unix::fs::symlink(fuse.path().join("config.toml"), &link).unwrap();
    for path in [fuse.path().join("config.toml"), link] {
        let error = read_file(&path, 1000).unwrap_err();
        assert!(
            error.to_string().contains("did not answer within 700 ms"),
            "{error}"
        );
    }
}
