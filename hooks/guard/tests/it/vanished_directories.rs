//! A subpath whose directory was removed from its volume: policy decides if the guard makes it
//! again, and links decide where.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

use bindguard_core::policy::{Policy, Vanished};
use bindguard_core::report::Outcome;
use bindguard_testing::scene::{REBOUND, Scene};
use bindguard_testing::{Folder, own_namespace, test_if};

#[test_if(own_namespace)]
fn a_directory_that_vanished_is_made_again_when_policy_says_so() {
    for scene in [
        Scene::of_plugin("kubernetes.io~empty-dir"),
        Scene::of_host_path(),
    ] {
        fs::create_dir_all(scene.volume.join("a/b")).unwrap();
        // No directory was bound through a link to a file.
        fs::write(scene.volume.join("log.1"), "").unwrap();
        symlink("log.1", scene.volume.join("log")).unwrap();
        let scene = scene.bound("a/b");
        fs::remove_dir_all(scene.volume.join("a")).unwrap();
        let (verdict, _, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("orphaned", None));
        assert!(fs::symlink_metadata(scene.volume.join("a")).is_err());

        let is_below_its_root = scene
            .volume
            .starts_with(scene.folder.path().join("kubelet"));
        chown(&scene.volume, Some(1234), Some(4321)).unwrap();
        fs::set_permissions(&scene.volume, fs::Permissions::from_mode(0o2770)).unwrap();
        let (verdict, _, outcome) = scene.finding(&Policy {
            vanished_directories: Vanished::Remake,
            ..scene.policy()
        });
        assert_eq!((verdict, outcome), ("orphaned", REBOUND));
        fs::write(scene.subpath().join("file"), "").unwrap();
        assert!(fs::metadata(scene.volume.join("a/b/file")).is_ok());
        let made = fs::metadata(scene.volume.join("a/b")).unwrap();
        if is_below_its_root {
            assert_eq!(
                (made.uid(), made.gid(), made.mode() & 0o7777),
                (1234, 4321, 0o2770)
            );
        }
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

/// A deployment: `current` leads to the newest release, and the release that was bound is removed.
/// The kubelet binds the target of `current`; no file of the node records what the pod requested.
#[test_if(own_namespace)]
fn a_release_that_was_bound_through_a_link_is_not_made_again() {
    let volumes: [fn() -> Scene; 2] = [
        || Scene::of_plugin("kubernetes.io~empty-dir"),
        Scene::of_host_path,
    ];
    // The whole release, and a folder of a release that is still there.
    for (scene, below) in volumes
        .into_iter()
        .flat_map(|volume| ["", "/conf"].map(|below| (volume(), below)))
    {
        let [bound, next] =
            ["releases/42", "releases/43"].map(|name| scene.volume.join(format!("{name}{below}")));
        let link = scene.volume.join("current");
        fs::create_dir_all(&bound).unwrap();
        symlink("releases/42", &link).unwrap();
        let scene = scene.bound(&format!("current{below}"));
        fs::remove_dir(&bound).unwrap();
        fs::create_dir_all(&next).unwrap();
        fs::remove_file(&link).unwrap();
        symlink("releases/43", &link).unwrap();
        let (verdict, _, outcome) = scene.finding(&Policy {
            vanished_directories: Vanished::Remake,
            ..scene.policy()
        });
        assert_eq!(verdict, "orphaned");
        let Some(Outcome::Failed { error }) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(
            error.contains("current") && error.contains("symlink"),
            "{error}"
        );
        assert!(
            fs::symlink_metadata(&bound).is_err(),
            "{} was made again",
            bound.display()
        );
    }
}

#[test_if(own_namespace)]
fn a_directory_is_not_made_where_something_else_is_in_the_way() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    fs::create_dir_all(scene.volume.join("a/b")).unwrap();
    let scene = scene.bound("a/b");
    fs::remove_dir_all(scene.volume.join("a")).unwrap();
    let elsewhere = Folder::new();
    symlink(elsewhere.path(), scene.volume.join("a")).unwrap();
    scene.finding(&Policy {
        vanished_directories: Vanished::Remake,
        ..scene.policy()
    });
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    assert_eq!(scene.mounts_at_subpath(), 1);
}
