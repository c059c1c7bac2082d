//! Live refresh: a running container gets the new file of its subPath, and no reader sees anything
//! bad meanwhile.

use std::fs;
use std::path::Path;

use bindguard_core::refresh_request::{Notify, NotifySignal};
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::RefreshAct;
use bindguard_testing::live::{Container, Inside, change};
use bindguard_testing::{rounds, test_if};
use nix::mount::MsFlags;

use crate::refresh_scene::{Scene, can_run, container_free, method, methods};

#[test_if(can_run)]
fn a_running_container_gets_the_new_file_and_keeps_its_flags() {
    let scene = Scene::with_keys(2);
    let container = scene.start(2).reading();
    let (mounts, before) = (container.mounts(), container.mounts_at("/etc/app/0"));
    assert!(before[0].1.contains("ro,nosuid"), "{before:?}");
    assert!(
        scene.refresh(&container).mounts.is_empty(),
        "nothing was stale"
    );

    scene.pod.update(1);
    let refreshed = scene.refresh(&container);
    assert_eq!(methods(&refreshed), [method(); 2]);
    assert_eq!(refreshed.subpaths, 2);
    assert_eq!(container.read("etc/app/0").as_deref(), Some("1"));
    let after = container.mounts_at("/etc/app/0");
    assert_eq!((after.len(), &after[0].1), (1, &before[0].1));
    assert_eq!(
        (container.mounts(), container.propagation_at("/etc/app/0")),
        (mounts, vec![])
    );
    assert!(
        scene.refresh(&container).mounts.is_empty(),
        "a second refresh changes nothing"
    );
    assert_eq!((container.stop().failed, container_free(&scene)), (0, true));
}

#[test_if(can_run)]
fn readers_never_see_anything_bad_while_the_volume_changes_at_full_speed() {
    let updates = rounds(150, 10_000);
    let scene = Scene::with_keys(3);
    let container = scene.start(3).reading();
    let mounts = container.mounts();
    for number in 1..=updates {
        scene.pod.update(number);
        let refreshed = scene.refresh(&container);
        assert!(refreshed.is_current(), "update {number}: {refreshed:?}");
    }
    assert_eq!(container.mounts(), mounts);
    let seen = container.stop();
    assert_eq!(
        (seen.failed, seen.empty, seen.older, seen.last),
        (0, 0, 0, updates),
        "{seen:?}"
    );
    assert!(seen.reads > updates, "{seen:?}");
}

#[test_if(can_run)]
fn updates_while_the_refresh_works_lose_nothing() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1).reading();
    let mounts = container.mounts();
    let namespace = fs::File::open("/proc/thread-self/ns/mnt").unwrap();
    std::thread::scope(|scope| {
        let updates = scope.spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).unwrap();
            nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            (1..=500).for_each(|number| scene.pod.update(number));
        });
        while !updates.is_finished() {
            scene.refresh(&container);
        }
    });
    let last = scene.refresh(&container);
    assert!(last.is_current(), "{last:?}");
    assert_eq!(
        (container.read("etc/app/0").as_deref(), container.mounts()),
        (Some("500"), mounts)
    );
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
}

/// The reader blocks the signal until the end; the test finds the signal in the reader's pending
/// set.
#[test_if(can_run)]
fn a_signal_is_sent_once_and_only_after_a_replacement() {
    let scene = Scene::with_keys(2);
    let container = Container::start_with(scene.root.path(), &scene.binds(2), || {
        nix::sys::signal::SigSet::all().thread_block().unwrap();
    });
    let pending = || {
        let status =
            fs::read_to_string(format!("/proc/{}/status", container.process.pid())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("ShdPnd:\t"))
            .unwrap()
            .to_owned();
        u64::from_str_radix(&line, 16).unwrap()
    };
    let act = RefreshAct::Replace(Notify::Signal(NotifySignal::Usr1));
    assert!(
        scene
            .refresh_only(&container, act.clone())
            .mounts
            .is_empty()
    );
    assert_eq!(pending(), 0, "nothing changed");
    scene.pod.update(1);
    assert!(scene.refresh_only(&container, act).is_current());
    assert_eq!(pending(), 1 << (nix::sys::signal::SIGUSR1 as u64 - 1));
}

#[test_if(can_run)]
fn looking_changes_nothing() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    scene.pod.update(1);
    let refreshed = scene.refresh_only(&container, RefreshAct::Look);
    assert!(
        matches!(refreshed.mounts[0].outcome, MountResult::Stale),
        "{refreshed:?}"
    );
    assert_eq!(refreshed.mounts[0].destination, "/etc/app/0");
    assert_eq!(container.read("etc/app/0").as_deref(), Some("0"));
}

#[test_if(can_run)]
fn a_removed_key_keeps_its_old_content_and_the_others_are_refreshed() {
    let scene = Scene::with_keys(2);
    let container = scene.start(2);
    scene.pod.update(1);
    let payload = scene
        .pod
        .volume()
        .join(fs::read_link(scene.pod.volume().join("..data")).unwrap());
    fs::remove_file(payload.join("0")).unwrap();
    // A refresh cannot help, and a report of the state must not recommend a refresh.
    let seen = scene.refresh_only(&container, RefreshAct::Look);
    let seen: Vec<_> = seen
        .mounts
        .iter()
        .map(|mount| mount.outcome.as_str())
        .collect();
    assert_eq!(seen, ["key-gone", "stale"]);
    let refreshed = scene.refresh(&container);
    let of = |place: &str| {
        let mount = refreshed
            .mounts
            .iter()
            .find(|mount| mount.destination == place)
            .unwrap();
        mount.outcome.clone()
    };
    let replaced = MountResult::Replaced { method: method() };
    assert_eq!(of("/etc/app/0"), MountResult::KeyGone);
    assert_eq!(of("/etc/app/1"), replaced);
    assert_eq!(container.read("etc/app/0").as_deref(), Some("0"));
    assert_eq!(container.read("etc/app/1").as_deref(), Some("1"));
}

/// The parent is private, slave (as with `rootfsPropagation: rslave`) or shared; the mount itself
/// may be a slave.
#[test_if(can_run)]
fn the_propagation_of_the_mount_and_of_its_parent_stay() {
    for parent in [MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE, MsFlags::MS_SHARED] {
        let scene = Scene::with_keys(1);
        let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
            change(Path::new("/"), MsFlags::MS_SHARED);
            change(Path::new("/"), parent);
        });
        let before = (
            container.propagation_at("/"),
            container.propagation_at("/etc/app/0"),
            container.mounts(),
        );
        scene.pod.update(1);
        assert!(scene.refresh(&container).is_current());
        let after = (
            container.propagation_at("/"),
            container.propagation_at("/etc/app/0"),
            container.mounts(),
        );
        assert_eq!(
            (container.read("etc/app/0").as_deref(), after),
            (Some("1"), before)
        );
    }
}

#[test_if(can_run)]
fn a_folder_as_sub_path_is_refreshed_as_a_whole() {
    let scene = Scene::with_keys(1);
    // `subPath` of a nested path binds the folder below the payload.
    let folder = |number: u64| {
        let payload = scene
            .pod
            .volume()
            .join(format!("..2026_11_21_05_10_00.{number}/folder"));
        fs::create_dir_all(&payload).unwrap();
        fs::write(payload.join("0"), number.to_string()).unwrap();
    };
    folder(0);
    let source = scene.pod.volume().join("..data/folder");
    let container = Container::start(scene.root.path(), &[Inside::of(source, "etc/folder")]);
    scene.pod.update(1);
    folder(1);
    let refreshed = scene.refresh(&container);
    assert_eq!(methods(&refreshed), [method()]);
    assert_eq!(container.read("etc/folder/0").as_deref(), Some("1"));
}

/// A container must not change a file of the host through the agent: its own mount is read-only.
#[test_if(can_run)]
fn a_file_beneath_a_read_only_mount_is_not_touched() {
    for is_read_only in [false, true] {
        let scene = Scene::with_keys(1);
        let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
            let access = if is_read_only {
                MsFlags::MS_RDONLY
            } else {
                MsFlags::empty()
            };
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | access;
            nix::mount::mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).unwrap();
        });
        let beneath = scene.root.path().join("etc/app/0");
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
        fs::File::options()
            .write(true)
            .open(&beneath)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
        scene.pod.update(1);
        let refreshed = scene.refresh_only(&container, RefreshAct::Replace(Notify::Touch));
        assert!(
            refreshed.is_current()
                && refreshed
                    .notification
                    .as_ref()
                    .is_some_and(|it| it.error.is_some())
                    == is_read_only,
            "{refreshed:?}"
        );
        let is_touched = fs::metadata(&beneath).unwrap().modified().unwrap() != long_ago;
        assert_eq!(is_touched, !is_read_only);
    }
}
