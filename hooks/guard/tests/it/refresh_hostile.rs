//! A container that changes its own mounts: they stay as they are, and nothing else is mounted.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::RefreshAct;
use bindguard_testing::live::Container;
use nix::mount::{MsFlags, mount};

use crate::refresh_scene::{Scene, can_run, method, methods};

/// The container mounted its own file over the subpath, or over the folder that it is in. (When the kubelet removes the old
/// file, the kernel detaches what is mounted on it: here the old payload is still there.)
#[test]
fn a_mount_of_the_container_over_it_stays() {
    if !can_run() {
        return;
    }
    for over in ["/etc/app/0", "/etc/app"] {
        let scene = Scene::with_keys(1);
        let own = scene.root.path().join("own");
        fs::create_dir(&own).unwrap();
        fs::write(own.join("0"), "7").unwrap();
        let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
            let source = if over == "/etc/app" { "/own" } else { "/own/0" };
            mount(Some(source), over, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        });
        let mounts = container.mounts();
        scene.pod.update_keeping_old(1);
        let refreshed = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
        assert!(!refreshed.is_current() && refreshed.replaced() == 0, "{over}: {refreshed:?}");
        assert_eq!((container.read("etc/app/0").as_deref(), container.mounts()), (Some("7"), mounts), "{over}");
    }
}

/// The mount table names a path; by the time of the refresh a symlink has a name on that path.
#[test]
fn a_symlink_on_the_way_is_never_followed() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    // The container renames the parent folder of its mount, and puts a symlink to another folder in its place.
    let inside = |path: &str| PathBuf::from(format!("/proc/{}/root/{path}", container.process.pid()));
    fs::create_dir_all(inside("trap")).unwrap();
    fs::write(inside("trap/0"), "9").unwrap();
    fs::rename(inside("etc/app"), inside("etc/moved")).unwrap();
    std::os::unix::fs::symlink("/trap", inside("etc/app")).unwrap();
    let mounts = container.mounts();
    scene.pod.update(1);
    let refreshed = scene.refresh(&container);
    // The mount table names the new path by now: the refresh follows the mount, not the name.
    assert_eq!(methods(&refreshed), [method()]);
    assert_eq!(refreshed.mounts[0].destination, Path::new("/etc/moved/0"));
    assert_eq!(container.read("etc/moved/0").as_deref(), Some("1"));
    assert_eq!(fs::read_to_string(inside("trap/0")).unwrap(), "9");
    assert_eq!(container.mounts(), mounts);
}

#[test]
fn a_container_that_unmounted_its_subpath_is_left_alone() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
        nix::mount::umount2("/etc/app/0", nix::mount::MntFlags::MNT_DETACH).unwrap();
    });
    let mounts = container.mounts();
    scene.pod.update(1);
    assert_eq!((scene.refresh(&container).subpaths, container.mounts()), (0, mounts));
    assert_eq!(container.read("etc/app/0").as_deref(), Some(""));
}
