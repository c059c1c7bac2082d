//! An idmapped volume whose new filesystem cannot be idmapped.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    BoundMounts, NotReplaced, RefreshAct, Refreshed, TuckRecords, refresh_container,
};
use bindguard_sys::replace::CloneError;
use bindguard_testing::hostile_process::slow_fuse;
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{helper, mounts_of_host};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_namespaces::idmap;
use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_attach_beneath, reason};

const SPEC: &str = r#"{"mounts":[{"destination":"/data",
    "uidMappings":[{"containerID":0,"hostID":100000,"size":65536}],
    "gidMappings":[{"containerID":0,"hostID":100000,"size":65536}]}]}"#;

/// A user namespace with these ids.
fn users() -> File {
    let mut sleep = Command::new("sleep");
    sleep.arg("1000000");
    // SAFETY: a single syscall, which uses neither the heap nor a lock.
    unsafe { sleep.pre_exec(|| Ok(unshare(CloneFlags::CLONE_NEWUSER)?)) };
    let mut sleep = sleep.spawn().unwrap();
    for map in ["uid_map", "gid_map"] {
        fs::write(format!("/proc/{}/{map}", sleep.id()), "0 100000 65536").unwrap();
    }
    let users = File::open(format!("/proc/{}/ns/user", sleep.id())).unwrap();
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    users
}

fn refresh(scene: &Scene, container: &Container) -> Refreshed {
    let mounts = BoundMounts::open(&scene.pod.bundle(), &scene.pod.directory()).unwrap();
    let records = TuckRecords::at(&scene.pod.places().kubelet_roots[0].join("tucks"));
    let spec = SpecUsers::from_spec(SPEC.as_bytes()).unwrap();
    refresh_container(
        helper(),
        &container.process,
        Some(&spec),
        &mounts,
        RefreshAct::Replace(Notify::None),
        &records,
    )
    .unwrap()
}

/// fuse(4): a daemon that does not set `FUSE_ALLOW_IDMAP`.
#[test]
fn a_new_filesystem_that_cannot_be_idmapped_is_refused() {
    if !can_attach_beneath() {
        return;
    }
    let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
        bindguard_testing::skipped("no /dev/fuse");
        return;
    };
    let scene = Scene::new();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mapped = open_tree(rustix::fs::CWD, scene.volume(), flags).unwrap();
    if let Err(why) = idmap(&mapped, &users()) {
        bindguard_testing::skipped(&format!("no idmapped tmpfs before Linux 6.3: {why}"));
        return;
    }
    let replace = || {
        umount2("/data", MntFlags::MNT_DETACH).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&mapped, c"", rustix::fs::CWD, "/data", flags).unwrap();
    };
    let data = [Inside::of(scene.volume(), "data")];
    let container = Container::start_keeping(scene.root(), &data, &[mapped.as_fd()], replace);
    assert!(container.mounts_at("/data")[0].1.contains("idmapped"));

    // A filesystem that can be idmapped.
    scene.mount_anew("2");
    let refreshed = refresh(&scene, &container);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert!(container.mounts_at("/data")[0].1.contains("idmapped"));

    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let (kind, none) = (Some("fuse"), MsFlags::empty());
    mount(kind, &scene.volume(), kind, none, Some(options.as_str())).unwrap();
    let _slow_down = slow_fuse::serve_after(Arc::new(device), Duration::ZERO);
    let before = (container.mounts(), container.mounts_at("/data"));
    let host = mounts_of_host();
    let refreshed = refresh(&scene, &container);
    assert!(
        matches!(
            reason(&refreshed),
            NotReplaced::Clone(CloneError::NotIdmappable { .. })
        ),
        "{refreshed:?}"
    );
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    assert_eq!((container.mounts(), container.mounts_at("/data")), before);
    assert_eq!(mounts_of_host(), host);
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
}
