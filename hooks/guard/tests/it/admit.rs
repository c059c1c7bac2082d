//! An admission in a broken environment repairs the repairable binds, reports the rest, and loses
//! nothing.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, FailedRepair, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_guard::{Admission, Attempt, admit, check_bundle};
use bindguard_testing::{Pod, bind, mount_of, own_namespace, test_if};
use nix::mount::{MsFlags, mount};
use rustix::fs::{FlockOperation, flock};

fn admitted(pod: &Pod) -> Admission {
    admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First)
}

fn outcomes(report: &Report) -> Vec<Option<Outcome>> {
    report
        .binds
        .iter()
        .map(|bind| bind.outcome.clone())
        .collect()
}

#[test_if(own_namespace)]
fn admitting_twice_changes_nothing_the_second_time() {
    let pod = Pod::with_keys(2);
    pod.write_spec(&[mount_of(Path::new("/"), "/host", "rprivate")]);
    pod.update(1);
    assert!(
        outcomes(&check_bundle(&pod.bundle(), &pod.policy(), &pod.places()))
            .iter()
            .all(|o| matches!(o, Some(Outcome::Planned { .. })))
    );
    let rebound = Some(Outcome::Rebound { tries: 1 });
    assert_eq!(
        outcomes(&admitted(&pod).report),
        [rebound.clone(), rebound, Some(Outcome::MadeRslave)]
    );
    let spec = fs::read(pod.config()).unwrap();
    assert_eq!(outcomes(&admitted(&pod).report), [None, None, None]);
    assert_eq!(fs::read(pod.config()).unwrap(), spec);
    assert_eq!(fs::read_to_string(pod.subpath(1)).unwrap(), "1");
}

#[test]
fn an_invalid_spec_is_unchanged_and_reported() {
    let bundle = tempfile::tempdir().unwrap();
    let (config, policy) = (bundle.path().join("config.json"), Default::default());
    let deep = "[".repeat(200_000);
    let large = format!("{{\"x\":\"{}\"}}", "x".repeat(17 << 20));
    for (text, said) in [
        ("", "JSON object"),
        ("{\"mounts\": 7}", "mounts"),
        (&deep, "JSON object"),
        (&large, "16 MiB"),
    ] {
        fs::write(&config, text).unwrap();
        let admission = admit(bundle.path(), &policy, &Places::default(), Attempt::First);
        assert!(
            admission.report.problems[0].contains(said),
            "{:?}",
            admission.report.problems
        );
        assert!(!admission.worth_another_try && admission.refusal.is_none());
        assert!(fs::read_to_string(&config).unwrap() == text);
    }
}

#[test]
fn the_first_of_a_hundred_thousand_mounts_are_checked() {
    let said = "98000 mounts behind the first 2000 binds were not checked".to_owned();
    let bundle = tempfile::tempdir().unwrap();
    let mounts: Vec<_> = (0..100_000)
        .map(|n| mount_of(Path::new("/nowhere"), &format!("/{n}"), "rprivate"))
        .collect();
    fs::write(
        bundle.path().join("config.json"),
        serde_json::json!({ "mounts": mounts }).to_string(),
    )
    .unwrap();
    let admission = admit(
        bundle.path(),
        &Default::default(),
        &Default::default(),
        Attempt::First,
    );
    // A slow machine has no time to probe all binds.
    let unknown = admission
        .report
        .binds
        .iter()
        .filter(|bind| bind.verdict().as_str() == "unknown")
        .count();
    let checked = admission.report.foreign + unknown;
    assert_eq!(
        (checked, &admission.report.problems[..]),
        (2_000, &[said.clone()][..])
    );
    assert_eq!(admission.refusal, None);
    // The unchecked mounts may contain a bind that policy refuses.
    let strict = Policy {
        unmounted_volumes: Alarm::Refuse,
        ..Policy::default()
    };
    let refusal = admit(bundle.path(), &strict, &Places::default(), Attempt::First)
        .refusal
        .unwrap();
    assert!(refusal.contains(&said), "{refusal}");
}

#[test]
fn an_oversized_spec_is_refused_where_policy_refuses_anything() {
    let bundle = tempfile::tempdir().unwrap();
    fs::write(
        bundle.path().join("config.json"),
        format!("{{\"x\":\"{}\"}}", "x".repeat(17 << 20)),
    )
    .unwrap();
    for strict in [
        Policy {
            dead_sources: Alarm::Refuse,
            ..Policy::default()
        },
        Policy {
            failed_repairs: FailedRepair::Refuse,
            ..Policy::default()
        },
    ] {
        let refusal = admit(bundle.path(), &strict, &Places::default(), Attempt::First)
            .refusal
            .unwrap();
        assert!(refusal.contains("larger than 16 MiB"), "{refusal}");
    }
}

#[test_if(own_namespace)]
fn a_read_only_bundle_keeps_its_spec_and_its_mounts_are_repaired() {
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(Path::new("/"), "/host", "rprivate")]);
    pod.update(1);
    let spec = fs::read(pod.config()).unwrap();
    bind(&pod.bundle(), &pod.bundle());
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(
        None::<&str>,
        &pod.bundle(),
        None::<&str>,
        read_only,
        None::<&str>,
    )
    .unwrap();

    let outcomes = outcomes(&admitted(&pod).report);
    assert_eq!(outcomes[0], Some(Outcome::Rebound { tries: 1 }));
    assert!(
        matches!(&outcomes[1], Some(Outcome::Failed { error }) if error.contains("Read-only")),
        "{outcomes:?}"
    );
    assert_eq!(fs::read(pod.config()).unwrap(), spec);
    assert_eq!(fs::read_dir(pod.bundle()).unwrap().count(), 1);
}

/// Issue 14: every process that can read a directory can lock it, even a container with a read-only
/// hostPath.
#[test_if(own_namespace)]
fn a_reader_that_locks_the_pods_folders_delays_no_repair() {
    let pod = Pod::with_keys(12);
    pod.update(1);
    let folders = [
        pod.directory(),
        pod.volume(),
        pod.directory().join("volume-subpaths"),
    ];
    let readers = folders.map(|folder| File::open(folder).unwrap());
    readers
        .iter()
        .for_each(|reader| flock(reader, FlockOperation::LockExclusive).unwrap());
    let report = admitted(&pod).report;
    assert_eq!(
        outcomes(&report),
        vec![Some(Outcome::Rebound { tries: 1 }); 12]
    );
    // A wait for a lock takes seconds for each repair. On a busy machine all repairs take less.
    assert!(
        report.duration_us < 10_000_000,
        "12 repairs took {} us",
        report.duration_us
    );
}

#[test_if(own_namespace)]
fn a_create_is_worth_another_try_only_after_a_repair() {
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(Path::new("/nowhere"), "/foreign", "rprivate")]);
    assert!(!admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::Again).worth_another_try);
    pod.update(1);
    let again = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::Again);
    assert!(again.worth_another_try);
    // The volume may change again before the runtime mounts the bind. The runtime follows the
    // volume's own path.
    assert_eq!(
        outcomes(&again.report),
        [Some(Outcome::PointedAtVolume {
            source: pod.volume().join("0")
        })]
    );
    assert_eq!(
        fs::read_to_string(pod.subpath(0)).unwrap(),
        "1",
        "the mount is also repaired"
    );
    // Each try reads the names of the volume again.
    assert!(admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::Again).worth_another_try);
}

#[test_if(own_namespace)]
fn another_try_removes_the_files_of_a_killed_guard() {
    let pod = Pod::with_keys(1);
    let mut killed = std::process::Command::new("true").spawn().unwrap();
    killed.wait().unwrap();
    fs::write(
        pod.bundle()
            .join(format!(".config.json.bindguard-{}", killed.id())),
        "half",
    )
    .unwrap();
    admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::Again);
    let names = fs::read_dir(pod.bundle()).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["bindguard-binds.json", "config.json"]);
}

#[test_if(own_namespace)]
fn a_file_that_was_made_anew_within_the_current_payload_leaves_the_payload_alone() {
    let pod = Pod::with_keys(2);
    let file = pod.volume().join("..data/0");
    fs::remove_file(&file).unwrap();
    fs::write(&file, "anew").unwrap();
    assert_eq!(
        outcomes(&admitted(&pod).report),
        [Some(Outcome::Rebound { tries: 1 }), None]
    );
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "anew");
    assert_eq!(
        fs::read_to_string(&file).unwrap(),
        "anew",
        "the current payload is there"
    );
    assert_eq!(
        fs::read_to_string(pod.volume().join("..data/1")).unwrap(),
        "0"
    );
}

/// Whatever has the key's name: only a file on the payload's own mount was written by the kubelet.
#[test_if(own_namespace)]
fn a_link_or_a_mount_in_a_keys_place_is_not_bound() {
    let pod = Pod::with_keys(3);
    pod.update(1);
    let (link, mounted) = (pod.volume().join("..data/1"), pod.volume().join("..data/2"));
    fs::remove_file(&link).unwrap();
    symlink("0", &link).unwrap();
    bind(&pod.volume().join("..data/0"), &mounted);
    let report = admitted(&pod).report;
    let found: Vec<_> = report
        .binds
        .iter()
        .map(|bind| (bind.verdict().as_str(), bind.outcome.clone()))
        .collect();
    assert_eq!(
        found,
        [
            ("stale", Some(Outcome::Rebound { tries: 1 })),
            ("stale", None),
            ("stale", None)
        ]
    );
    let reason = |bind: usize| report.binds[bind].reason().unwrap();
    assert!(reason(1).contains("is a symlink"), "{}", reason(1));
    assert!(reason(2).contains("cross-device"), "{}", reason(2));
}
