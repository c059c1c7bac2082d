//! Subpaths of volumes whose own mount went away or was replaced: a claim, a FUSE daemon, a CSI
//! volume, a local disk.

use std::fs;

use bindguard_core::policy::{Alarm, FailedRepair, Policy};
use bindguard_testing::scene::{Daemon, REBOUND, Scene, tmpfs};
use bindguard_testing::{Folder, bind, own_namespace, test_if};
use nix::mount::{MntFlags, umount2};

#[test_if(own_namespace)]
fn a_claim_that_was_mounted_anew_is_bound_from_its_new_mount() {
    for plugin in [
        "kubernetes.io~local-volume",
        "kubernetes.io~empty-dir",
        "vendor~driver",
    ] {
        let scene = Scene::of_plugin(plugin);
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "old").unwrap();
        let scene = scene.bound("state");
        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();

        let strict = Policy {
            unmounted_volumes: Alarm::Refuse,
            ..scene.policy()
        };
        let refusal = scene.admitted(&strict).refusal.unwrap();
        let kind = if plugin == "vendor~driver" {
            "flexVolume"
        } else {
            plugin
        };
        assert!(
            refusal.contains(kind) && refusal.contains("of pod uid-1 is not mounted"),
            "{refusal}"
        );

        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "new").unwrap();
        let (verdict, reason, outcome) = scene.finding(&strict);
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
        assert!(reason.contains("mounted anew"), "{reason}");
        assert_eq!(scene.content(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

/// A claim's volume has the name of its PersistentVolume. The kubelet does not check that the name
/// is unique in the pod.
#[test_if(own_namespace)]
fn a_claim_is_distinguished_from_a_volume_of_the_same_name() {
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
        assert_eq!(
            scene.finding(&scene.policy()),
            ("current", String::new(), None),
            "{plugin}"
        );

        fs::remove_file(scene.volume.join("state")).unwrap();
        fs::write(scene.volume.join("state"), "replaced").unwrap();
        assert_eq!(scene.finding(&scene.policy()).2, REBOUND, "{plugin}");
        assert_eq!(scene.content(), "replaced", "{plugin}");

        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert!(
            verdict != "current" && outcome.is_none(),
            "{plugin}: {verdict} {reason}"
        );
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "mounted anew").unwrap();
        let (_, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!(
            (outcome, scene.content().as_str()),
            (REBOUND, "mounted anew"),
            "{plugin}: {reason}"
        );
    }
}

#[test_if(own_namespace)]
fn a_subpath_of_a_daemon_that_died_is_bound_from_the_one_that_took_its_place() {
    let (old, new) = (Folder::new(), Folder::new());
    fs::write(old.path().join("state"), "old").unwrap();
    fs::write(new.path().join("state"), "new").unwrap();
    let mut scene = Scene::of_plugin("kubernetes.io~csi");
    let mount_point = scene.volume.join("mount");
    fs::create_dir(&mount_point).unwrap();
    let Some(first) = Daemon::showing(old.path(), &mount_point) else {
        return;
    };
    scene.volume = mount_point.clone();
    let scene = scene.bound("state");
    assert_eq!(
        scene.finding(&scene.policy()),
        ("current", String::new(), None)
    );

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
#[test_if(own_namespace)]
fn a_subpath_of_an_unpublished_csi_volume_is_unmounted() {
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
    assert!(
        reason.contains("kubernetes.io~csi") && reason.contains("is not mounted"),
        "{reason}"
    );
}

/// A driver bound its own directory, and the directory was removed: mount(2) returns ENOENT, as for
/// a subpath.
#[test_if(own_namespace)]
fn a_volume_whose_own_source_was_deleted_is_stale() {
    let scene = Scene::of_plugin("kubernetes.io~local-volume");
    let disk = scene.folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    bind(&disk, &scene.volume);
    scene.write_spec(&[&scene.volume]);
    assert_eq!(scene.finding(&scene.policy()).0, "current");
    fs::remove_dir(&disk).unwrap();
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", None), "{reason}");
    assert!(reason.contains("is deleted"), "{reason}");
    let strict = Policy {
        failed_repairs: FailedRepair::Refuse,
        ..scene.policy()
    };
    assert!(scene.admitted(&strict).refusal.is_some());
}
