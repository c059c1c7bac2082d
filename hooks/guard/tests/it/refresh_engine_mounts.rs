//! A share of the host that was mounted anew, in a container of Docker or Podman. Any user may have
//! made the path: the container must not get a mount that no bind gives it.

use crate::refresh_scene::running::{RunningContainer, RunningInits};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::{
    BoundMounts, REPLACE_TIMEOUT, RefreshAct, Refreshed, TuckRecords, refresh_container,
};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Folder, helper, mount_of, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::refresh_scene;

fn can_run() -> bool {
    let has_beneath = live::kernel() >= (6, 5);
    if !has_beneath {
        bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
    }
    has_beneath && refresh_scene::can_run()
}

/// `-v /mnt/p/share:/data`, where root alone may write `/mnt/p` and every folder above.
struct Scene {
    own: Folder,
}

impl Scene {
    /// In the namespace of the test, `/mnt` is a filesystem of its own.
    fn new() -> Self {
        mount_tmpfs("/mnt".as_ref());
        let scene = Self { own: Folder::new() };
        fs::create_dir_all(scene.share()).unwrap();
        for folder in ["bundle", "root"] {
            fs::create_dir(scene.own.path().join(folder)).unwrap();
        }
        scene.bind(&scene.share());
        scene.publish("1");
        scene
    }

    fn share(&self) -> PathBuf {
        "/mnt/p/share".into()
    }

    fn bind(&self, source: &Path) {
        let spec = json!({"mounts": [mount_of(source, "/data", "rprivate")]});
        let config = self.own.path().join("bundle/config.json");
        fs::write(config, spec.to_string()).unwrap();
    }

    fn publish(&self, content: &str) {
        mount_tmpfs(&self.share());
        fs::write(self.share().join("file"), content).unwrap();
    }

    fn mount_anew(&self, content: &str) {
        umount2(&self.share(), MntFlags::MNT_DETACH).unwrap();
        self.publish(content);
    }

    fn start(&self, more: Option<Inside>) -> Container {
        let data = Inside::of(self.share(), "data");
        let binds: Vec<Inside> = [data].into_iter().chain(more).collect();
        Container::start(&self.own.path().join("root"), &binds)
    }

    fn refresh(&self, container: &Container) -> Refreshed {
        let running = RunningInits(vec![RunningContainer {
            init: container.process.pid(),
            spec: Some(container.spec().clone()),
        }]);
        let bundle = self.own.path().join("bundle");
        let mounts = BoundMounts::of_engine(&bundle, &running, &Places::default(), None).unwrap();
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&mounts],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&self.own.path().join("tucks")),
        )
        .unwrap()
    }

    /// The reason of the refusal, and its path.
    fn refused(&self, container: &Container) -> (RefusedReason, String) {
        let refreshed = self.refresh(container);
        match refreshed.mounts[0].outcome.clone() {
            MountResult::Refused(Refused { reason, path, .. }) => {
                (reason, path.to_string_lossy().into_owned())
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The container renames a folder: in its own namespace the folder is no mount point.
fn rename_in(container: &Container, from: &str, to: &str) {
    container.run_inside(|| fs::rename(from, to).unwrap());
}

fn mount_tmpfs(place: &Path) {
    let (kind, none) = (Some("tmpfs"), MsFlags::empty());
    mount(kind, place, kind, none, Some("mode=755")).unwrap();
}

#[test_if(can_run)]
fn a_share_that_the_host_mounted_anew_arrives() {
    let scene = Scene::new();
    let container = scene.start(None);
    let before = container.mounts_at("/data");
    for content in ["2", "3"] {
        scene.mount_anew(content);
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("data/file").as_deref(), Some(content));
        assert_eq!(container.mounts_at("/data").len(), before.len());
    }
    assert!(scene.refresh(&container).mounts.is_empty());
}

#[test_if(can_run)]
fn a_path_that_a_user_may_change_is_refused() {
    let scene = Scene::new();
    let container = scene.start(None);
    scene.mount_anew("2");
    let folder = Path::new("/mnt/p");
    let share = "/mnt/p/share".to_owned();
    let expected = (RefusedReason::OtherFolderOfUser, share);
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(scene.refused(&container), expected);
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    chown(folder, Some(1000), None).unwrap();
    assert_eq!(scene.refused(&container), expected);
    assert_eq!(container.read("data/file").as_deref(), Some("1"));
    chown(folder, Some(0), None).unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 1);
}

/// A container renames the folder of another mount to the path: a mount point of the host does not
/// keep a container from that.
#[test_if(can_run)]
fn a_path_that_a_container_may_change_is_refused() {
    let scene = Scene::new();
    let container = scene.start(Some(Inside::writable("/mnt/p".into(), "parent")));
    fs::create_dir("/mnt/p/secret").unwrap();
    mount_tmpfs("/mnt/p/secret".as_ref());
    fs::write("/mnt/p/secret/file", "SECRET").unwrap();
    umount2(&scene.share(), MntFlags::MNT_DETACH).unwrap();
    fs::remove_dir(scene.share()).unwrap();
    rename_in(&container, "/parent/secret", "/parent/share");
    let led = fs::read_to_string(scene.share().join("file")).unwrap();
    assert_eq!(
        led, "SECRET",
        "the container leads the path to another mount"
    );
    let expected = RefusedReason::OtherFolderBelowWritableBind;
    assert_eq!(
        scene.refused(&container),
        (expected, "/mnt/p/share".to_owned())
    );
    assert_eq!(container.read("data/file").as_deref(), Some("1"));
}

#[test_if(can_run)]
fn a_link_on_the_way_is_not_followed() {
    let scene = Scene::new();
    symlink("/mnt/p", "/mnt/link").unwrap();
    scene.bind("/mnt/link/share".as_ref());
    let container = scene.start(None);
    scene.mount_anew("2");
    assert_eq!(scene.refresh(&container).replaced(), 0);
    assert_eq!(container.read("data/file").as_deref(), Some("1"));
}
