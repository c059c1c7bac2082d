//! A re-bound subpath keeps the attributes of the mount that the kubelet binds from: read-only,
//! nosuid, nodev, noexec, nosymfollow and how access times are kept. A filesystem has many mounts,
//! and only one mount is the volume's.

use std::fs;
use std::path::Path;

use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{bind, own_namespace, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

fn strict() -> MsFlags {
    MsFlags::MS_RDONLY
        | MsFlags::MS_NOSUID
        | MsFlags::MS_NODEV
        | MsFlags::MS_NOEXEC
        | MsFlags::MS_NOATIME
}

/// `mount -o remount,bind,FLAGS`
fn remount(at: &Path, flags: MsFlags) {
    mount(
        None::<&str>,
        at,
        None::<&str>,
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags,
        None::<&str>,
    )
    .unwrap();
}

/// The attributes of the topmost mount at a path, as mountinfo has them.
fn attributes(at: &Path) -> String {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let mut here = table
        .lines()
        .filter(|line| line.split(' ').nth(4) == at.to_str());
    here.next_back()
        .unwrap()
        .split(' ')
        .nth(5)
        .unwrap()
        .to_owned()
}

/// Writes a new file in the place of the bound file, through a path where the volume is writable.
fn replace(folder: &Path) {
    let new = folder.join("new");
    fs::write(&new, "new").unwrap();
    fs::rename(&new, folder.join("state")).unwrap();
}

/// Admits; returns the attributes of the subpath before and after.
fn rebound(scene: &Scene) -> (String, String) {
    let before = attributes(&scene.subpath());
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
    assert_eq!(
        (scene.content().as_str(), scene.mounts_at_subpath()),
        ("new", 1)
    );
    (before, attributes(&scene.subpath()))
}

#[test_if(own_namespace)]
fn a_host_path_that_is_a_strict_bind_of_a_folder_stays_strict() {
    for nosymfollow in [MsFlags::empty(), MsFlags::from_bits_retain(256)] {
        let scene = Scene::of_host_path();
        let disk = scene.folder.path().join("disk");
        fs::create_dir_all(disk.join("deep")).unwrap();
        fs::write(disk.join("deep/state"), "old").unwrap();
        bind(&disk, &scene.volume);
        remount(&scene.volume, strict() | nosymfollow);
        let scene = scene.bound("deep/state");
        replace(&disk.join("deep"));
        let (before, now) = rebound(&scene);
        assert_eq!(now, before);
        assert!(now.starts_with("ro,nosuid,nodev,noexec"), "{now}");
    }
}

/// As on Container-Optimized OS: the disk is mounted noexec, a folder of it is bound with exec.
#[test_if(own_namespace)]
fn a_host_path_bound_with_exec_from_a_disk_that_is_noexec_stays_executable() {
    let scene = Scene::of_host_path();
    let disk = scene.folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    tmpfs(&disk);
    remount(&disk, MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID);
    fs::create_dir(disk.join("home")).unwrap();
    fs::write(disk.join("home/state"), "old").unwrap();
    bind(&disk.join("home"), &scene.volume);
    remount(&scene.volume, MsFlags::MS_NOSUID);
    let scene = scene.bound("state");
    replace(&disk.join("home"));
    let (before, now) = rebound(&scene);
    assert_eq!(now, before);
    assert!(!now.contains("noexec"), "{now}");
}

/// The mount that the kubelet binds from is unknown then: everything that was denied before stays
/// denied.
#[test_if(own_namespace)]
fn a_host_path_whose_own_mount_is_gone_is_not_bound_with_more_rights() {
    let scene = Scene::of_host_path();
    let disk = scene.folder.path().join("disk");
    fs::create_dir_all(disk.join("deep")).unwrap();
    fs::write(disk.join("deep/state"), "old").unwrap();
    bind(&disk, &scene.volume);
    remount(&scene.volume, strict());
    let scene = scene.bound("deep/state");
    replace(&disk.join("deep"));
    umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
    let (before, now) = rebound(&scene);
    assert_eq!(now, before);
}

#[test_if(own_namespace)]
fn a_host_path_whose_filesystem_became_read_only_everywhere_is_not_bound_writable() {
    let scene = Scene::of_host_path();
    tmpfs(&scene.volume);
    fs::create_dir(scene.volume.join("deep")).unwrap();
    fs::write(scene.volume.join("deep/state"), "old").unwrap();
    let scene = scene.bound("deep/state");
    replace(&scene.volume.join("deep"));
    remount(&scene.volume, MsFlags::MS_RDONLY);
    let (before, now) = rebound(&scene);
    assert!(
        before.starts_with("rw,") && now.starts_with("ro,"),
        "{before} became {now}"
    );
}

/// Sidecars share a folder of the volume read-only, or with the volume's own attributes.
#[test_if(own_namespace)]
fn a_mount_within_the_volume_is_distinguished_by_its_attributes() {
    for scene in Scene::with_and_without_a_mount() {
        let volume = scene.volume.clone();
        let [data, open, shared] = ["data", "open", "shared"].map(|name| scene.volume.join(name));
        for folder in [&data, &open, &shared] {
            fs::create_dir(folder).unwrap();
        }
        fs::write(data.join("state"), "old").unwrap();
        bind(&data, &open);
        bind(&data, &shared);
        remount(&shared, strict());
        let scene = scene.bound("shared/state");
        replace(&data);
        let (before, now) = rebound(&scene);
        assert_eq!(now, before, "{}", volume.display());
        for mount in [&shared, &open] {
            umount2(mount, MntFlags::MNT_DETACH).unwrap();
        }
    }
}

/// The kubelet binds from the directory of a volume, whatever it bound from earlier.
#[test_if(own_namespace)]
fn a_volume_that_was_remounted_since_gives_the_attributes_that_it_has_now() {
    let scene = Scene::of_plugin("kubernetes.io~local-volume");
    tmpfs(&scene.volume);
    fs::write(scene.volume.join("state"), "old").unwrap();
    let scene = scene.bound("state");
    replace(&scene.volume);
    remount(&scene.volume, strict());
    let expected = attributes(&scene.volume);
    let (before, now) = rebound(&scene);
    assert!(before.starts_with("rw,"), "{before}");
    assert_eq!(now, expected);
}
