//! A private host-root bind of a running container keeps each mount that the host had at its start.
//! A refresh gives the container the mounts of now, which receive the host's umounts.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use bindguard_core::policy::{Mode, Policy, ReadOnlyBinds};
use bindguard_core::refresh::RefusedReason;
use bindguard_core::report::AttachMethod;
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::RefreshAct;
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{mount_tmpfs, mounts_of_host, rounds, test_if, unmount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_scene::host_root::{Scene, can_record};
use crate::refresh_scene::{self, can_attach_beneath, can_run};

#[test_if(can_run)]
fn a_private_bind_releases_what_the_host_unmounted() {
    let scene = Scene::new();
    let container = scene.start();
    unmount(&scene.disk());
    mount_tmpfs(&scene.host.path().join("later"));
    fs::write(scene.host.path().join("later/file"), "later").unwrap();
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
    let host = mounts_of_host();
    let looked = scene.act(&container, RefreshAct::Look);
    assert!(
        matches!(looked.mounts[..], [ref only] if matches!(only.outcome, MountResult::Stale)),
        "{looked:?}"
    );
    let refreshed = scene.refresh(&container);
    assert_eq!(
        refresh_scene::methods(&refreshed),
        [refresh_scene::method()]
    );
    assert_eq!(mounts_of_host(), host);
    assert_eq!(container.mounts_at("/host").len(), 1);
    assert_eq!(container.propagation_at("/host"), ["master"]);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(container.read("host/later/file").as_deref(), Some("later"));
    // From now on the host's mounts and umounts arrive.
    unmount(&scene.host.path().join("later"));
    assert!(container.mounts_at("/host/later").is_empty());
    mount_tmpfs(&scene.disk());
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    let (mounts, host) = (container.mounts(), mounts_of_host());
    assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
    assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
}

/// The create wrote rslave into the spec. The runtime bound a mount that it had made private before,
/// because the container's root filesystem is a plain folder on that mount.
#[test_if(can_run)]
fn a_bind_that_the_runtime_made_private_is_refreshed() {
    let scene = Scene::new();
    scene.write_spec(&["rslave"], &[]);
    let container = scene.start_with(|| {});
    unmount(&scene.disk());
    let looked = scene.act(&container, RefreshAct::Look);
    assert!(
        matches!(looked.mounts[..], [ref only] if matches!(only.outcome, MountResult::Stale)),
        "{looked:?}"
    );
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.propagation_at("/host"), ["master"]);
    assert!(container.mounts_at("/host/disk").is_empty());
    let again = scene.refresh(&container);
    assert!(again.mounts.is_empty() && again.subpaths == 1, "{again:?}");
}

/// Such a bind keeps no mount of the host alive, and the mounts below are not its container's.
#[test_if(can_run)]
fn a_bind_that_is_not_recursive_is_not_refreshed() {
    let scene = Scene::new();
    scene.write_spec(&["private"], &[]);
    let config = scene.bundle().join("config.json");
    let spec = fs::read_to_string(&config).unwrap();
    fs::write(&config, spec.replace("rbind", "bind")).unwrap();
    let bind = Inside::of(scene.host.path().to_owned(), "host");
    let container = Container::start_with(scene.root.path(), &[bind], || {});
    let mounts = container.mounts();
    assert!(scene.refresh(&container).mounts.is_empty());
    assert_eq!(container.mounts(), mounts);
    assert!(container.mounts_at("/host/disk").is_empty());
}

/// The top mount keeps what the old mount and the spec deny; so does each mount below.
fn remount(place: &Path, flags: MsFlags) {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
    mount(None::<&str>, place, None::<&str>, flags, None::<&str>).unwrap();
}

#[test_if(can_run)]
fn the_new_mounts_are_as_restricted_as_the_old_ones() {
    let scene = Scene::new();
    // The runtime's mount is nosuid, and has lost the `ro` of the spec.
    scene.write_spec(&["rprivate", "ro", "rnodev"], &[]);
    let nested = scene.disk().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    let container = scene.start_with(|| {
        let strict = MsFlags::MS_RDONLY | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        remount(Path::new("/host/disk/nested"), strict);
    });
    let host = mounts_of_host();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(mounts_of_host(), host);
    for (place, options) in [
        ("/host", "ro,nosuid,nodev,relatime"),
        ("/host/disk", "rw,nodev,relatime"),
        ("/host/disk/nested", "ro,nodev,noexec,noatime"),
    ] {
        let mounts = container.mounts_at(place);
        assert_eq!(mounts.len(), 1, "{place}");
        assert_eq!(mounts[0].1, options, "{place}");
        assert_eq!(container.propagation_at(place), ["master"], "{place}");
    }
    unmount(&nested);
    assert!(container.mounts_at("/host/disk/nested").is_empty());
}

#[test_if(can_run)]
fn mounts_of_the_container_stay() {
    for place in ["/host/later", "/host/disk"] {
        let scene = Scene::new();
        scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
        let container = scene.start_with(|| mount_tmpfs(Path::new(place)));
        scene.is_refused(&container, RefusedReason::NestedMount);
    }
    let scene = Scene::new();
    let container = scene.start_with(|| mount_tmpfs(Path::new("/host")));
    let before = container.mounts_at("/host");
    let refreshed = scene.refresh(&container);
    assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
    assert_eq!(container.mounts_at("/host"), before);
}

/// A process with `CAP_SYS_ADMIN` could have mounted the disk itself.
#[test_if(can_run)]
fn a_copy_stays_if_the_container_may_have_mounted_it() {
    let scene = Scene::new();
    scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
    let container = scene.start();
    unmount(&scene.disk());
    scene.is_refused(&container, RefusedReason::NestedMount);
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
}

#[test_if(can_run)]
fn policy_and_the_spec_decide_as_at_a_create() {
    let refused = |options: &[&str], policy: Policy, reason| {
        let mut scene = Scene::new();
        scene.write_spec(options, &[]);
        scene.policy = policy;
        let container = scene.start();
        scene.is_refused(&container, reason);
    };
    let policy = Policy::default();
    let rro = RefusedReason::RecursivelyReadOnly;
    refused(&["rprivate", "rro"], policy, rro);
    refused(
        &["rprivate", "ro"],
        Policy {
            read_only_binds: ReadOnlyBinds::Keep,
            ..policy
        },
        RefusedReason::ReadOnlyKept,
    );
    let host_root = Mode::Report;
    refused(
        &["rprivate"],
        Policy {
            host_root,
            ..policy
        },
        RefusedReason::OnlyReported,
    );
    let mut scene = Scene::new();
    scene.policy.host_root = Mode::Off;
    assert!(scene.refresh(&scene.start()).mounts.is_empty(), "off");
}

#[test_if(can_run)]
fn a_source_that_is_private_on_the_host_is_refused() {
    let scene = Scene::new();
    live::change(Path::new("/"), MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    let container = scene.start();
    scene.is_refused(&container, RefusedReason::PrivateOnHost);
}

#[test_if(can_run)]
fn a_mount_that_would_reach_the_host_is_refused() {
    let scene = Scene::new();
    let container = scene.start_with(|| live::change(Path::new("/"), MsFlags::MS_SHARED));
    scene.is_refused(&container, RefusedReason::ParentIsShared);
}

/// The mounts of the host are locked there: the container sees nothing beneath them.
#[test_if(can_run)]
fn a_container_with_a_user_namespace_gets_the_mounts_of_now() {
    let scene = Scene::new();
    let container = Container::start_in_user_namespace(scene.root.path(), &[scene.bind()]);
    unmount(&scene.disk());
    let later = scene.host.path().join("later");
    mount_tmpfs(&later);
    let (mounts, host) = (container.mounts(), mounts_of_host());
    let refreshed = scene.refresh(&container);
    assert_eq!(refresh_scene::methods(&refreshed), [AttachMethod::Tucked]);
    assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    assert!(container.mounts_at("/host/disk").is_empty());
    for place in ["/host", "/host/later"] {
        assert_eq!(container.propagation_at(place), ["master"], "{place}");
    }
    assert!(container.propagation_at("/").is_empty());
    // From now on the host's mounts and umounts arrive.
    unmount(&later);
    assert!(container.mounts_at("/host/later").is_empty());
    mount_tmpfs(&scene.disk());
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
}

/// Without a step that makes the old mounts private, their detach unmounts the host's.
#[test_if(can_run)]
fn mounts_below_that_are_peers_of_the_hosts_are_detached_alone() {
    let scene = Scene::new();
    let nested = scene.disk().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
    let peers = open_tree(rustix::fs::CWD, scene.disk(), flags).unwrap();
    let attach = || {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&peers, c"", rustix::fs::CWD, "/host/disk", flags).unwrap();
    };
    let binds = [scene.bind()];
    let container = Container::start_keeping(scene.root.path(), &binds, &[peers.as_fd()], attach);
    let table = fs::read_to_string(format!("/proc/{}/mountinfo", container.process.pid()));
    let is_peer = |line: &&str| line.contains(" /host/disk/nested ") && line.contains(" shared:");
    assert_eq!(table.unwrap().lines().filter(is_peer).count(), 1);
    drop(peers);
    let host = mounts_of_host();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(mounts_of_host(), host);
    assert_eq!(container.mounts_at("/host/disk/nested").len(), 1);
    assert_eq!(container.propagation_at("/host/disk/nested"), ["master"]);
}

/// A container with `CAP_SYS_ADMIN` mounts over the bind and in the bind while refreshes run.
#[test_if(can_run)]
fn a_container_that_mounts_all_the_time_reaches_nothing_of_the_host() {
    let scene = Scene::new();
    scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
    let mount_for_ever = || {
        std::thread::spawn(|| {
            let flags = MsFlags::MS_SHARED | MsFlags::MS_REC;
            loop {
                for place in ["/host/later", "/host", "/host/disk"].map(Path::new) {
                    // A refresh may take the place away at any moment.
                    let (kind, none) = (Some("tmpfs"), None::<&str>);
                    let _ = mount(kind, place, kind, MsFlags::empty(), none);
                    let _ = mount(none, place, none, flags, none);
                    let _ = umount2(place, MntFlags::MNT_DETACH);
                }
                let (none, private) = (None::<&str>, MsFlags::MS_PRIVATE | MsFlags::MS_REC);
                let _ = mount(none, "/host", none, private, none);
            }
        });
    };
    let host = mounts_of_host();
    for _ in 0..rounds(10, 500) {
        // Soon the container has unmounted the bind itself.
        let container = scene.start_with(mount_for_ever);
        for _ in 0..4 {
            let refreshed = scene.refresh(&container);
            assert!(refreshed.abandoned.is_none(), "{refreshed:?}");
            assert_eq!(mounts_of_host(), host);
        }
    }
    let file = fs::read_to_string(scene.disk().join("file"));
    assert_eq!(file.unwrap(), "disk");
}

/// As after a kill between the attach and the detach.
#[test_if(can_attach_beneath)]
fn a_refresh_that_was_interrupted_is_finished() {
    let scene = Scene::new();
    let container = scene.start();
    unmount(&scene.disk());
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
    let new = open_tree(rustix::fs::CWD, scene.host.path(), flags).unwrap();
    let namespace = container.namespace();
    let attach = || {
        unshare(CloneFlags::CLONE_FS).unwrap();
        let links = fs::File::open("/proc/thread-self/fd").unwrap();
        setns(&namespace, CloneFlags::CLONE_NEWNS).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_BENEATH;
        move_mount(&new, c"", rustix::fs::CWD, "/host", flags).unwrap();
        rustix::process::fchdir(&links).unwrap();
        let slave = MsFlags::MS_SLAVE | MsFlags::MS_REC;
        live::change(Path::new(&new.as_raw_fd().to_string()), slave);
    };
    std::thread::scope(|scope| scope.spawn(attach).join().unwrap());
    drop(new);
    let host = mounts_of_host();
    assert_eq!(container.mounts_at("/host").len(), 2);
    let refreshed = scene.refresh(&container);
    assert_eq!(refresh_scene::methods(&refreshed), [AttachMethod::Finished]);
    assert_eq!(container.mounts_at("/host").len(), 1);
    assert_eq!(container.propagation_at("/host"), ["master"]);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(mounts_of_host(), host);
}

/// The record distinguishes the copies of the create from mounts that a privileged container made.
#[test_if(can_record)]
fn a_privileged_container_is_refreshed_by_its_record() {
    let (mut scene, container) = Scene::recorded(|| {});
    scene.policy.host_root = Mode::Repair;
    unmount(&scene.disk());
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert!(container.mounts_at("/host/disk").is_empty());
    let (mut scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    scene.policy.host_root = Mode::Repair;
    scene.is_refused(&container, RefusedReason::NestedMount);
}
