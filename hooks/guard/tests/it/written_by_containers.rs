//! Subpaths of volumes that containers write: replaced, removed or unmounted, and repairs that fail
//! or that a pod declines.

use std::fs;
use std::os::unix::fs::symlink;

use bindguard_core::policy::{Alarm, FailedRepair, Policy, Vanished};
use bindguard_core::report::{Outcome, PlannedAction};
use bindguard_guard::check_bundle;
use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{mount_of, own_namespace, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

#[test_if(own_namespace)]
fn a_file_that_was_replaced_is_bound_anew_wherever_the_volume_lies() {
    for scene in [
        Scene::of_plugin("kubernetes.io~empty-dir"),
        Scene::of_host_path(),
    ] {
        fs::create_dir(scene.volume.join("deep")).unwrap();
        let scene = scene.with_replaced("deep/app.conf");
        let would_be = check_bundle(&scene.bundle(), &scene.policy(), &scene.places());
        assert!(matches!(
            &would_be.binds[0].outcome,
            Some(Outcome::Planned {
                action: PlannedAction::Rebind
            })
        ));
        let (verdict, _, outcome) = scene.finding(&scene.policy());
        assert_eq!(
            (verdict, outcome),
            ("stale", REBOUND),
            "{}",
            scene.volume.display()
        );
        assert_eq!(scene.content(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test_if(own_namespace)]
fn a_file_that_is_gone_or_became_a_link_is_left_alone() {
    for scene in [
        Scene::of_plugin("kubernetes.io~empty-dir"),
        Scene::of_host_path(),
    ] {
        fs::write(scene.volume.join("app.conf"), "old").unwrap();
        let scene = scene.bound("app.conf");
        fs::remove_file(scene.volume.join("app.conf")).unwrap();
        let everything = Policy {
            vanished_directories: Vanished::Remake,
            ..scene.policy()
        };
        let (verdict, _, outcome) = scene.finding(&everything);
        assert_eq!((verdict, outcome), ("orphaned", None));
        symlink("/etc/passwd", scene.volume.join("app.conf")).unwrap();
        let (verdict, reason, outcome) = scene.finding(&everything);
        assert_eq!((verdict, outcome), ("stale", None), "{reason}");
        assert!(
            reason.contains("is deleted") && reason.contains("symlink"),
            "{reason}"
        );
        let strict = Policy {
            failed_repairs: FailedRepair::Refuse,
            ..everything
        };
        let refusal = scene.admitted(&strict).refusal.unwrap();
        assert!(refusal.contains("symlink"), "{refusal}");
        assert_eq!(scene.content(), "old");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test_if(own_namespace)]
fn a_repair_that_fails_refuses_the_container_when_policy_says_so() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    tmpfs(&scene.volume);
    let scene = scene.with_replaced("app.conf");
    let change = |kind| {
        mount(
            None::<&str>,
            &scene.volume,
            None::<&str>,
            kind,
            None::<&str>,
        )
        .unwrap()
    };
    // open_tree(2) clones no unbindable mount.
    change(MsFlags::MS_UNBINDABLE);

    assert!(scene.admitted(&scene.policy()).refusal.is_none());
    let strict = Policy {
        failed_repairs: FailedRepair::Refuse,
        ..scene.policy()
    };
    let refusal = scene.admitted(&strict).refusal.unwrap();
    assert!(
        refusal.contains("is stale and could not be repaired")
            && refusal.contains("clone the mount of"),
        "{refusal}"
    );
    change(MsFlags::MS_SHARED);
    assert_eq!(scene.finding(&strict).2, REBOUND);
}

#[test_if(own_namespace)]
fn a_pods_mode_is_followed_where_the_node_allows_it() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    let spec = json!({"mounts": [mount_of(&scene.subpath(), "/data", "rprivate")], "annotations": {"bindguard.io/mode": "report"}});
    fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();

    let mut open = scene.policy();
    open.pods_may.set_mode = true;
    assert_eq!(
        scene.finding(&open),
        (
            "stale",
            "the file it was bound from is deleted".to_owned(),
            None
        )
    );
    let admission = scene.admitted(&scene.policy());
    assert_eq!(admission.report.binds[0].outcome, REBOUND);
    assert!(
        admission.report.problems[0].contains("bindguard.io/mode is not followed"),
        "{:?}",
        admission.report
    );
}

/// A container would see the empty file that the kubelet made to have something to bind over.
#[test_if(own_namespace)]
fn a_subpath_that_is_not_mounted_is_refused_when_policy_says_so() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    umount2(&scene.subpath(), MntFlags::MNT_DETACH).unwrap();
    let (verdict, _, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("unmounted", None));
    let strict = Policy {
        unmounted_volumes: Alarm::Refuse,
        ..scene.policy()
    };
    let refusal = scene.admitted(&strict).refusal.unwrap();
    assert!(
        refusal.contains(scene.subpath().to_str().unwrap())
            && refusal.contains("nothing is mounted"),
        "{refusal}"
    );
}
