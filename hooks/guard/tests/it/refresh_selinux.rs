//! SELinux: a volume that a container may not read does not replace the old volume.
//!
//! Needs the policy `integration/kernels/selinux.conf`, which a virtual machine of `make kernels`
//! enforces.

use std::fs;
use std::path::Path;

use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_testing::{mounts_of_host, skipped, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_scene::can_attach_beneath;
use crate::refresh_scene::volume::Scene;

/// False, with a printed reason, where the policy is not enforced.
fn has_policy() -> bool {
    let enforced = fs::read("/sys/fs/selinux/enforce").is_ok_and(|text| text == b"1");
    if !enforced {
        skipped("no SELinux policy is enforced");
    }
    enforced && can_attach_beneath()
}

/// From now on the calling process has the label of a container.
fn become_container() {
    let proc = Path::new("/proc");
    fs::create_dir_all(proc).unwrap();
    let (kind, none) = (Some("proc"), MsFlags::empty());
    mount(kind, proc, kind, none, None::<&str>).unwrap();
    fs::write("/proc/self/attr/current", "system_u:system_r:container_t").unwrap();
    umount2(proc, MntFlags::MNT_DETACH).unwrap();
}

/// The steps of a driver whose new mount has this label.
fn mount_anew(scene: &Scene, kind: &str) {
    let volume = scene.volume();
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    let label = format!("rootcontext=system_u:object_r:{kind}");
    let tmpfs = Some("tmpfs");
    mount(tmpfs, &volume, tmpfs, MsFlags::empty(), Some(&*label)).unwrap();
    fs::write(volume.join("0"), kind).unwrap();
}

#[test_if(has_policy)]
fn a_volume_that_the_container_may_not_read_is_refused() {
    let scene = Scene::new();
    let container = scene.start_with(become_container);
    mount_anew(&scene, "secret_t");
    let (mounts, shown) = (mounts_of_host(), container.mounts_at("/data"));
    let refreshed = scene.refresh(&container);
    let volume = scene.volume();
    let refused = Refused::new(RefusedReason::SelinuxDenies, volume);
    assert_eq!(refreshed.mounts[0].outcome, refused.into());
    assert_eq!(container.mounts_at("/data"), shown);
    assert_eq!(mounts_of_host(), mounts);

    mount_anew(&scene, "readable_t");
    let refreshed = scene.refresh(&container);
    assert!(refreshed.is_current(), "{refreshed:?}");
    assert_eq!(container.read("data/0").as_deref(), Some("readable_t"));
}

#[test_if(has_policy)]
fn the_label_of_the_container_decides() {
    let scene = Scene::new();
    // The container has the label of the node.
    let container = scene.start_with(|| {});
    mount_anew(&scene, "secret_t");
    let refreshed = scene.refresh(&container);
    assert!(refreshed.is_current(), "{refreshed:?}");
}
