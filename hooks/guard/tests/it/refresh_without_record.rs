//! A volume that was mounted anew, in a container whose create left no record: the agent alone is
//! installed, or the container is older than bindguard.
//!
//! A refresh may record the mounts that it makes itself, and the mount that it replaces. Who made
//! the other mounts of the container stays unknown.

use crate::release_copies::{is_not_recorded, is_without_record};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountEntry;
use bindguard_core::proof::EXPECTED_FILE;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::{
    BoundMounts, HeldProcess, HelperProcess, REPLACE_TIMEOUT, RefreshAct, Refreshed, Release,
    Released, TuckRecords, refresh_container,
};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{
    Pod, bind, helper, mount_of, mount_tmpfs, mounts_of_host, test_if, unmount,
};
use nix::mount::{MntFlags, MsFlags, umount2};

use crate::refresh_scene::host_root::{self, can_record};
use crate::refresh_scene::supervised::{MOUNT_CALLS, Work, begin, work_killed_after};
use crate::refresh_scene::volume;
use crate::refresh_scene::{can_attach_beneath, can_run};

/// The environment of the program.
const BUNDLE: &str = "BINDGUARD_TEST_BUNDLE";
const POD: &str = "BINDGUARD_TEST_POD_FOLDER";
const RECORDS: &str = "BINDGUARD_TEST_TUCKS";
const INIT: &str = "BINDGUARD_TEST_INIT";
const USERS: &str = "BINDGUARD_TEST_USERS";

/// More calls than the program makes.
const MAX_CALLS: u32 = 300;

/// A pod with the CSI volumes `a` and `b`, which its privileged container has at `/a` and `/b`.
struct Scene {
    pod: Pod,
    root: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            pod: Pod::with_keys(1),
            root: tempfile::tempdir().unwrap(),
        };
        for name in ["a", "b"] {
            fs::create_dir_all(scene.volume(name)).unwrap();
            scene.mount(name, "1");
        }
        let bind = |name: &str| mount_of(&scene.volume(name), &format!("/{name}"), "rprivate");
        scene.pod.write_spec(&["a", "b"].map(bind));
        scene
    }

    fn volume(&self, name: &str) -> PathBuf {
        let volumes = self.pod.directory().join("volumes/kubernetes.io~csi");
        volumes.join(name).join("mount")
    }

    fn mount(&self, name: &str, content: &str) {
        mount_tmpfs(&self.volume(name));
        fs::write(self.volume(name).join("0"), content).unwrap();
        fs::create_dir(self.volume(name).join("own")).unwrap();
    }

    fn mount_anew(&self, name: &str, content: &str) {
        umount2(&self.volume(name), MntFlags::MNT_DETACH).unwrap();
        self.mount(name, content);
    }

    fn start(&self) -> Container {
        let binds =
            [("a", "a"), ("b", "b")].map(|(name, place)| Inside::tree(self.volume(name), place));
        Container::start(self.root.path(), &binds)
    }

    fn records(&self) -> PathBuf {
        self.pod.places().kubelet_roots[0].join("tucks")
    }

    fn refresh(&self, container: &Container) -> Refreshed {
        let mounts = BoundMounts::open(&self.pod.bundle(), &self.pod.directory()).unwrap();
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&mounts],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&self.records()),
        )
        .unwrap()
    }
}

/// The work of [`refreshes`] for this container.
pub fn work(pod: &Pod, records: &Path, container: &Container, has_beneath: bool) -> Work {
    let init: OsString = container.process.pid().to_string().into();
    Work {
        test: "refresh_without_record::refreshes",
        environment: vec![
            (BUNDLE, pod.bundle().into()),
            (POD, pod.directory().into()),
            (RECORDS, records.into()),
            (INIT, init),
        ],
        has_beneath,
    }
}

#[test]
#[ignore = "other tests run this program"]
fn refreshes() {
    let Some(bundle) = env::var_os(BUNDLE) else {
        bindguard_testing::skipped("it is the program of other tests");
        return;
    };
    let folder = |name| PathBuf::from(env::var_os(name).unwrap());
    let process = HeldProcess::open(env::var(INIT).unwrap().parse().unwrap()).unwrap();
    begin(&MOUNT_CALLS);
    let helper = HelperProcess::start().unwrap();
    let mounts = BoundMounts::open(Path::new(&bundle), &folder(POD)).unwrap();
    let users = env::var(USERS).ok();
    let spec = live::spec_of(users.as_deref());
    let act = RefreshAct::Replace(Notify::None);
    let records = TuckRecords::at(&folder(RECORDS));
    refresh_container(
        &helper,
        REPLACE_TIMEOUT,
        &process,
        Some(&spec),
        &[&mounts],
        act,
        &records,
    )
    .unwrap();
}

/// The next refresh took the new mount for a mount of the container, for ever.
#[test]
fn a_refresh_without_a_record_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    if can_attach_beneath() {
        is_finished_after_each_kill(false, true);
    }
}

/// The same where only propagation attaches.
#[test]
fn a_tuck_without_a_record_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    if can_run() {
        is_finished_after_each_kill(false, false);
    }
}

/// The killed tuck left the mount around the volume shared, and the next refresh refused the volume
/// for that.
#[test]
fn a_tuck_of_a_volume_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    if can_run() {
        is_finished_after_each_kill(true, false);
    }
}

#[test]
fn a_refresh_of_a_volume_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    if can_attach_beneath() {
        is_finished_after_each_kill(true, true);
    }
}

/// Kills refreshes of a volume before each of their calls. `has_record`: the create left a record.
fn is_finished_after_each_kill(has_record: bool, has_beneath: bool) {
    // The driver may restart again before the next refresh.
    for content in ["2", "3"] {
        is_finished_with(content, has_record, has_beneath);
    }
}

/// The volume has this content at the refresh after each kill.
fn is_finished_with(content: &str, has_record: bool, has_beneath: bool) {
    let mut was_killed_between = 0;
    for calls in 0..=MAX_CALLS {
        assert!(calls < MAX_CALLS, "it makes new calls without an end");
        let scene = volume::Scene::with_bind(&["bind", "ro"]);
        if !has_record {
            fs::remove_file(scene.pod.bundle().join(EXPECTED_FILE)).unwrap();
        }
        let container = scene.start();
        let look = || {
            let at = container.mounts_at("/data");
            let propagation = ["/", "/data"].map(|place| container.propagation_at(place));
            let attributes: Vec<String> = at.into_iter().map(|(_, options)| options).collect();
            (container.mounts(), attributes, propagation)
        };
        let before = look();
        scene.mount_anew("2");
        let mut host = mounts_of_host();
        let refresh = work(&scene.pod, &scene.records(), &container, has_beneath);
        let has_ended = work_killed_after(calls, &refresh);
        was_killed_between += u32::from(container.mounts_at("/data").len() > 1);
        if content != "2" {
            scene.mount_anew(content);
            host = mounts_of_host();
        }
        let next = scene.refresh(&container);
        assert!(next.is_current(), "after {calls} calls: {next:?}");
        let shown = container.read("data/0");
        assert_eq!(shown.as_deref(), Some(content), "after {calls} calls");
        assert_eq!(look(), before, "after {calls} calls");
        assert_eq!(mounts_of_host(), host, "after {calls} calls");
        // The next volume is followed as well.
        scene.mount_anew("4");
        let next = scene.refresh(&container);
        assert_eq!(next.replaced(), 1, "after {calls} calls: {next:?}");
        if has_ended {
            break;
        }
    }
    assert!(
        was_killed_between > 0,
        "no kill was between attach and detach"
    );
}

/// A volume with a mount in it, where only propagation attaches. At each moment the container has the
/// old or the new mounts, all of them, and none is a peer of another mount.
#[test_if(can_run)]
fn a_tuck_of_a_tree_that_is_killed_before_each_call_leaves_the_tree_whole() {
    for (option, users) in [
        ("rprivate", None),
        ("rslave", None),
        ("rprivate", Some("0 0 1")),
        ("rslave", Some("0 0 1")),
    ] {
        let mut was_killed_between = 0;
        for calls in 0..=MAX_CALLS {
            assert!(calls < MAX_CALLS, "it makes new calls without an end");
            let scene = volume::Scene::of_an_unprivileged_container(option);
            scene.mount_below("1");
            let data = [Inside::tree(scene.volume(), "data")];
            let container = match users {
                Some(_) => Container::start_in_user_namespace(scene.root(), &data),
                None => Container::start(scene.root(), &data),
            };
            let mounts = container.mounts();
            scene.mount_anew("2");
            live::change(&scene.volume(), MsFlags::MS_SHARED);
            scene.mount_below("2");
            let host = mounts_of_host();
            let mut refresh = work(&scene.pod, &scene.records(), &container, false);
            let users = users.map(|users| (USERS, OsString::from(users)));
            refresh.environment.extend(users);
            let has_ended = work_killed_after(calls, &refresh);
            let at = format!("after {calls} calls, {option} {:?}", container.spec());
            let read = || ["data/0", "data/nested/file"].map(|file| container.read(file));
            let shown = read();
            let whole = ["1", "2"].map(|content| [content, content].map(|it| Some(it.to_owned())));
            assert!(whole.contains(&shown), "{at}: {shown:?}");
            assert_eq!(mounts_of_host(), host, "{at}");
            let table = container.process.mounts().unwrap();
            let in_volume = |mount: &&MountEntry| mount.mount_point.starts_with("/data");
            let mut in_volume = table.entries().iter().filter(in_volume);
            let peer = in_volume.find(|mount| mount.propagation.peer_group.is_some());
            assert_eq!(peer, None, "{at}");
            was_killed_between += u32::from(container.mounts_at("/data").len() > 1);
            let next = scene.refresh(&container);
            assert!(next.is_current(), "{at}: {next:?}");
            assert_eq!(read(), whole[1], "{at}");
            assert_eq!(
                (container.mounts(), mounts_of_host()),
                (mounts, host),
                "{at}"
            );
            let kept: &[&str] = if option == "rslave" { &["master"] } else { &[] };
            for (place, kept) in [("/", &[][..]), ("/data", kept), ("/data/nested", kept)] {
                assert_eq!(container.propagation_at(place), kept, "{place} {at}");
            }
            let records = fs::read_dir(scene.records()).map_or(0, Iterator::count);
            assert_eq!(records, 0, "{at}");
            if has_ended {
                break;
            }
        }
        assert!(
            was_killed_between > 0,
            "no kill was between attach and detach"
        );
    }
}

/// A refresh of `/a` records nothing about the mounts in `/b`, which the container made before.
#[test_if(can_record)]
fn mounts_that_the_container_made_before_the_first_refresh_are_never_lost() {
    let scene = Scene::new();
    let container = scene.start();
    container.run_inside(|| {
        mount_tmpfs(Path::new("/b/own"));
        fs::write("/b/own/file", "own").unwrap();
    });
    let own = || container.read("b/own/file");
    // Without a detach in between, the first refresh is the only one that could have recorded.
    scene.mount_anew("a", "2");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    for content in ["3", "4"] {
        for name in ["a", "b"] {
            scene.mount_anew(name, content);
        }
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("a/0").as_deref(), Some(content));
        assert_eq!(container.read("b/0").as_deref(), Some("1"));
        assert_eq!(own().as_deref(), Some("own"), "{refreshed:?}");
    }
}

/// The container mounts over the volume, or in it, between two refreshes.
#[test_if(can_record)]
fn mounts_that_the_container_made_after_a_refresh_are_never_lost() {
    for place in ["/a", "/a/own"] {
        let scene = Scene::new();
        let container = scene.start();
        scene.mount_anew("a", "2");
        assert_eq!(scene.refresh(&container).replaced(), 1);
        container.run_inside(|| {
            mount_tmpfs(Path::new(place));
            fs::write(Path::new(place).join("file"), "own").unwrap();
        });
        let before = container.mounts_at(place);
        for content in ["3", "4"] {
            scene.mount_anew("a", content);
            let refreshed = scene.refresh(&container);
            assert_eq!(refreshed.replaced(), 0, "{place}: {refreshed:?}");
            assert_eq!(container.mounts_at(place), before, "{place}");
            let file = container.read(&format!("{}/file", &place[1..]));
            assert_eq!(file.as_deref(), Some("own"), "{place}");
        }
    }
}

/// The container removes the volume and mounts its own in its place: this lone mount is not the
/// replaced mount that a refresh recorded.
#[test_if(can_record)]
fn a_mount_that_the_container_put_in_the_place_of_a_refreshed_volume_is_never_lost() {
    let scene = Scene::new();
    let container = scene.start();
    // A filesystem in use keeps its device number, so a later filesystem cannot get that number.
    let mut pinned = vec![fs::File::open(scene.volume("a")).unwrap()];
    scene.mount_anew("a", "2");
    pinned.push(fs::File::open(scene.volume("a")).unwrap());
    assert_eq!(scene.refresh(&container).replaced(), 1);
    container.run_inside(|| {
        umount2("/a", MntFlags::MNT_DETACH).unwrap();
        mount_tmpfs(Path::new("/a"));
        fs::write("/a/0", "own").unwrap();
    });
    scene.mount_anew("a", "3");
    let refreshed = scene.refresh(&container);
    assert_eq!(container.read("a/0").as_deref(), Some("own"));
    let results: Vec<_> = refreshed
        .mounts
        .iter()
        .map(|it| it.outcome.clone())
        .collect();
    assert_eq!(results, [MountResult::Hidden], "{refreshed:?}");
}

/// The place that a refresh replaced is no proof that a refresh made a mount of that place.
#[test_if(can_record)]
fn a_bind_of_the_replaced_volume_by_the_container_is_never_lost() {
    let scene = Scene::new();
    let container = scene.start();
    container.run_inside(|| {
        fs::create_dir("/keep").unwrap();
        bind(Path::new("/a"), Path::new("/keep"));
    });
    scene.mount_anew("a", "2");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    container.run_inside(|| bind(Path::new("/keep"), Path::new("/a")));
    let before = container.mounts_at("/a");
    assert_eq!(container.read("a/0").as_deref(), Some("1"));
    for content in ["3", "4"] {
        scene.mount_anew("a", content);
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
        assert_eq!(container.read("a/0").as_deref(), Some("1"));
        assert_eq!(container.mounts_at("/a"), before);
    }
}

/// Podman keeps the bundle, and with it the record of the container's earlier mounts.
#[test_if(can_record)]
fn a_container_that_was_started_again_from_its_bundle_is_refreshed() {
    let scene = Scene::new();
    for content in ["2", "3"] {
        let container = scene.start();
        scene.mount_anew("a", content);
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("a/0").as_deref(), Some(content));
    }
}

/// The record that a refresh began does not say which mounts a create made: `release` unmounts none.
#[test_if(can_record)]
fn a_record_that_a_refresh_began_releases_no_copy() {
    let scene = host_root::Scene::for_record();
    let (disk, bundle) = (scene.disk(), scene.bundle());
    // The pod's folder has the volume; the container also has the host's root.
    let pod = scene.host.path().join("kubelet/pods/uid-1");
    let source = pod.join("volumes/kubernetes.io~csi/pv/mount");
    fs::create_dir_all(&source).unwrap();
    mount_tmpfs(&source);
    let spec = fs::read(bundle.join("config.json")).unwrap();
    let mut spec: serde_json::Value = serde_json::from_slice(&spec).unwrap();
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(mount_of(&source, "/data", "rprivate"));
    fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
    let binds = [scene.bind(), Inside::of(source.clone(), "data")];
    let container = Container::start(scene.root.path(), &binds);
    container.run_inside(|| mount_tmpfs(Path::new("/host/later")));
    umount2(&source, MntFlags::MNT_DETACH).unwrap();
    mount_tmpfs(&source);
    let volumes = BoundMounts::open(&bundle, &pod).unwrap();
    let refreshed = refresh_container(
        helper(),
        REPLACE_TIMEOUT,
        &container.process,
        Some(container.spec()),
        &[&volumes],
        RefreshAct::Replace(Notify::None),
        &TuckRecords::at(&scene.host.path().join("tucks")),
    )
    .unwrap();
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    unmount(&disk);
    let released = scene.release(&container, Release::Unmount);
    let is_kept = |it: &Released| is_without_record(it) || is_not_recorded(it);
    assert!(!released.is_empty());
    assert!(released.iter().all(is_kept), "{released:?}");
    for place in ["/host/disk", "/host/later"] {
        assert_eq!(container.mounts_at(place).len(), 1, "{place}");
    }
}
