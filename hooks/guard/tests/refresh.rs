//! Live refresh: a running container gets the new file of its subPath, and no reader sees anything bad meanwhile.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

#[allow(dead_code, reason = "not every test file needs all of it")]
#[path = "../../sys/tests/live/mod.rs"]
mod live;
mod pod;

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::refresh_request::{Notify, NotifySignal};
use bindguard_guard::refresh::{
    AttachMethod, PodVolumes, RefreshAct, RefreshError, RefreshOutcome, Refreshed, VolumeOfPod, rebind_volume,
    refresh_container,
};
use live::{Container, Inside, change};
use nix::mount::{MsFlags, mount};
use pod::{Pod, own_namespace};

/// A pod, and a folder that is its containers' root filesystem.
struct Scene {
    pod: Pod,
    root: tempfile::TempDir,
}

impl Scene {
    fn with_keys(keys: u32) -> Self {
        Self { pod: Pod::with_keys(keys), root: tempfile::tempdir().unwrap() }
    }

    fn binds(&self, keys: u32) -> Vec<Inside> {
        let names = ["etc/app/0", "etc/app/1", "etc/app/2"];
        let inside = |key: u32| Inside::of(self.pod.subpath(key), names[key as usize]);
        (0..keys).map(inside).collect()
    }

    fn start(&self, keys: u32) -> Container {
        Container::start(self.root.path(), &self.binds(keys))
    }

    /// The steps of the agent after `..data` was renamed.
    fn refresh(&self, container: &Container) -> Refreshed {
        self.rebind();
        self.refresh_only(container, RefreshAct::Replace(Notify::None))
    }

    fn rebind(&self) {
        let kubelet_root = self.pod.places().kubelet_roots[0].clone();
        let volume = VolumeOfPod { kubelet_root, pod_uid: "uid-1".to_owned(), volume: "conf".to_owned() };
        let report = rebind_volume(&volume, &self.pod.policy());
        assert!(report.problems.is_empty(), "{report:?}");
    }

    fn refresh_only(&self, container: &Container, act: RefreshAct) -> Refreshed {
        let volumes = PodVolumes::open(&self.pod.directory()).unwrap();
        refresh_container(&container.process, &volumes, act).unwrap()
    }
}

/// False, with a printed reason, without privilege and on older kernels.
fn can_run() -> bool {
    match live::has_mount_setattr() {
        Ok(()) => own_namespace(),
        Err(why) => {
            pod::skipped(why);
            false
        }
    }
}

/// The method of this kernel.
fn method() -> AttachMethod {
    if live::kernel() >= (6, 5) { AttachMethod::Beneath } else { AttachMethod::Tucked }
}

fn methods(refreshed: &Refreshed) -> Vec<AttachMethod> {
    let method = |outcome: &RefreshOutcome| match outcome {
        RefreshOutcome::Replaced(method) => *method,
        other => panic!("not replaced: {other:?}"),
    };
    refreshed.mounts.iter().map(|mount| method(&mount.outcome)).collect()
}

#[test]
fn a_running_container_gets_the_new_file_and_keeps_its_flags() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(2);
    let container = scene.start(2);
    let (mounts, before) = (container.mounts(), container.mounts_at("/etc/app/0"));
    assert!(before[0].1.contains("ro,nosuid"), "{before:?}");
    assert!(scene.refresh(&container).mounts.is_empty(), "nothing was stale");

    scene.pod.update(1);
    let refreshed = scene.refresh(&container);
    assert_eq!(methods(&refreshed), [method(); 2]);
    assert_eq!(refreshed.subpaths, 2);
    assert_eq!(container.read("etc/app/0").as_deref(), Some("1"));
    let after = container.mounts_at("/etc/app/0");
    assert_eq!((after.len(), &after[0].1), (1, &before[0].1));
    assert_eq!((container.mounts(), container.propagation_at("/etc/app/0")), (mounts, vec![]));
    assert!(scene.refresh(&container).mounts.is_empty(), "a second refresh changes nothing");
    assert_eq!((container.stop().failed, container_free(&scene)), (0, true));
}

/// No mount of the container is left in the host's table.
fn container_free(scene: &Scene) -> bool {
    !fs::read_to_string("/proc/thread-self/mountinfo").unwrap().contains(scene.root.path().to_str().unwrap())
}

#[test]
fn readers_never_see_anything_bad_while_the_volume_changes_at_full_speed() {
    const UPDATES: u64 = 1500;
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(3);
    let container = scene.start(3);
    let mounts = container.mounts();
    for number in 1..=UPDATES {
        scene.pod.update(number);
        let refreshed = scene.refresh(&container);
        assert!(refreshed.is_current(), "update {number}: {refreshed:?}");
    }
    assert_eq!(container.mounts(), mounts);
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older, seen.last), (0, 0, 0, UPDATES), "{seen:?}");
    assert!(seen.reads > UPDATES, "{seen:?}");
}

#[test]
fn updates_while_the_refresh_works_lose_nothing() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
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
    assert_eq!((container.read("etc/app/0").as_deref(), container.mounts()), (Some("500"), mounts));
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
}

/// The reader ignores the signal until it is stopped; a test reads it in its pending set.
#[test]
fn a_signal_is_sent_once_and_only_after_a_replacement() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(2);
    let container = Container::start_with(scene.root.path(), &scene.binds(2), || {
        nix::sys::signal::SigSet::all().thread_block().unwrap();
    });
    let pending = || {
        let status = fs::read_to_string(format!("/proc/{}/status", container.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("ShdPnd:\t")).unwrap().to_owned();
        u64::from_str_radix(&line, 16).unwrap()
    };
    let act = RefreshAct::Replace(Notify::Signal(NotifySignal::Usr1));
    assert!(scene.refresh_only(&container, act).mounts.is_empty());
    assert_eq!(pending(), 0, "nothing changed");
    scene.pod.update(1);
    assert!(scene.refresh_only(&container, act).is_current());
    assert_eq!(pending(), 1 << (nix::sys::signal::SIGUSR1 as u64 - 1));
}

/// The agent and an operator at once: the second one waits for the lock. So does one whose container holds the lock of its own
/// namespace: that costs a second, and its own refresh.
#[test]
fn a_container_that_locks_itself_is_told() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    let lock = container.process.try_lock_mounts().unwrap().unwrap();
    // Forked meanwhile, with a copy of every descriptor.
    let _other = scene.start(1);
    scene.pod.update(1);
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let refresh = || refresh_container(&container.process, &volumes, RefreshAct::Replace(Notify::None));
    assert!(matches!(refresh(), Err(RefreshError::Locked(_))));
    drop(lock);
    assert!(refresh().unwrap().is_current());
}

/// The agent is killed with its child, as by a cgroup's end, at any moment.
#[test]
fn killed_at_any_moment_leaves_whole_content_and_the_next_refresh_finishes() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(2);
    let container = scene.start(2);
    let before = (container.mounts(), container.propagation_at("/"));
    for number in 1..=150 {
        scene.pod.update(number);
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without returning.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Parent { child } => {
                std::thread::sleep(std::time::Duration::from_micros(number * 20));
                // The group: the refresh's own child, too.
                let _ = nix::sys::signal::killpg(child, nix::sys::signal::SIGKILL);
                let _ = nix::sys::signal::kill(child, nix::sys::signal::SIGKILL);
                nix::sys::wait::waitpid(child, None).unwrap();
            }
            nix::unistd::ForkResult::Child => {
                let _ = nix::unistd::setpgid(nix::unistd::Pid::from_raw(0), nix::unistd::Pid::from_raw(0));
                scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
                // SAFETY: ends the process without running what its copy of this one has registered.
                unsafe { nix::libc::_exit(0) }
            }
        }
        assert!(container.read("etc/app/0").is_some_and(|content| !content.is_empty()), "at {number}");
    }
    let last = scene.refresh(&container);
    assert!(last.is_current(), "{last:?}");
    assert_eq!((container.mounts(), container.propagation_at("/")), before);
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older, seen.last), (0, 0, 0, 150), "{seen:?}");
}

/// Containers that end at the very moment of their refresh.
#[test]
fn a_container_that_ends_meanwhile_leaves_nothing() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    // Mounts of other tests on this machine come and go.
    let (pod, root) = (scene.pod.directory(), scene.root.path().to_owned());
    let is_ours = |line: &&str| [&pod, &root].iter().any(|path| line.contains(path.to_str().unwrap()));
    let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap().lines().filter(is_ours).count();
    let before = mounts();
    for number in 1..=200 {
        let container = scene.start(1);
        scene.pod.update(number);
        let pid = nix::unistd::Pid::from_raw(container.process.pid() as i32);
        let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_micros(number * 10));
                nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
            });
            // Either it was in time, or the reason is typed.
            let _ = refresh_container(&container.process, &volumes, RefreshAct::Replace(Notify::None));
        });
        drop(container);
        scene.rebind();
    }
    assert_eq!(mounts(), before);
}

#[test]
fn looking_changes_nothing() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    scene.pod.update(1);
    let refreshed = scene.refresh_only(&container, RefreshAct::Look);
    assert!(matches!(refreshed.mounts[0].outcome, RefreshOutcome::Stale), "{refreshed:?}");
    assert_eq!(refreshed.mounts[0].destination, Path::new("/etc/app/0"));
    assert_eq!(container.read("etc/app/0").as_deref(), Some("0"));
}

#[test]
fn a_removed_key_keeps_its_old_content_and_the_others_are_refreshed() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(2);
    let container = scene.start(2);
    scene.pod.update(1);
    let payload = scene.pod.volume().join(fs::read_link(scene.pod.volume().join("..data")).unwrap());
    fs::remove_file(payload.join("0")).unwrap();
    let refreshed = scene.refresh(&container);
    let of = |place: &str| {
        let mount = refreshed.mounts.iter().find(|mount| mount.destination == Path::new(place)).unwrap();
        format!("{:?}", mount.outcome)
    };
    assert_eq!((of("/etc/app/0"), of("/etc/app/1")), ("KeyGone".to_owned(), format!("Replaced({:?})", method())));
    assert_eq!(container.read("etc/app/0").as_deref(), Some("0"));
    assert_eq!(container.read("etc/app/1").as_deref(), Some("1"));
}

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

#[test]
fn a_container_that_ended_is_an_error_and_nothing_more() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    scene.pod.update(1);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(container.process.pid() as i32), nix::sys::signal::SIGKILL)
        .unwrap();
    while container.process.is_alive() {}
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let error = refresh_container(&container.process, &volumes, RefreshAct::Replace(Notify::None)).unwrap_err();
    assert_eq!(error.to_string(), format!("process {} ended", container.process.pid()));
}

/// A parent that is slave, as with `rootfsPropagation: rslave`, or shared; a mount that is a slave itself.
#[test]
fn the_propagation_of_the_mount_and_of_its_parent_stay() {
    if !can_run() {
        return;
    }
    for parent in [MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE, MsFlags::MS_SHARED] {
        let scene = Scene::with_keys(1);
        let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
            change(Path::new("/"), MsFlags::MS_SHARED);
            change(Path::new("/"), parent);
        });
        let before = (container.propagation_at("/"), container.propagation_at("/etc/app/0"), container.mounts());
        scene.pod.update(1);
        assert!(scene.refresh(&container).is_current());
        let after = (container.propagation_at("/"), container.propagation_at("/etc/app/0"), container.mounts());
        assert_eq!((container.read("etc/app/0").as_deref(), after), (Some("1"), before));
    }
}

#[test]
fn a_folder_as_sub_path_is_refreshed_as_a_whole() {
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    // `subPath` of a nested path binds the folder below the payload.
    let folder = |number: u64| {
        let payload = scene.pod.volume().join(format!("..2026_11_21_05_10_00.{number}/folder"));
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
