//! A container changes its own mounts: a refresh keeps the container's mounts, and mounts nothing
//! else.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    HeldProcess, PodVolumes, ProcessError, REPLACE_TIMEOUT, RefreshAct, RefreshError,
    refresh_container,
};
use bindguard_testing::held_memory::{
    Executing, Unwritable, blocks_readers, hold_memory, unless_it_hangs,
};
use bindguard_testing::live::{Container, Inside, change, kernel};
use bindguard_testing::{bind, helper, mount_tmpfs, mounts_of_host, skipped, test_if};
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_scene::{Scene, can_run, method, methods, refusal};

/// The container mounted its own file over the subpath, or over the folder that it is in. (When the
/// kubelet removes the old file, the kernel detaches what is mounted on it: here the old payload is
/// still there.)
#[test_if(can_run)]
fn a_mount_of_the_container_over_it_stays() {
    for over in ["/etc/app/0", "/etc/app"] {
        let scene = Scene::with_keys(1);
        let own = scene.root.path().join("own");
        fs::create_dir(&own).unwrap();
        fs::write(own.join("0"), "7").unwrap();
        let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
            let source = if over == "/etc/app" { "/own" } else { "/own/0" };
            mount(
                Some(source),
                over,
                None::<&str>,
                MsFlags::MS_BIND,
                None::<&str>,
            )
            .unwrap();
        });
        let mounts = container.mounts();
        scene.pod.update_keeping_old(1);
        let refreshed = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
        assert!(
            !refreshed.is_current() && refreshed.replaced() == 0,
            "{over}: {refreshed:?}"
        );
        assert_eq!(
            (container.read("etc/app/0").as_deref(), container.mounts()),
            (Some("7"), mounts),
            "{over}"
        );
    }
}

/// `mount --bind FILE FILE` and a remount change a file's flags: the mount of the container must
/// stay, in front of the stale mount.
#[test_if(can_run)]
fn a_bind_of_the_file_over_itself_stays() {
    for own in ["/etc/app/0", "/etc/app/1"] {
        let scene = Scene::with_keys(2);
        let container = Container::start_with(scene.root.path(), &scene.binds(2), || {
            let place = "/etc/app/0";
            mount(
                Some(own),
                place,
                None::<&str>,
                MsFlags::MS_BIND,
                None::<&str>,
            )
            .unwrap();
            let flags =
                MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOEXEC;
            mount(None::<&str>, place, None::<&str>, flags, None::<&str>).unwrap();
        });
        let before = container.mounts_at("/etc/app/0");
        scene.pod.update_keeping_old(1);
        let refreshed = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
        assert_eq!(
            container.mounts_at("/etc/app/0"),
            before,
            "{own}: {refreshed:?}"
        );
        let hidden = refreshed
            .mounts
            .iter()
            .find(|mount| mount.destination == "/etc/app/0")
            .unwrap();
        assert_eq!(hidden.outcome.as_str(), "hidden", "{own}");
        assert_eq!(container.read("etc/app/1").as_deref(), Some("1"));
    }
}

/// The mount table names a path; by the time of the refresh a symlink has a name on that path.
#[test_if(can_run)]
fn a_symlink_on_the_way_is_never_followed() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    // The container replaces the parent folder of its mount by a symlink to another folder.
    let inside =
        |path: &str| PathBuf::from(format!("/proc/{}/root/{path}", container.process.pid()));
    fs::create_dir_all(inside("trap")).unwrap();
    fs::write(inside("trap/0"), "9").unwrap();
    fs::rename(inside("etc/app"), inside("etc/moved")).unwrap();
    std::os::unix::fs::symlink("/trap", inside("etc/app")).unwrap();
    let mounts = container.mounts();
    scene.pod.update(1);
    let refreshed = scene.refresh(&container);
    // The mount table names the new path by now: the refresh follows the mount, not the name.
    assert_eq!(methods(&refreshed), [method()]);
    assert_eq!(refreshed.mounts[0].destination, "/etc/moved/0");
    assert_eq!(container.read("etc/moved/0").as_deref(), Some("1"));
    assert_eq!(fs::read_to_string(inside("trap/0")).unwrap(), "9");
    assert_eq!(container.mounts(), mounts);
}

/// A thread of the container's init holds the init's mmap_lock: a reader of its command line or its
/// memory would hang.
#[test_if(can_run)]
fn a_container_that_holds_its_memory_is_refreshed() {
    let Some(files) = Unwritable::mounted() else {
        return;
    };
    let scene = Scene::with_keys(1);
    // Children that parallel tests fork have a copy of each descriptor. The kernel waits for the
    // daemon when a file with a written page is closed, but not when an O_PATH is. So the container
    // alone opens the file: a child that hung would also keep the daemon's device open.
    let folder = File::options()
        .read(true)
        .custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits())
        .open(files.file().parent().unwrap())
        .unwrap();
    let (mut go, wait) = std::io::pipe().map(|(wait, go)| (go, wait)).unwrap();
    let kept = [folder.as_fd(), wait.as_fd()];
    let container = Container::start_keeping(scene.root.path(), &scene.binds(1), &kept, || {
        let (folder, mut wait) = (folder.try_clone().unwrap(), wait.try_clone().unwrap());
        std::thread::spawn(move || {
            wait.read_exact(&mut [0]).unwrap();
            let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
            hold_memory(&openat(&folder, "f", flags, Mode::empty()).unwrap().into());
        });
    });
    go.write_all(b"x").unwrap();
    // Dropped in this order: the container ends only after the daemon of its file is gone.
    let held = (files, container);
    let (files, container) = (&held.0, &held.1);
    files.wait_for_a_holder();
    if !blocks_readers(container.process.pid()) {
        assert!(kernel() < (6, 18), "the container does not hold its memory");
        return skipped("this kernel holds no lock while it waits for the daemon of a mapped file");
    }
    let mounts = container.mounts();
    scene.pod.update(1);
    assert_eq!(methods(&scene.refresh(container)), [method()]);
    assert_eq!(
        (container.read("etc/app/0").as_deref(), container.mounts()),
        (Some("1"), mounts)
    );
}

#[test_if(can_run)]
fn a_container_that_unmounted_its_subpath_is_left_alone() {
    let scene = Scene::with_keys(1);
    let container = Container::start_with(scene.root.path(), &scene.binds(1), || {
        umount2("/etc/app/0", MntFlags::MNT_DETACH).unwrap();
    });
    let mounts = container.mounts();
    scene.pod.update(1);
    assert_eq!(
        (scene.refresh(&container).subpaths, container.mounts()),
        (0, mounts)
    );
    assert_eq!(container.read("etc/app/0").as_deref(), Some(""));
}

/// The init executes a program, and the kernel closes a file of a FUSE daemon of the container that
/// never answers: readers of most files of the init would hang.
#[test_if(can_run)]
fn an_init_that_hangs_in_execve_does_not_delay_the_refresh() {
    let scene = Scene::with_keys(1);
    let enter_own = || unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let Some(executing) = Executing::start_after(enter_own) else {
        return;
    };
    for act in [RefreshAct::Look, RefreshAct::Replace(Notify::None)] {
        let (pid, pod, records) = (executing.pid(), scene.pod.directory(), scene.records());
        let refreshed = unless_it_hangs(move || {
            let process = HeldProcess::open(pid).unwrap();
            let spec = SpecUsers::from_spec(b"{}").unwrap();
            let volumes = PodVolumes::open(&pod).unwrap();
            refresh_container(
                helper(),
                REPLACE_TIMEOUT,
                &process,
                Some(&spec),
                &[&volumes],
                act,
                &records,
            )
        });
        let refreshed = refreshed.expect("the refresh hangs");
        // A kernel that takes no lock lets the refresh go on.
        let is_bounded = matches!(
            &refreshed,
            Ok(_) | Err(RefreshError::Process(ProcessError::Blocked { .. }))
        );
        assert!(is_bounded, "{refreshed:?}");
    }
}

/// The new mount starts as a clone of a mount in the host's peer group. A container that makes its
/// stale mount shared must not stay in that group: its next mount would appear on the host.
#[test_if(can_run)]
fn a_container_that_shares_its_mount_reaches_no_mount_of_the_host() {
    for own_type in [MsFlags::MS_SHARED, MsFlags::MS_SLAVE] {
        let scene = Scene::with_keys(1);
        let container = scene.start(1);
        fs::write(scene.root.path().join("etc/app/copy"), "").unwrap();
        container.run_inside(|| {
            let file = Path::new("/etc/app/0");
            change(file, MsFlags::MS_SHARED);
            if own_type == MsFlags::MS_SLAVE {
                // The original mount becomes a slave of its copy.
                bind(file, Path::new("/etc/app/copy"));
                change(file, MsFlags::MS_SLAVE);
            }
        });
        let before = container.propagation_at("/etc/app/0");
        scene.pod.update(1);
        assert!(scene.refresh(&container).is_current(), "{own_type:?}");
        assert_eq!(container.read("etc/app/0").as_deref(), Some("1"));
        let after = container.propagation_at("/etc/app/0");
        let expected = if own_type == MsFlags::MS_SHARED {
            before
        } else {
            Vec::new()
        };
        assert_eq!(after, expected, "{own_type:?}");
        let host = mounts_of_host();
        container.run_inside(|| bind(Path::new("/etc/app/copy"), Path::new("/etc/app/0")));
        assert_eq!(mounts_of_host(), host, "{own_type:?}");
    }
}

/// `mountPropagation: Bidirectional` of a folder with a subPath in it: a mount that is attached in
/// the container appears on the host.
#[test_if(can_run)]
fn a_refresh_below_a_peer_of_a_mount_of_the_host_changes_no_mount_of_the_host() {
    let scene = Scene::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    mount_tmpfs(folder.path());
    change(folder.path(), MsFlags::MS_SHARED);
    fs::write(folder.path().join("key"), "").unwrap();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let peer = open_tree(rustix::fs::CWD, folder.path(), flags).unwrap();
    let key = Inside::of(scene.pod.subpath(0), "key");
    let container = Container::start_keeping(scene.root.path(), &[key], &[peer.as_fd()], || {
        fs::create_dir("/etc").unwrap();
        let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&peer, "", rustix::fs::CWD, "/etc", empty).unwrap();
        bind(Path::new("/key"), Path::new("/etc/key"));
        umount2("/key", MntFlags::MNT_DETACH).unwrap();
    });
    scene.pod.update_keeping_old(1);
    scene.rebind();
    let host = mounts_of_host();
    let refreshed = scene.refresh_only(&container, RefreshAct::Replace(Notify::None));
    assert_eq!(mounts_of_host(), host, "{refreshed:?}");
    assert_eq!(refusal(&refreshed), RefusedReason::ParentIsShared);
    umount2(&folder.path().join("key"), MntFlags::MNT_DETACH).unwrap();
    umount2(folder.path(), MntFlags::MNT_DETACH).unwrap();
}
