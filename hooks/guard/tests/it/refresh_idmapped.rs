//! Idmapped volumes: with a mount in them, and with a new filesystem that cannot be idmapped.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{NotReplaced, RefreshAct, Refreshed};
use bindguard_sys::replace::CloneError;
use bindguard_testing::hostile_process::slow_fuse;
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::mounts_of_host;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_namespaces::idmap;
use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, reason};

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

fn refresh(scene: &Scene, container: &Container, spec: &str) -> Refreshed {
    let spec = SpecUsers::from_spec(spec.as_bytes()).unwrap();
    let (mounts, act) = (scene.bound_mounts(), RefreshAct::Replace(Notify::None));
    scene.act_on_process(&container.process, &spec, &mounts, act)
}

/// As runc mounts a volume of a pod with `hostUsers: false`: `idmap` is for the top mount alone.
#[test]
fn an_idmapped_volume_with_a_mount_in_it_arrives_by_propagation() {
    if !can_run() {
        return;
    }
    let scene = Scene::of_an_unprivileged_container("rprivate");
    scene.mount_below("1");
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let flags = flags | OpenTreeFlags::AT_RECURSIVE;
    let mapped = open_tree(rustix::fs::CWD, scene.volume(), flags).unwrap();
    if let Err(why) = idmap(&mapped, &users()) {
        bindguard_testing::skipped(&format!("no idmapped tmpfs before Linux 6.3: {why}"));
        return;
    }
    let data = [Inside::tree(scene.volume(), "data")];
    let container = Container::start_in_user_namespace(scene.root(), &data);
    let (mounts, host) = (container.mounts(), mounts_of_host().len());
    container.run_inside(|| {
        umount2("/data", MntFlags::MNT_DETACH).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&mapped, c"", rustix::fs::CWD, "/data", flags).unwrap();
        live::change("/data".as_ref(), MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    });
    let ids = r#"[{"containerID":0,"hostID":0,"size":1}]"#;
    let linux = format!(
        r#"{{"linux":{{"namespaces":[{{"type":"user"}}],"uidMappings":{ids},"gidMappings":{ids}}},"#
    );
    let spec = SPEC.replacen('{', &linux, 1);
    for content in ["2", "3"] {
        scene.mount_anew(content);
        live::change(&scene.volume(), MsFlags::MS_SHARED);
        scene.mount_below(content);
        let refreshed = refresh(&scene, &container, &spec);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        for (place, file, is_mapped) in [
            ("/data", "data/0", true),
            ("/data/nested", "data/nested/file", false),
        ] {
            let at = container.mounts_at(place);
            assert_eq!(at.len(), 1, "{place}");
            assert_eq!(at[0].1.contains("idmapped"), is_mapped, "{place}: {at:?}");
            assert!(container.propagation_at(place).is_empty(), "{place}");
            assert_eq!(container.read(file).as_deref(), Some(content));
            let inside = format!("/proc/{}/root/{file}", container.process.pid());
            let owner = fs::metadata(inside).unwrap().uid();
            assert_eq!(owner, if is_mapped { 100_000 } else { 0 }, "{place}");
        }
        let now = (container.mounts(), mounts_of_host().len());
        assert_eq!(now, (mounts, host));
    }
}

/// fuse(4): a daemon that does not set `FUSE_ALLOW_IDMAP`.
#[test]
fn a_new_filesystem_that_cannot_be_idmapped_is_refused() {
    if !can_run() {
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
    let refreshed = refresh(&scene, &container, SPEC);
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
    let refreshed = refresh(&scene, &container, SPEC);
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
