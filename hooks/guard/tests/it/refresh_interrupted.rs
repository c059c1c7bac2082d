//! A refresh is killed, meets a second refresh, or loses its container: nothing is left, and the
//! next refresh finishes.

use std::fs;
use std::time::Duration;

use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    PodVolumes, REPLACE_TIMEOUT, RefreshAct, RefreshError, refresh_container,
};
use bindguard_testing::live;
use bindguard_testing::live::Container;
use bindguard_testing::{helper, rounds, test_if};
use nix::mount::MsFlags;

use crate::refresh_scene::{Scene, can_run, supervised};

/// The agent and an operator refresh at once: the later refresh waits for the lock. A container
/// that locks its own namespace delays the refresh for a second, and loses only its own refresh.
#[test_if(can_run)]
fn a_container_that_locks_itself_is_told() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    let namespace = container.namespace();
    let lock = namespace.try_lock().unwrap().unwrap();
    // Forked meanwhile, with a copy of every descriptor.
    let _other = scene.start(1);
    scene.pod.update(1);
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let act = RefreshAct::Replace(Notify::None);
    let refresh = || {
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&volumes],
            act.clone(),
            &scene.records(),
        )
    };
    assert!(matches!(refresh(), Err(RefreshError::Locked(_))));
    drop(lock);
    assert!(refresh().unwrap().is_current());
}

/// The agent is killed with its child, as by a cgroup's end, at any moment.
#[test_if(can_run)]
fn killed_at_any_moment_leaves_whole_content_and_the_next_refresh_finishes() {
    let scene = Scene::with_keys(2);
    let container = scene.start(2).reading();
    let before = (container.mounts(), container.propagation_at("/"));
    for number in 1..=150 {
        scene.pod.update(number);
        let time = Duration::from_micros(number * 20);
        supervised::killed_while_it_runs(time, &scene.refresh_program(&container));
        assert!(
            container
                .read("etc/app/0")
                .is_some_and(|content| !content.is_empty()),
            "at {number}"
        );
    }
    let last = scene.refresh(&container);
    assert!(last.is_current(), "{last:?}");
    assert_eq!((container.mounts(), container.propagation_at("/")), before);
    let seen = container.stop();
    assert_eq!(
        (seen.failed, seen.empty, seen.older, seen.last),
        (0, 0, 0, 150),
        "{seen:?}"
    );
}

/// Killed with its child before each of its mount calls, as by a cgroup's end, on a kernel that
/// tucks: for a moment the container's root is shared, and then the new mount.
#[test_if(can_run)]
fn killed_in_a_tuck_leaves_whole_content_and_the_next_refresh_restores_the_propagation() {
    let (scene, mut version) = (Scene::with_keys(2), 0);
    for parent in [MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE, MsFlags::MS_SHARED] {
        let container = Container::start_with(scene.root.path(), &scene.binds(2), || {
            live::change("/".as_ref(), MsFlags::MS_SHARED);
            live::change("/".as_ref(), parent);
        })
        .reading();
        let look = || {
            let propagation =
                ["/", "/etc/app/0", "/etc/app/1"].map(|place| container.propagation_at(place));
            (container.mounts(), propagation)
        };
        let (before, mut left_changed) = (look(), 0);
        for calls in 0.. {
            assert!(calls < 200, "it makes new calls without an end");
            version += 1;
            scene.pod.update(version);
            scene.rebind();
            let refresh = scene.refresh_program(&container);
            let has_ended = supervised::killed_after(calls, &refresh);
            let content = container.read("etc/app/0");
            assert!(
                content.is_some_and(|content| !content.is_empty()),
                "after {calls} calls"
            );
            left_changed += u32::from(look().1 != before.1);
            let next = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
            assert!(next.is_current(), "after {calls} calls: {next:?}");
            assert_eq!(look(), before, "after {calls} calls");
            assert_eq!(container.read("etc/app/1"), Some(version.to_string()));
            if has_ended {
                break;
            }
        }
        assert!(
            parent == MsFlags::MS_SHARED || left_changed > 2,
            "no kill was in a tuck: {left_changed}"
        );
        let left = fs::read_dir(scene.records().directory()).map_or(0, Iterator::count);
        assert_eq!(left, 0, "records are left");
        let seen = container.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }
}

/// The record has the mounts that a tuck changes, not the container's table: 2,000 mounts were 440
/// kB in /run.
#[test_if(can_run)]
fn the_record_of_a_tuck_does_not_grow_with_the_mount_table() {
    let scene = Scene::with_keys(2);
    let container = Container::start_with(scene.root.path(), &scene.binds(2), || {
        live::make_mounts(2000)
    });
    let before = (container.mounts(), container.propagation_at("/"));
    assert!(before.0 > 2000);
    scene.pod.update(1);
    scene.rebind();
    let record = scene
        .records()
        .directory()
        .join(container.process.pid().to_string());
    let mut longest = 0;
    for calls in 0..100 {
        let has_ended = supervised::killed_after(calls, &scene.refresh_program(&container));
        longest = longest.max(fs::metadata(&record).map_or(0, |record| record.len()));
        if has_ended {
            break;
        }
    }
    assert!(longest > 0, "no kill was in a tuck");
    assert!(longest <= 16 << 10, "{longest} bytes");
    assert!(scene.refresh(&container).is_current());
    assert_eq!((container.mounts(), container.propagation_at("/")), before);
    assert!(record.symlink_metadata().is_err(), "the record is left");
}

/// The kubelet's clean-up detaches the stale mount in the next refresh's place.
#[test_if(can_run)]
fn killed_in_a_tuck_and_cleaned_up_by_the_kubelet_keeps_one_mount() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    let look = || {
        (
            container.mounts(),
            ["/", "/etc/app/0"].map(|place| container.propagation_at(place)),
        )
    };
    let before = look();
    for calls in 0..40 {
        scene.pod.update(2 * calls + 1);
        scene.rebind();
        supervised::killed_after(calls as u32, &scene.refresh_program(&container));
        // The kernel detaches the mounts of a file that is removed.
        scene.pod.update(2 * calls + 2);
        scene.rebind();
        let next = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
        assert!(next.is_current(), "after {calls} calls: {next:?}");
        assert_eq!(look(), before, "after {calls} calls");
    }
}

/// A container that shares its own root has the pid of a container that ended.
#[test_if(can_run)]
fn a_record_changes_no_mount_that_the_refresh_did_not_share() {
    let scene = Scene::with_keys(1);
    let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
        live::change("/".as_ref(), MsFlags::MS_SHARED);
    });
    let before = (container.mounts(), container.propagation_at("/"));
    let table = String::from_utf8(container.process.read("mountinfo").unwrap()).unwrap();
    let private: String = table
        .lines()
        .map(|line| without_peers(line) + "\n")
        .collect();
    assert_ne!(private, table);
    let record = scene
        .records()
        .directory()
        .join(container.process.pid().to_string());
    fs::create_dir_all(record.parent().unwrap()).unwrap();
    fs::write(
        &record,
        format!(
            "{} {}\n{private}",
            container.process.start_time().unwrap() - 1,
            container.namespace().number().unwrap()
        ),
    )
    .unwrap();
    scene.pod.update(1);
    assert!(scene.refresh(&container).is_current());
    assert_eq!((container.mounts(), container.propagation_at("/")), before);
    assert!(
        record.symlink_metadata().is_err(),
        "the record of another process is kept"
    );
}

fn without_peers(line: &str) -> String {
    line.split(' ')
        .filter(|field| !field.starts_with("shared:"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Containers that end at the very moment of their refresh.
#[test_if(can_run)]
fn a_container_that_ends_meanwhile_leaves_nothing() {
    let scene = Scene::with_keys(1);
    // Mounts of parallel tests on this machine come and go.
    let (pod, root) = (scene.pod.directory(), scene.root.path().to_owned());
    let is_ours = |line: &&str| {
        [&pod, &root]
            .iter()
            .any(|path| line.contains(path.to_str().unwrap()))
    };
    let mounts = || {
        fs::read_to_string("/proc/thread-self/mountinfo")
            .unwrap()
            .lines()
            .filter(is_ours)
            .count()
    };
    let before = mounts();
    for number in 1..=rounds(50, 1000) {
        let container = scene.start(1);
        scene.pod.update(number);
        let pid = nix::unistd::Pid::from_raw(container.process.pid() as i32);
        let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(number % 200 * 10));
                nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
            });
            // Either it was in time, or the reason is typed.
            let act = RefreshAct::Replace(Notify::None);
            let _ = refresh_container(
                helper(),
                REPLACE_TIMEOUT,
                &container.process,
                Some(container.spec()),
                &[&volumes],
                act,
                &scene.records(),
            );
        });
        drop(container);
        scene.rebind();
    }
    assert_eq!(mounts(), before);
}

#[test_if(can_run)]
fn a_container_that_ended_is_an_error_and_nothing_more() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    scene.pod.update(1);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(container.process.pid() as i32),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    while container.process.is_alive() {}
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let act = RefreshAct::Replace(Notify::None);
    let error = refresh_container(
        helper(),
        REPLACE_TIMEOUT,
        &container.process,
        Some(container.spec()),
        &[&volumes],
        act,
        &scene.records(),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("process {} ended", container.process.pid())
    );
}
