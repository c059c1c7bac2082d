//! Idmapped volumes: with a mount in them, with a new filesystem that cannot be idmapped, and with
//! other ids than the container's.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, chown};
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{RefreshAct, Refreshed};
use bindguard_testing::hostile_process::slow_fuse;
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{mounts_of_host, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_namespaces::idmap;
use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, failure, refusal};

/// The spec of a container with root as its only user, and of a volume with these ids.
fn spec(ids: &str) -> String {
    let own = r#"[{"containerID":0,"hostID":0,"size":1}]"#;
    format!(
        r#"{{"linux":{{"namespaces":[{{"type":"user"}}],"uidMappings":{own},"gidMappings":{own}}},
            "mounts":[{{"destination":"/data","uidMappings":{ids},"gidMappings":{ids}}}]}}"#
    )
}

/// As containerd writes them for the volumes of a pod with `hostUsers: false`.
const OF_CONTAINER: &str = r#"[{"containerID":0,"hostID":0,"size":1}]"#;

const OTHER: &str = r#"[{"containerID":0,"hostID":100000,"size":65536}]"#;

/// A user that the container does not map, and the number of such a user in an idmapped mount.
const STRANGER: u32 = 200_000;
const NOBODY: u32 = 65_534;

/// A container whose volume is idmapped by its user namespace. `None`, with a printed reason, where
/// the kernel cannot do that.
fn start(scene: &Scene) -> Option<Container> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let flags = flags | OpenTreeFlags::AT_RECURSIVE;
    let mapped = open_tree(rustix::fs::CWD, scene.volume(), flags).unwrap();
    let data = [Inside::tree(scene.volume(), "data")];
    let container = Container::start_in_user_namespace(scene.root(), &data);
    let users = File::open(format!("/proc/{}/ns/user", container.process.pid())).unwrap();
    if let Err(why) = idmap(&mapped, &users) {
        bindguard_testing::skipped(&format!("no idmapped tmpfs before Linux 6.3: {why}"));
        return None;
    }
    container.run_inside(|| {
        umount2("/data", MntFlags::MNT_DETACH).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&mapped, c"", rustix::fs::CWD, "/data", flags).unwrap();
        live::change("/data".as_ref(), MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    });
    assert!(container.mounts_at("/data")[0].1.contains("idmapped"));
    Some(container)
}

fn refresh(scene: &Scene, container: &Container, ids: &str) -> Refreshed {
    let spec = SpecUsers::from_spec(spec(ids).as_bytes()).unwrap();
    let (mounts, act) = (scene.bound_mounts(), RefreshAct::Replace(Notify::None));
    scene.act_on_process(&container.process, &spec, &mounts, act)
}

/// As runc mounts a volume of a pod with `hostUsers: false`: `idmap` is for the top mount alone.
#[test_if(can_run)]
fn an_idmapped_volume_with_a_mount_in_it_arrives_by_propagation() {
    let scene = Scene::of_an_unprivileged_container("rprivate");
    scene.mount_below("1");
    let Some(container) = start(&scene) else {
        return;
    };
    let (mounts, host) = (container.mounts(), mounts_of_host().len());
    for content in ["2", "3"] {
        scene.mount_anew(content);
        live::change(&scene.volume(), MsFlags::MS_SHARED);
        scene.mount_below(content);
        for file in ["0", "nested/file"] {
            chown(scene.volume().join(file), Some(STRANGER), None).unwrap();
        }
        let refreshed = refresh(&scene, &container, OF_CONTAINER);
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
            assert_eq!(owner, if is_mapped { NOBODY } else { STRANGER }, "{place}");
        }
        let now = (container.mounts(), mounts_of_host().len());
        assert_eq!(now, (mounts, host));
    }
}

#[test_if(can_run)]
fn a_volume_with_other_ids_than_the_containers_is_refused() {
    let scene = Scene::of_an_unprivileged_container("rprivate");
    let Some(container) = start(&scene) else {
        return;
    };
    scene.mount_anew("2");
    let before = (container.mounts_at("/data"), mounts_of_host());
    // The last is a form of crun's.
    let of_crun = spec(OF_CONTAINER).replace(
        r#""destination":"/data","#,
        r#""destination":"/data","options":["idmap=uids=0-0-1"],"#,
    );
    let unnamed = spec(OF_CONTAINER).replace(r#""mounts""#, r#""other""#);
    for spec in [spec(OTHER), of_crun, unnamed] {
        let users = SpecUsers::from_spec(spec.as_bytes()).unwrap();
        let (mounts, act) = (scene.bound_mounts(), RefreshAct::Replace(Notify::None));
        let refreshed = scene.act_on_process(&container.process, &users, &mounts, act);
        assert_eq!(refusal(&refreshed), RefusedReason::OtherIds, "{spec}");
        let now = (container.mounts_at("/data"), mounts_of_host());
        assert_eq!(now, before, "{spec}");
    }
    let refreshed = refresh(&scene, &container, OF_CONTAINER);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
}

/// fuse(4): a daemon that does not set `FUSE_ALLOW_IDMAP`.
#[test_if(can_run)]
fn a_new_filesystem_that_cannot_be_idmapped_is_refused() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
        bindguard_testing::skipped("no /dev/fuse");
        return;
    };
    let scene = Scene::new();
    let Some(container) = start(&scene) else {
        return;
    };

    // A filesystem that can be idmapped.
    scene.mount_anew("2");
    let refreshed = refresh(&scene, &container, OF_CONTAINER);
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
    let refreshed = refresh(&scene, &container, OF_CONTAINER);
    assert!(
        failure(&refreshed).ends_with(" is on a filesystem that cannot be idmapped"),
        "{refreshed:?}"
    );
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    assert_eq!((container.mounts(), container.mounts_at("/data")), before);
    assert_eq!(mounts_of_host(), host);
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
}
