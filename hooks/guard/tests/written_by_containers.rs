//! Subpaths of volumes that containers write: missing, replaced or mounted again, and those that must not be bound.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

#[path = "pod/namespace.rs"]
mod namespace;
#[allow(dead_code, reason = "it has no use for all of a scene")]
mod scene;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use bindguard_core::policy::{Alarm, FailedRepair, Policy, Vanished};
use bindguard_core::report::{Outcome, PlannedAction};
use bindguard_guard::check_bundle;
use namespace::{Folder, mount_of, own_namespace};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use scene::{Daemon, REBOUND, Scene, tmpfs};
use serde_json::json;

#[test]
fn a_file_that_was_replaced_is_bound_anew_wherever_the_volume_lies() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::create_dir(scene.volume.join("deep")).unwrap();
        let scene = scene.with_replaced("deep/app.conf");
        let would_be = check_bundle(&scene.bundle(), &scene.policy(), &scene.places());
        assert!(matches!(&would_be.binds[0].outcome, Some(Outcome::Planned { action: PlannedAction::Rebind })));
        let (verdict, _, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{}", scene.volume.display());
        assert_eq!(scene.content(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_file_that_is_gone_or_became_a_link_is_left_alone() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::write(scene.volume.join("app.conf"), "old").unwrap();
        let scene = scene.bound("app.conf");
        fs::remove_file(scene.volume.join("app.conf")).unwrap();
        let everything = Policy { vanished_directories: Vanished::Remake, ..scene.policy() };
        let (verdict, _, outcome) = scene.finding(&everything);
        assert_eq!((verdict, outcome), ("orphaned", None));
        symlink("/etc/passwd", scene.volume.join("app.conf")).unwrap();
        let (verdict, reason, outcome) = scene.finding(&everything);
        assert_eq!((verdict, outcome), ("stale", None), "{reason}");
        assert!(reason.contains("is deleted") && reason.contains("symlink"), "{reason}");
        let strict = Policy { failed_repairs: FailedRepair::Refuse, ..everything };
        let refusal = scene.admitted(&strict).refusal.unwrap();
        assert!(refusal.contains("symlink"), "{refusal}");
        assert_eq!(scene.content(), "old");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_directory_that_vanished_is_made_again_when_policy_says_so() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::create_dir_all(scene.volume.join("a/b")).unwrap();
        // No directory was bound through a link to a file.
        fs::write(scene.volume.join("log.1"), "").unwrap();
        symlink("log.1", scene.volume.join("log")).unwrap();
        let scene = scene.bound("a/b");
        fs::remove_dir_all(scene.volume.join("a")).unwrap();
        let (verdict, _, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("orphaned", None));
        assert!(fs::symlink_metadata(scene.volume.join("a")).is_err());

        let is_below_its_root = scene.volume.starts_with(scene.folder.path().join("kubelet"));
        chown(&scene.volume, Some(1234), Some(4321)).unwrap();
        fs::set_permissions(&scene.volume, fs::Permissions::from_mode(0o2770)).unwrap();
        let (verdict, _, outcome) = scene.finding(&Policy { vanished_directories: Vanished::Remake, ..scene.policy() });
        assert_eq!((verdict, outcome), ("orphaned", REBOUND));
        fs::write(scene.subpath().join("file"), "").unwrap();
        assert!(fs::metadata(scene.volume.join("a/b/file")).is_ok());
        let made = fs::metadata(scene.volume.join("a/b")).unwrap();
        if is_below_its_root {
            assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (1234, 4321, 0o2770));
        }
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

/// A deployment: `current` leads to the newest release, and the release that was bound is removed. The kubelet binds the
/// target of `current`; no file of the node records what the pod requested.
#[test]
fn a_release_that_was_bound_through_a_link_is_not_made_again() {
    if !own_namespace() {
        return;
    }
    let volumes: [fn() -> Scene; 2] = [|| Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path];
    // The whole release, and a folder of one that is still there.
    for (scene, below) in volumes.into_iter().flat_map(|volume| ["", "/conf"].map(|below| (volume(), below))) {
        let [bound, next] = ["releases/42", "releases/43"].map(|name| scene.volume.join(format!("{name}{below}")));
        let link = scene.volume.join("current");
        fs::create_dir_all(&bound).unwrap();
        symlink("releases/42", &link).unwrap();
        let scene = scene.bound(&format!("current{below}"));
        fs::remove_dir(&bound).unwrap();
        fs::create_dir_all(&next).unwrap();
        fs::remove_file(&link).unwrap();
        symlink("releases/43", &link).unwrap();
        let (verdict, _, outcome) = scene.finding(&Policy { vanished_directories: Vanished::Remake, ..scene.policy() });
        assert_eq!(verdict, "orphaned");
        let Some(Outcome::Failed { error }) = outcome else { panic!("{outcome:?}") };
        assert!(error.contains("current") && error.contains("symlink"), "{error}");
        assert!(fs::symlink_metadata(&bound).is_err(), "{} was made again", bound.display());
    }
}

#[test]
fn a_directory_is_not_made_where_something_else_is_in_the_way() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    fs::create_dir_all(scene.volume.join("a/b")).unwrap();
    let scene = scene.bound("a/b");
    fs::remove_dir_all(scene.volume.join("a")).unwrap();
    let elsewhere = Folder::new();
    symlink(elsewhere.path(), scene.volume.join("a")).unwrap();
    scene.finding(&Policy { vanished_directories: Vanished::Remake, ..scene.policy() });
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    assert_eq!(scene.mounts_at_subpath(), 1);
}

#[test]
fn a_claim_that_was_mounted_anew_is_bound_from_its_new_mount() {
    if !own_namespace() {
        return;
    }
    for plugin in ["kubernetes.io~local-volume", "kubernetes.io~empty-dir", "vendor~driver"] {
        let scene = Scene::of_plugin(plugin);
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "old").unwrap();
        let scene = scene.bound("state");
        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();

        let strict = Policy { unmounted_volumes: Alarm::Refuse, ..scene.policy() };
        let refusal = scene.admitted(&strict).refusal.unwrap();
        let kind = if plugin == "vendor~driver" { "flexVolume" } else { plugin };
        assert!(refusal.contains(kind) && refusal.contains("of pod uid-1 is not mounted"), "{refusal}");

        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "new").unwrap();
        let (verdict, reason, outcome) = scene.finding(&strict);
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
        assert!(reason.contains("mounted anew"), "{reason}");
        assert_eq!(scene.content(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_repair_that_fails_refuses_the_container_when_policy_says_so() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    tmpfs(&scene.volume);
    let scene = scene.with_replaced("app.conf");
    let change = |kind| mount(None::<&str>, &scene.volume, None::<&str>, kind, None::<&str>).unwrap();
    // open_tree(2) clones no unbindable mount.
    change(MsFlags::MS_UNBINDABLE);

    assert!(scene.admitted(&scene.policy()).refusal.is_none());
    let strict = Policy { failed_repairs: FailedRepair::Refuse, ..scene.policy() };
    let refusal = scene.admitted(&strict).refusal.unwrap();
    assert!(refusal.contains("is stale and could not be repaired") && refusal.contains("cloning"), "{refusal}");
    change(MsFlags::MS_SHARED);
    assert_eq!(scene.finding(&strict).2, REBOUND);
}

#[test]
fn a_pods_mode_is_followed_where_the_node_allows_it() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    let spec = json!({"mounts": [mount_of(&scene.subpath(), "/data", "rprivate")], "annotations": {"bindguard.io/mode": "report"}});
    fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();

    let mut open = scene.policy();
    open.pods_may.set_mode = true;
    assert_eq!(scene.finding(&open), ("stale", "the file it was bound from is deleted".to_owned(), None));
    let admission = scene.admitted(&scene.policy());
    assert_eq!(admission.report.binds[0].outcome, REBOUND);
    assert!(admission.report.problems[0].contains("bindguard.io/mode is not followed"), "{:?}", admission.report);
}

#[test]
fn a_subpath_of_a_daemon_that_died_is_bound_from_the_one_that_took_its_place() {
    if !own_namespace() {
        return;
    }
    let (old, new) = (Folder::new(), Folder::new());
    fs::write(old.path().join("state"), "old").unwrap();
    fs::write(new.path().join("state"), "new").unwrap();
    let mut scene = Scene::of_plugin("kubernetes.io~csi");
    let mount_point = scene.volume.join("mount");
    fs::create_dir(&mount_point).unwrap();
    let Some(first) = Daemon::showing(old.path(), &mount_point) else { return };
    scene.volume = mount_point.clone();
    let scene = scene.bound("state");
    assert_eq!(scene.finding(&scene.policy()), ("current", String::new(), None));

    drop(first);
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("dead", None), "{reason}");

    umount2(&mount_point, MntFlags::MNT_DETACH).unwrap();
    let second = Daemon::showing(new.path(), &mount_point).unwrap();
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
    assert!(reason.contains("its volume is alive"), "{reason}");
    assert_eq!(scene.content(), "new");
    assert_eq!(scene.mounts_at_subpath(), 1);
    drop(second);
}

/// The CSI driver unpublished it, and removed the directory that it had mounted on.
#[test]
fn a_subpath_of_an_unpublished_csi_volume_is_unmounted() {
    if !own_namespace() {
        return;
    }
    let mut scene = Scene::of_plugin("kubernetes.io~csi");
    fs::write(scene.volume.join("vol_data.json"), "{}").unwrap();
    let mount_point = scene.volume.join("mount");
    fs::create_dir(&mount_point).unwrap();
    scene.volume = mount_point.clone();
    tmpfs(&mount_point);
    fs::create_dir(mount_point.join("db")).unwrap();
    let scene = scene.bound("db");
    assert_eq!(scene.finding(&scene.policy()).0, "current");
    umount2(&mount_point, MntFlags::MNT_DETACH).unwrap();
    fs::remove_dir(&mount_point).unwrap();
    let (verdict, reason, _) = scene.finding(&scene.policy());
    assert_eq!(verdict, "unmounted", "{reason}");
    assert!(reason.contains("kubernetes.io~csi") && reason.contains("is not mounted"), "{reason}");
}

/// A sidecar that mounts a folder of the volume which it shares: the subpath lies behind that mount.
#[test]
fn a_subpath_behind_a_mount_within_its_volume_belongs_to_that_mount() {
    if !own_namespace() {
        return;
    }
    for plugin in ["kubernetes.io~empty-dir", "kubernetes.io~local-volume"] {
        let scene = Scene::of_plugin(plugin);
        if plugin == "kubernetes.io~local-volume" {
            tmpfs(&scene.volume);
        }
        let inner = scene.volume.join("s3");
        fs::create_dir(&inner).unwrap();
        // The file with the sub path's name in the volume itself is not meant.
        fs::write(scene.volume.join("state"), "of the volume").unwrap();
        tmpfs(&inner);
        fs::write(inner.join("state"), "old").unwrap();
        let scene = scene.bound("s3/state");
        let strict =
            Policy { unmounted_volumes: Alarm::Refuse, failed_repairs: FailedRepair::Refuse, ..scene.policy() };
        let found = scene.finding(&strict);
        assert_eq!(found, ("current", String::new(), None), "{plugin}");

        fs::remove_file(inner.join("state")).unwrap();
        fs::write(inner.join("state"), "new").unwrap();
        assert_eq!(scene.finding(&strict).2, REBOUND, "{plugin}");
        assert_eq!(scene.content(), "new", "{plugin}");
        assert_eq!(scene.mounts_at_subpath(), 1);
        umount2(&inner, MntFlags::MNT_DETACH).unwrap();
    }
}

/// A tmpfs that a sidecar mounted within a volume of medium Memory, whose own mount has the same type and a root of the same name.
#[test]
fn a_mount_within_the_volume_that_is_gone_is_not_taken_for_an_earlier_mount_of_the_volume() {
    if !own_namespace() {
        return;
    }
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
    assert_eq!((scene.content().as_str(), scene.mounts_at_subpath()), ("of the cache", 1));
}

/// A claim's volume has the name of its PersistentVolume. The kubelet does not check that no other volume of the pod has that
/// name.
#[test]
fn a_claim_is_distinguished_from_a_volume_of_the_same_name() {
    if !own_namespace() {
        return;
    }
    for plugin in ["kubernetes.io~local-volume", "vendor~driver"] {
        let scene = Scene::of_plugin(plugin);
        let volumes = scene.volume.ancestors().nth(2).unwrap().to_owned();
        for other in ["kubernetes.io~configmap", "kubernetes.io~empty-dir"] {
            fs::create_dir_all(volumes.join(other).join("data")).unwrap();
            fs::write(volumes.join(other).join("data/state"), "of another volume").unwrap();
        }
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "old").unwrap();
        let scene = scene.bound("state");
        assert_eq!(scene.finding(&scene.policy()), ("current", String::new(), None), "{plugin}");

        fs::remove_file(scene.volume.join("state")).unwrap();
        fs::write(scene.volume.join("state"), "replaced").unwrap();
        assert_eq!(scene.finding(&scene.policy()).2, REBOUND, "{plugin}");
        assert_eq!(scene.content(), "replaced", "{plugin}");

        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert!(verdict != "current" && outcome.is_none(), "{plugin}: {verdict} {reason}");
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "mounted anew").unwrap();
        let (_, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((outcome, scene.content().as_str()), (REBOUND, "mounted anew"), "{plugin}: {reason}");
    }
}

/// As the kubelet's AtomicWriter does it, and as drivers do that write secrets, certificates and identities.
fn write_payload(volume: &Path, timestamp: &str, content: &str) -> PathBuf {
    let payload = volume.join(timestamp);
    fs::create_dir(&payload).unwrap();
    fs::write(payload.join("tls.crt"), content).unwrap();
    symlink(timestamp, volume.join("..data_tmp")).unwrap();
    fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    payload
}

#[test]
fn a_volume_that_its_driver_writes_as_the_kubelet_does_is_read_as_the_kubelets() {
    if !own_namespace() {
        return;
    }
    for (plugin, below) in [("kubernetes.io~csi", "mount"), ("vendor~driver", "")] {
        let mut scene = Scene::of_plugin(plugin);
        scene.volume.push(below);
        fs::create_dir_all(&scene.volume).unwrap();
        tmpfs(&scene.volume);
        let first = write_payload(&scene.volume, "..2026_11_21_05_10_00.1", "first");
        symlink("..data/tls.crt", scene.volume.join("tls.crt")).unwrap();
        let scene = scene.bound("tls.crt");
        assert_eq!(scene.finding(&scene.policy()), ("current", String::new(), None), "{plugin}");

        let second = write_payload(&scene.volume, "..2026_11_21_05_10_00.2", "second");
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{plugin}: {reason}");
        assert!(reason.contains("shows the payload"), "{reason}");
        assert_eq!(scene.content(), "second");

        fs::remove_dir_all(first).unwrap();
        write_payload(&scene.volume, "..2026_11_21_05_10_00.3", "third");
        fs::remove_dir_all(second).unwrap();
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{plugin}: {reason}");
        assert_eq!((scene.content().as_str(), scene.mounts_at_subpath()), ("third", 1));
    }
}

/// A container can write such names: they lead only to files that it could have bound without them, and to nothing outside.
#[test]
fn a_payload_that_a_container_laid_out_leads_nowhere_else() {
    if !own_namespace() {
        return;
    }
    let elsewhere = Folder::new();
    fs::write(elsewhere.path().join("tls.crt"), "of the host").unwrap();
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    let first = write_payload(&scene.volume, "..2026_11_21_05_10_00.1", "first");
    let scene = scene.bound("..2026_11_21_05_10_00.1/tls.crt");
    fs::remove_file(scene.volume.join("..data")).unwrap();
    symlink(elsewhere.path(), scene.volume.join("..data")).unwrap();
    assert_eq!(scene.finding(&scene.policy()), ("current", String::new(), None));
    symlink(elsewhere.path(), scene.volume.join("..2026_11_21_05_10_00.2")).unwrap();
    fs::remove_file(scene.volume.join("..data")).unwrap();
    symlink("..2026_11_21_05_10_00.2", scene.volume.join("..data")).unwrap();
    fs::remove_dir_all(first).unwrap();
    assert_eq!(scene.finding(&scene.policy()).2, None);
    assert_eq!((scene.content().as_str(), scene.mounts_at_subpath()), ("first", 1));
}

/// A container would see the empty file that the kubelet made to have something to bind over.
#[test]
fn a_subpath_that_is_not_mounted_is_refused_when_policy_says_so() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    umount2(&scene.subpath(), MntFlags::MNT_DETACH).unwrap();
    let (verdict, _, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("unmounted", None));
    let strict = Policy { unmounted_volumes: Alarm::Refuse, ..scene.policy() };
    let refusal = scene.admitted(&strict).refusal.unwrap();
    assert!(refusal.contains(scene.subpath().to_str().unwrap()) && refusal.contains("nothing is mounted"), "{refusal}");
}

/// A driver that binds its own directory, which was removed since: mount(2) returns ENOENT, as for a subpath.
#[test]
fn a_volume_whose_own_source_was_deleted_is_stale() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~local-volume");
    let disk = scene.folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    namespace::bind(&disk, &scene.volume);
    let spec = json!({"mounts": [mount_of(&scene.volume, "/data", "rprivate")], "linux": {}});
    fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();
    assert_eq!(scene.finding(&scene.policy()).0, "current");
    fs::remove_dir(&disk).unwrap();
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", None), "{reason}");
    assert!(reason.contains("is deleted"), "{reason}");
    let strict = Policy { failed_repairs: FailedRepair::Refuse, ..scene.policy() };
    assert!(scene.admitted(&strict).refusal.is_some());
}
