//! A container that works against the refresh of its volume: it changes namespaces, has thousands of
//! mounts, and mounts over the volume, in the volume and beneath the volume's place.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    BoundMounts, HelperProcess, NamespaceError, REPLACE_TIMEOUT, RefreshAct, RefreshError,
    TuckRecords, refresh_container,
};
use bindguard_testing::hostile_process::{HostileProcess, Step, errno};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{bind, deny_call, helper, mount_tmpfs, mounts_of_host, rounds, test_if};
use nix::errno::Errno;
use nix::libc::{EINVAL, EPERM};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_namespaces::{FLIP, MAKE_OTHER, STEPS};
use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, refusal};

/// The refresh checks, reads and enters the same namespace.
#[test_if(can_run)]
fn a_process_that_changes_namespaces_in_a_loop_gets_no_volume_in_the_other_one() {
    let scene = Scene::new();
    fs::write(scene.root().join("copy"), "").unwrap();
    let binds = [
        Inside::of(scene.volume(), "data"),
        Inside::of(scene.pod.subpath(0), "etc/app/0"),
    ];
    let mut container = HostileProcess::start(scene.root(), &binds, None, &STEPS);
    let other = container.does(MAKE_OTHER);
    let mounts = || fs::read_to_string(format!("/proc/{other}/mountinfo")).unwrap();
    let before = mounts();
    container.begins(FLIP);
    let records = TuckRecords::at(&scene.root().join("tucks"));
    let (mut refreshed, mut refused) = (0, 0);
    for version in 1..=rounds(100, 10_000) {
        scene.mount_anew(&version.to_string());
        let host = mounts_of_host();
        let volumes = BoundMounts::open(&scene.pod.bundle(), &scene.pod.directory()).unwrap();
        let done = refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(&live::spec_of(None)),
            &[&volumes],
            RefreshAct::Replace(Notify::None),
            &records,
        );
        match done {
            Ok(done) => refreshed += done.replaced(),
            Err(RefreshError::Namespace(NamespaceError::OtherOwner(_))) => refused += 1,
            Err(other) => panic!("{other:?}"),
        }
        assert_eq!(mounts(), before, "after version {version}");
        assert_eq!(mounts_of_host(), host, "after version {version}");
    }
    assert!(
        refreshed > 10 && refused > 10,
        "{refreshed} refreshed, {refused} refused"
    );
}

/// Copies of the volume that the container made keep the old volume.
#[test_if(can_run)]
fn a_container_with_thousands_of_mounts_gets_the_new_volume_in_time() {
    let scene = Scene::new();
    let container = scene.start_with(|| {
        live::make_mounts(2000);
        fs::create_dir("/copies").unwrap();
        for number in 0..2000 {
            let place = format!("/copies/{number}");
            fs::create_dir(&place).unwrap();
            bind(Path::new("/data"), Path::new(&place));
        }
    });
    let mounts = container.mounts();
    assert!(mounts > 4000);
    for content in ["2", "3"] {
        scene.mount_anew(content);
        let (start, host) = (Instant::now(), mounts_of_host());
        let refreshed = scene.refresh(&container);
        assert!(start.elapsed() < Duration::from_secs(60), "it is late");
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some(content));
        assert_eq!(container.read("copies/1999/0").as_deref(), Some("1"));
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    }
}

#[test_if(can_run)]
fn a_container_with_thousands_of_mounts_over_its_volume_keeps_them() {
    let scene = Scene::new();
    let container = scene.start_with(|| {
        for _ in 0..2000 {
            mount_tmpfs(Path::new("/data"));
        }
    });
    let before = container.mounts_at("/data");
    assert_eq!(before.len(), 2001);
    scene.mount_anew("2");
    let start = Instant::now();
    let refreshed = scene.refresh(&container);
    assert!(start.elapsed() < Duration::from_secs(60), "it is late");
    assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
    assert_eq!(container.mounts_at("/data"), before);
}

/// The container mounts over the volume and in the volume, exchanges the folder beneath, moves the
/// volume away and back, and shares its mounts, all while refreshes run.
#[test_if(can_run)]
fn a_container_that_mounts_all_the_time_reaches_nothing_of_the_host() {
    let mount_for_ever = || {
        for folder in ["/away", "/copy", "/data/nested"] {
            fs::create_dir_all(folder).unwrap();
        }
        std::thread::spawn(|| {
            let (kind, none) = (Some("tmpfs"), None::<&str>);
            let set = |place: &str, flags| _ = mount(none, place, none, flags, none);
            loop {
                // A refresh may take each place away at any moment.
                for place in ["/data/nested", "/data", "/"] {
                    set(place, MsFlags::MS_SHARED | MsFlags::MS_REC);
                    let _ = mount(kind, place, kind, MsFlags::empty(), none);
                    let _ = umount2(place, MntFlags::MNT_DETACH);
                    set(place, MsFlags::MS_PRIVATE | MsFlags::MS_REC);
                }
                // While a refresh shares the root, the copy is its peer.
                let _ = mount(Some("/"), "/copy", none, MsFlags::MS_BIND, none);
                let _ = umount2("/copy", MntFlags::MNT_DETACH);
                let moved = MsFlags::MS_MOVE;
                let _ = mount(Some("/data"), "/away", none, moved, none);
                let _ = fs::rename("/data", "/other");
                let _ = fs::create_dir("/data");
                let _ = fs::remove_dir("/data");
                let _ = fs::rename("/other", "/data");
                let _ = mount(Some("/away"), "/data", none, moved, none);
            }
        });
    };
    // In each method and propagation, a refresh has to be in time: beside other tests that may take
    // more rounds.
    let mut replaced = [0; 4];
    let least = rounds(40, 1000);
    for version in 0..10 * least {
        if version >= least && !replaced.contains(&0) {
            break;
        }
        let kind = version as usize % 4;
        let (has_own_users, option) = (kind > 1, ["rprivate", "rslave"][kind % 2]);
        let scene = Scene::with_options(&[option]);
        fs::create_dir(scene.volume().join("nested")).unwrap();
        let data = Inside::tree(scene.volume(), "data");
        let container = match has_own_users {
            true => Container::start_in_user_namespace_with(scene.root(), &[data], mount_for_ever),
            false => Container::start_with(scene.root(), &[data], mount_for_ever),
        };
        for turn in 0..4 {
            scene.mount_anew(&version.to_string());
            live::change(&scene.volume(), MsFlags::MS_SHARED);
            scene.mount_below("below");
            let host = mounts_of_host();
            replaced[kind] += scene.refresh(&container).replaced();
            assert_eq!(mounts_of_host(), host, "version {version}, turn {turn}");
            let content = fs::read_to_string(scene.volume().join("0")).unwrap();
            assert_eq!(content, version.to_string());
        }
    }
    assert!(
        !replaced.contains(&0),
        "no refresh was in time: {replaced:?}"
    );
}

/// The work of a container against a volume with a mount in it, in turn.
const AGAINST_A_TREE: [Step; 11] = [
    || mount_evil("/data/nested"),
    || errno(umount2("/data/nested", MntFlags::MNT_DETACH)),
    || set("/data/nested", MsFlags::MS_REMOUNT | MsFlags::MS_BIND),
    || errno(umount2("/data/nested", MntFlags::MNT_DETACH)),
    || set("/data", MsFlags::MS_SHARED | MsFlags::MS_REC),
    || mount_evil("/data/nested"),
    || {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        errno(mount(
            Some("/data"),
            "/copy",
            None::<&str>,
            flags,
            None::<&str>,
        ))
    },
    || mount_evil("/copy/nested"),
    || mount_evil("/data"),
    || errno(umount2("/data", MntFlags::MNT_DETACH)),
    || errno(umount2("/data", MntFlags::MNT_DETACH)),
];

fn set(place: &str, flags: MsFlags) -> i32 {
    errno(mount(
        None::<&str>,
        place,
        None::<&str>,
        flags,
        None::<&str>,
    ))
}

fn mount_evil(place: &str) -> i32 {
    let (kind, flags) = (Some("tmpfs"), MsFlags::empty());
    let mounted = errno(mount(kind, place, kind, flags, None::<&str>));
    mounted | i32::from(fs::write(format!("{place}/evil"), "").is_err())
}

/// A new mount that was a peer of the host's passed the container's mounts and umounts to the host.
#[test_if(can_run)]
fn nothing_that_a_container_does_in_its_new_volume_reaches_the_host() {
    for (option, users) in [
        ("rprivate", Some("0 0 1")),
        ("rslave", Some("0 0 1")),
        ("rprivate", None),
        ("rslave", None),
    ] {
        let scene = Scene::with_options(&[option]);
        fs::create_dir(scene.root().join("copy")).unwrap();
        let data = Inside::tree(scene.volume(), "data");
        let steps = &AGAINST_A_TREE;
        let mut container = HostileProcess::start(scene.root(), &[data], users, steps);
        scene.mount_anew("2");
        live::change(&scene.volume(), MsFlags::MS_SHARED);
        scene.mount_below("2");
        let nested = scene.volume().join("nested");
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        set(nested.to_str().unwrap(), read_only);
        let host = mounts_of_host();
        let act = RefreshAct::Replace(Notify::None);
        let (process, spec) = (&container.process, live::spec_of(users));
        let refreshed = scene.act_on_process(process, &spec, &scene.bound_mounts(), act);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(mounts_of_host(), host, "{option} {users:?}");
        for step in 0..AGAINST_A_TREE.len() {
            // The flags and the place of a mount from another user namespace are locked.
            let expected = match (step, users) {
                (2, Some(_)) => EPERM,
                (3, Some(_)) => EINVAL,
                _ => 0,
            };
            let at = format!("step {step}, {option} {users:?}");
            assert_eq!(container.does(step), expected, "{at}");
            assert_eq!(mounts_of_host(), host, "{at}");
            let evil = [scene.volume(), nested.clone()]
                .map(|it| fs::symlink_metadata(it.join("evil")).is_ok());
            assert_eq!(evil, [false; 2], "{at}");
        }
    }
}

/// In a user namespace, older kernels lock the old mount when the new one arrives beneath: umount2(2)
/// answers EINVAL, as for a mount that is gone.
#[test_if(can_run)]
fn an_old_mount_that_stays_locked_is_a_failure() {
    let scene = Scene::with_options(&["rprivate"]);
    let container = scene.start_where_only_propagation_attaches();
    scene.mount_anew("2");
    let locked = || {
        deny_call(nix::libc::SYS_umount2, Errno::EINVAL);
        let helper = HelperProcess::start().unwrap();
        refresh_container(
            &helper,
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&scene.bound_mounts()],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&scene.records()),
        )
        .unwrap()
    };
    for _ in 0..2 {
        let refreshed = std::thread::scope(|scope| scope.spawn(locked).join().unwrap());
        assert_eq!(refusal(&refreshed), RefusedReason::Locked);
        assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some("1"));
        assert_eq!(container.mounts_at("/data").len(), 2);
    }
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    assert_eq!(container.mounts_at("/data").len(), 1);
}
