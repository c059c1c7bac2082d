//! Binds of the spec within a volume that the host has mounted anew.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_core::refresh::RefusedReason;
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::RefreshAct;
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{Fuse, bind, mount_of, mount_tmpfs, mounts_of_host, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, failure, refusal};

/// A container with a volume at `/data`, an emptyDir at `/data/cache`, and a file in the latter.
struct Nested {
    scene: Scene,
    host: tempfile::TempDir,
}

impl Nested {
    fn new() -> Self {
        let nested = Self {
            scene: Scene::new(),
            host: tempfile::tempdir().unwrap(),
        };
        fs::create_dir_all(nested.cache()).unwrap();
        fs::write(nested.cache().join("0"), "7").unwrap();
        fs::write(nested.cache().join("settings"), "").unwrap();
        fs::write(nested.settings(), "of the host").unwrap();
        nested.add_places();
        let read_only = |source: &Path, destination: &str| {
            let mut spec = mount_of(source, destination, "rprivate");
            spec["options"] = ["rbind", "ro", "nosuid"].as_slice().into();
            spec
        };
        nested.scene.pod.write_spec(&[
            mount_of(&nested.scene.volume(), "/data", "rprivate"),
            read_only(&nested.cache(), "/data/cache"),
            read_only(&nested.settings(), "/data/cache/settings"),
        ]);
        nested.scene.admit();
        nested
    }

    /// Makes the mount points in the volume of now.
    fn add_places(&self) {
        fs::create_dir(self.scene.volume().join("cache")).unwrap();
    }

    fn cache(&self) -> PathBuf {
        let pod = self.scene.pod.directory();
        pod.join("volumes/kubernetes.io~empty-dir/cache")
    }

    fn settings(&self) -> PathBuf {
        self.host.path().join("settings")
    }

    fn start(&self, more: impl FnOnce()) -> Container {
        let binds = [
            Inside::of(self.scene.volume(), "data"),
            Inside::of(self.cache(), "data/cache"),
            Inside::of(self.settings(), "data/cache/settings"),
        ];
        Container::start_with(self.scene.root(), &binds, more)
    }

    fn mount_anew(&self, content: &str) {
        self.scene.mount_anew(content);
        self.add_places();
    }
}

fn assert_complete(container: &Container, content: &str) {
    let read = |path: &str| container.read(path);
    assert_eq!(read("data/0").as_deref(), Some(content));
    assert_eq!(read("data/cache/0").as_deref(), Some("7"));
    let settings = read("data/cache/settings");
    assert_eq!(settings.as_deref(), Some("of the host"));
}

#[test_if(can_run)]
fn binds_within_a_volume_come_along_with_their_restrictions() {
    let nested = Nested::new();
    let container = nested.start(|| {}).reading();
    assert_complete(&container, "1");
    let (mounts, cache) = (container.mounts(), container.mounts_at("/data/cache"));
    for content in ["2", "3"] {
        nested.mount_anew(content);
        let host = mounts_of_host();
        let refreshed = nested.scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_complete(&container, content);
        assert_eq!(container.mounts_at("/data/cache"), cache);
        assert!(container.propagation_at("/data/cache").is_empty());
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
        assert!(nested.scene.refresh(&container).mounts.is_empty(), "again");
    }
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
}

/// A lookup in a dead FUSE volume makes the kernel detach the mounts in it.
#[test_if(can_run)]
fn a_bind_that_is_gone_is_attached_again() {
    let lose = || umount2("/data/cache", MntFlags::MNT_DETACH).unwrap();
    let nested = Nested::new();
    let container = nested.start(lose);
    nested.mount_anew("2");
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert_complete(&container, "2");
    let cache = container.mounts_at("/data/cache");
    assert!(cache[0].1.starts_with("ro,nosuid"), "{cache:?}");

    // With a volume that is current.
    let nested = Nested::new();
    let container = nested.start(lose);
    let looked = nested.scene.act(&container, RefreshAct::Look);
    assert!(
        matches!(looked.mounts[..], [ref it] if matches!(it.outcome, MountResult::Stale)),
        "{looked:?}"
    );
    assert_eq!(nested.scene.refresh(&container).replaced(), 1);
    assert_complete(&container, "1");
    assert!(nested.scene.refresh(&container).mounts.is_empty(), "again");
}

/// The volume may be a bucket of a user: no mount point is made in it.
#[test_if(can_run)]
fn a_new_volume_without_the_place_of_a_bind_is_refused() {
    let links: [&dyn Fn(&Path); 3] = [&|_| {}, &|place| symlink("/", place).unwrap(), &|place| {
        fs::write(place, "a file").unwrap()
    }];
    for make_place in links {
        let nested = Nested::new();
        let container = nested.start(|| {});
        let mounts = container.mounts();
        nested.scene.mount_anew("2");
        let place = nested.scene.volume().join("cache");
        make_place(&place);
        let before = fs::symlink_metadata(&place).ok().map(|it| it.file_type());
        let refreshed = nested.scene.refresh(&container);
        assert!(
            failure(&refreshed).starts_with("prepare the nested mount at "),
            "{refreshed:?}"
        );
        assert_complete(&container, "1");
        assert_eq!(container.mounts(), mounts);
        let after = fs::symlink_metadata(&place).ok().map(|it| it.file_type());
        assert_eq!(after, before);
    }
}

/// A bind that is gone is no reason to leave the volume dead.
#[test_if(can_run)]
fn a_bind_that_is_gone_may_lack_its_place() {
    let nested = Nested::new();
    let container = nested.start(|| umount2("/data/cache", MntFlags::MNT_DETACH).unwrap());
    nested.scene.mount_anew("2");
    nested.scene.refresh(&container);
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    assert!(container.mounts_at("/data/cache").is_empty());
    let refreshed = nested.scene.refresh(&container);
    assert!(
        failure(&refreshed).starts_with("prepare the nested mount at "),
        "{refreshed:?}"
    );
}

#[test_if(can_run)]
fn a_mount_of_the_container_within_the_volume_is_not_lost() {
    for place in ["/data/cache", "/data/own", "/data/cache/own"] {
        let nested = Nested::new();
        for own in [
            nested.scene.volume().join("own"),
            nested.cache().join("own"),
        ] {
            fs::create_dir(own).unwrap();
        }
        let container = nested.start(|| {
            if place == "/data/cache" {
                umount2(place, MntFlags::MNT_DETACH).unwrap();
            }
            mount_tmpfs(Path::new(place));
        });
        let before = container.mounts_at(place);
        nested.mount_anew("2");
        let refreshed = nested.scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
        assert_eq!(container.mounts_at(place), before);
        assert_eq!(container.read("data/0").as_deref(), Some("1"));
    }
}

/// The walk to a place in the new volume may wait for a daemon forever.
#[test_if(can_run)]
fn a_place_behind_a_daemon_that_hangs_is_refused_in_time() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.begin();
    let nested = Nested::new();
    let volume = mount_of(&nested.scene.volume(), "/data", "rprivate");
    let settings = mount_of(&nested.settings(), "/data/cache/settings", "rprivate");
    nested.scene.pod.write_spec(&[volume, settings]);
    let file = nested.scene.volume().join("cache/settings");
    fs::write(&file, "").unwrap();
    nested.scene.admit();
    let binds = [
        Inside::of(nested.scene.volume(), "data"),
        Inside::of(nested.settings(), "data/cache/settings"),
    ];
    let container = Container::start(nested.scene.root(), &binds);
    nested.mount_anew("2");
    let cache = nested.scene.volume().join("cache");
    bind(&fuse.path(), &cache);
    let refreshed = nested.scene.refresh(&container);
    assert!(
        failure(&refreshed).starts_with("the new mount did not answer within "),
        "{refreshed:?}"
    );
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
    drop(fuse.device.take());
    umount2(&cache, MntFlags::MNT_DETACH).unwrap();
}

/// A user with access to the folder on the host could have put another file there.
#[test_if(can_run)]
fn a_bind_whose_source_was_replaced_outside_of_the_pod_is_refused() {
    let nested = Nested::new();
    let container = nested.start(|| {});
    nested.mount_anew("2");
    fs::write(nested.host.path().join("new"), "another").unwrap();
    fs::rename(nested.host.path().join("new"), nested.settings()).unwrap();
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::NestedSource);
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
}

/// A copy of a tree of mounts lacks the unbindable mounts.
#[test_if(can_run)]
fn an_unbindable_bind_is_not_lost() {
    let nested = Nested::new();
    let none = None::<&str>;
    let make_unbindable = || {
        mount(none, "/data/cache", none, MsFlags::MS_UNBINDABLE, none).unwrap();
    };
    let container = nested.start(make_unbindable).reading();
    nested.mount_anew("2");
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::Unbindable);
    assert_complete(&container, "1");
    assert_eq!(container.stop().failed, 0);
}

/// Otherwise each round would replace the volume, and none would help.
#[test_if(can_run)]
fn a_current_volume_stays_if_the_source_of_its_lost_bind_is_refused() {
    let nested = Nested::new();
    let settings = "/data/cache/settings";
    let container = nested.start(|| umount2(settings, MntFlags::MNT_DETACH).unwrap());
    fs::write(nested.host.path().join("new"), "another").unwrap();
    fs::rename(nested.host.path().join("new"), nested.settings()).unwrap();
    let before = container.mounts_at("/data");
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::NestedSource);
    assert_eq!(container.mounts_at("/data"), before);
    assert!(container.mounts_at(settings).is_empty());
}

/// The kernel may attach a bind in a volume again, but the container may also have removed a bind.
#[test_if(can_run)]
fn a_lost_bind_comes_again_beside_one_that_is_refused() {
    let nested = Nested::new();
    let container = nested.start(|| umount2("/data/cache", MntFlags::MNT_DETACH).unwrap());
    fs::write(nested.host.path().join("new"), "another").unwrap();
    fs::rename(nested.host.path().join("new"), nested.settings()).unwrap();
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::NestedSource);
    assert_eq!(container.read("data/cache/0").as_deref(), Some("7"));
    assert_eq!(container.read("data/cache/settings").as_deref(), Some(""));
}

/// Two filesystems can use the same inode number.
#[test]
fn a_lost_bind_does_not_show_a_file_of_another_filesystem() {
    use std::os::unix::fs::MetadataExt;
    if !can_run() {
        return;
    }
    let nested = Nested::new();
    let publish = |content: &str| {
        mount_tmpfs(nested.host.path());
        fs::write(nested.settings(), content).unwrap();
        fs::metadata(nested.settings()).unwrap().ino()
    };
    let before = publish("of the host");
    nested.scene.admit();
    let settings = "/data/cache/settings";
    let container = nested.start(|| umount2(settings, MntFlags::MNT_DETACH).unwrap());
    assert_eq!(publish("another"), before);
    let refreshed = nested.scene.refresh(&container);
    assert_eq!(container.read(settings).as_deref(), Some(""));
    assert_eq!(refusal(&refreshed), RefusedReason::NestedSource);
    for _ in 0..2 {
        umount2(nested.host.path(), MntFlags::MNT_DETACH).unwrap();
    }
}
