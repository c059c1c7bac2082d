//! Subpaths behind a mount that a sidecar made inside of the volume which it shares.

use std::fs;

use bindguard_core::policy::{Alarm, FailedRepair, Policy};
use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{own_namespace, test_if};
use nix::mount::{MntFlags, umount2};

/// A sidecar mounts a folder of a shared volume: the subpath lies behind the sidecar's mount.
#[test_if(own_namespace)]
fn a_subpath_behind_a_mount_within_its_volume_belongs_to_that_mount() {
    for scene in Scene::with_and_without_a_mount() {
        let volume = scene.volume.clone();
        let inner = scene.volume.join("s3");
        fs::create_dir(&inner).unwrap();
        // The file with the sub path's name in the volume itself is not meant.
        fs::write(scene.volume.join("state"), "of the volume").unwrap();
        tmpfs(&inner);
        fs::write(inner.join("state"), "old").unwrap();
        let scene = scene.bound("s3/state");
        let strict = Policy {
            unmounted_volumes: Alarm::Refuse,
            failed_repairs: FailedRepair::Refuse,
            ..scene.policy()
        };
        let found = scene.finding(&strict);
        assert_eq!(
            found,
            ("current", String::new(), None),
            "{}",
            volume.display()
        );

        fs::remove_file(inner.join("state")).unwrap();
        fs::write(inner.join("state"), "new").unwrap();
        assert_eq!(scene.finding(&strict).2, REBOUND, "{}", volume.display());
        assert_eq!(scene.content(), "new", "{}", volume.display());
        assert_eq!(scene.mounts_at_subpath(), 1);
        umount2(&inner, MntFlags::MNT_DETACH).unwrap();
    }
}

/// A tmpfs that a sidecar mounted within a volume of medium Memory, whose own mount has the same
/// type and a root of the same name.
#[test_if(own_namespace)]
fn a_mount_within_the_volume_that_is_gone_is_not_taken_for_an_earlier_mount_of_the_volume() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    tmpfs(&scene.volume);
    let cache = scene.volume.join("cache");
    fs::create_dir(&cache).unwrap();
    for state in [scene.volume.join("state"), cache.join("state")] {
        fs::write(state, "of the volume").unwrap();
    }
    tmpfs(&cache);
    fs::write(cache.join("state"), "of the cache").unwrap();
    let scene = scene.bound("cache/state");
    umount2(&cache, MntFlags::MNT_DETACH).unwrap();
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", None), "{reason}");
    assert_eq!(
        (scene.content().as_str(), scene.mounts_at_subpath()),
        ("of the cache", 1)
    );
}
