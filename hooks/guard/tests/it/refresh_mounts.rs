//! A volume that the host has mounted anew, as a restarted CSI driver does, in a running container.

use std::fs;
use std::path::Path;

use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{AttachMethod, MountResult};
use bindguard_guard::refresh::{CurrentFiles, RefreshAct};
use bindguard_testing::live::{self, Container};
use bindguard_testing::{Fuse, bind, mount_tmpfs, mounts_of_host, test_if, unmount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_scene::host_root::can_record;
use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, failure, refusal};

#[test_if(can_run)]
fn each_new_mount_of_the_host_arrives_with_the_restrictions_of_the_old_one() {
    let scene = Scene::new();
    let container = scene.start().reading();
    let (mounts, before) = (container.mounts(), container.mounts_at("/data"));
    for content in ["2", "3", "4"] {
        scene.mount_anew(content);
        let host = mounts_of_host();
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some(content));
        assert_eq!(container.mounts_at("/data").len(), 1);
        assert_eq!(container.mounts_at("/data")[0].1, before[0].1);
        assert!(container.propagation_at("/data").is_empty());
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
        assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
    }
    let seen = container.stop();
    assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
}

/// The agent and the command line may refresh a container at the same time.
#[test_if(can_run)]
fn a_refresh_that_waited_for_another_one_knows_its_mount() {
    let scene = Scene::new();
    let container = scene.start();
    let waiting = scene.bound_mounts();
    // A filesystem in use keeps its device number, so a later filesystem cannot get that number.
    let mut pinned = Vec::new();
    for content in ["2", "3"] {
        pinned.push(fs::File::open(scene.volume()).unwrap());
        scene.mount_anew(content);
        assert_eq!(scene.refresh(&container).replaced(), 1);
    }
    scene.mount_anew("4");
    let replace = RefreshAct::Replace(Notify::None);
    let refreshed = scene.act_on(&container, &waiting, replace);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    scene.mount_anew("5");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.read("data/0").as_deref(), Some("5"));
}

#[test_if(can_run)]
fn a_recursive_bind_gets_the_mounts_below_the_volume() {
    let scene = Scene::new();
    let container = scene.start();
    scene.mount_anew("2");
    let nested = scene.volume().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    fs::write(nested.join("file"), "below").unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.read("data/nested/file").as_deref(), Some("below"));
    assert!(container.propagation_at("/data/nested").is_empty());
    unmount(&nested);
    assert_eq!(container.read("data/nested/file").as_deref(), Some("below"));
}

#[test_if(can_run)]
fn a_recursive_bind_is_refreshed_again_with_mounts_below() {
    for (option, by_propagation) in [
        ("rprivate", false),
        ("rslave", false),
        ("rprivate", true),
        ("rslave", true),
    ] {
        let scene = Scene::of_an_unprivileged_container(option);
        scene.mount_below("1");
        let container = match by_propagation {
            true => scene.start_where_only_propagation_attaches(),
            false => scene.start_tree(),
        };
        let root = container.propagation_at("/");
        let kept: &[&str] = if option == "rslave" { &["master"] } else { &[] };
        assert_eq!(container.read("data/nested/file").as_deref(), Some("1"));
        let (mounts, host) = (container.mounts(), mounts_of_host().len());
        for content in ["2", "3", "4"] {
            scene.mount_anew(content);
            live::change(&scene.volume(), MsFlags::MS_SHARED);
            // To a slave, a mount below comes by propagation, too.
            let comes_later = option == "rslave" && content == "3";
            if !comes_later {
                scene.mount_below(content);
            }
            let refreshed = scene.refresh(&container);
            assert!(refreshed.is_current(), "{refreshed:?}");
            assert_eq!(refreshed.replaced(), 1);
            if comes_later {
                scene.mount_below(content);
            }
            assert_eq!(container.read("data/0").as_deref(), Some(content));
            let below = container.read("data/nested/file");
            assert_eq!(below.as_deref(), Some(content));
            let now = (container.mounts(), mounts_of_host().len());
            assert_eq!(now, (mounts, host));
            for place in ["/data", "/data/nested"] {
                assert_eq!(container.propagation_at(place), kept, "{place}, {option}");
            }
            assert_eq!(container.propagation_at("/"), root);
        }
        // The driver mounts nothing below any more.
        scene.mount_anew("5");
        assert_eq!(scene.refresh(&container).replaced(), 1);
        assert_eq!(container.read("data/0").as_deref(), Some("5"));
        assert_eq!(container.mounts(), mounts - 1);
    }
}

#[test_if(can_run)]
fn a_mount_below_that_a_privileged_container_may_have_made_is_not_lost() {
    let scene = Scene::new();
    scene.mount_below("1");
    let container = scene.start_tree();
    scene.mount_anew("2");
    let refreshed = scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::NestedMount);
    assert_eq!(container.read("data/nested/file").as_deref(), Some("1"));
}

/// The record of the create shows which mounts in the volume are copies of mounts of the host.
#[test_if(can_record)]
fn a_mount_below_goes_with_the_volume_of_a_privileged_container_by_its_record() {
    for is_mounted_by_container in [false, true] {
        let scene = Scene::with_options(&["rprivate"]);
        scene.mount_below("1");
        let container = scene.start_tree_recorded();
        only_a_mount_of_the_host_goes(&scene, &container, is_mounted_by_container);
    }
}

/// The mounts of a refresh are younger than the record of the create.
#[test_if(can_record)]
fn a_mount_below_that_a_refresh_attached_goes_with_the_next_volume() {
    for is_mounted_by_container in [false, true] {
        let scene = Scene::with_options(&["rprivate"]);
        let container = scene.start_tree_recorded();
        scene.mount_anew("2");
        scene.mount_below("2");
        assert_eq!(scene.refresh(&container).replaced(), 1);
        assert_eq!(container.read("data/nested/file").as_deref(), Some("2"));
        only_a_mount_of_the_host_goes(&scene, &container, is_mounted_by_container);
    }
}

/// The next volume has no mount below. The container's copy of the old volume has a mount of the
/// host below, perhaps under the container's own mount.
fn only_a_mount_of_the_host_goes(
    scene: &Scene,
    container: &Container,
    is_mounted_by_container: bool,
) {
    if is_mounted_by_container {
        container.run_inside(|| mount_tmpfs(Path::new("/data/nested")));
    }
    scene.mount_anew("9");
    let refreshed = scene.refresh(container);
    if is_mounted_by_container {
        assert_eq!(refusal(&refreshed), RefusedReason::NestedMount);
    } else {
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some("9"));
        assert!(container.mounts_at("/data/nested").is_empty());
    }
}

/// A driver that renews a token mounts over the old mount, and may unmount the new mount again.
#[test_if(can_run)]
fn of_stacked_mounts_the_topmost_arrives() {
    let scene = Scene::new();
    let container = scene.start();
    let mounts = container.mounts();
    let shows = |content: &str| {
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{content}: {refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some(content));
        assert_eq!(container.mounts(), mounts);
    };
    let contents = ["2", "3", "4", "5", "6"];
    for content in contents {
        scene.mount(content);
        shows(content);
    }
    for content in contents.iter().rev().skip(1) {
        umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
        shows(content);
    }
}

#[test_if(can_run)]
fn a_tree_of_64_mounts_arrives_whole_where_only_propagation_attaches() {
    for option in ["rprivate", "rslave"] {
        let scene = Scene::of_an_unprivileged_container(option);
        let container = scene.start_where_only_propagation_attaches();
        let mounts = container.mounts();
        scene.mount_anew("2");
        live::change(&scene.volume(), MsFlags::MS_SHARED);
        let mut innermost = scene.volume();
        for _ in 0..64 {
            innermost.push("n");
            fs::create_dir(&innermost).unwrap();
            mount_tmpfs(&innermost);
        }
        fs::write(innermost.join("file"), "innermost").unwrap();
        let host = mounts_of_host();
        assert_eq!(scene.refresh(&container).replaced(), 1);
        let inside = format!("data/{}file", "n/".repeat(64));
        assert_eq!(container.read(&inside).as_deref(), Some("innermost"));
        assert_eq!((container.mounts(), mounts_of_host()), (mounts + 64, host));
        let kept: &[&str] = if option == "rslave" { &["master"] } else { &[] };
        for depth in 0..=64 {
            let place = format!("/data{}", "/n".repeat(depth));
            assert_eq!(container.propagation_at(&place), kept, "{place}, {option}");
        }
    }
}

#[test_if(can_run)]
fn a_volume_without_mounts_in_it_is_replaced_where_only_propagation_attaches() {
    for options in [&["bind", "ro"][..], &["rbind", "rprivate", "ro"]] {
        let scene = Scene::with_bind(options);
        let container = scene.start_where_only_propagation_attaches();
        let (mounts, root) = (container.mounts(), container.propagation_at("/"));
        for content in ["2", "3"] {
            scene.mount_anew(content);
            live::change(&scene.volume(), MsFlags::MS_SHARED);
            let host = mounts_of_host();
            let refreshed = scene.refresh(&container);
            let outcome = refreshed.mounts[0].outcome.clone();
            let method = AttachMethod::Tucked;
            assert_eq!(outcome, MountResult::Replaced { method }, "{refreshed:?}");
            assert_eq!(container.read("data/0").as_deref(), Some(content));
            assert!(container.propagation_at("/data").is_empty());
            let now = (container.mounts(), container.propagation_at("/"));
            assert_eq!((now, mounts_of_host()), ((mounts, root.clone()), host));
        }
    }
}

#[test_if(can_run)]
fn mounts_of_the_container_stay() {
    for place in ["/data", "/data/cache"] {
        let scene = Scene::new();
        fs::create_dir(scene.volume().join("cache")).unwrap();
        let container = scene.start_with(|| mount_tmpfs(Path::new(place)));
        let before = container.mounts_at(place);
        scene.mount_anew("2");
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
        assert_eq!(container.mounts_at(place), before);
    }
}

#[test_if(can_run)]
fn a_mount_that_would_reach_the_host_is_refused() {
    for (place, reason) in [
        ("/", RefusedReason::ParentIsShared),
        ("/data", RefusedReason::MountIsShared),
    ] {
        let scene = Scene::new();
        let container = scene.start_with(|| live::change(Path::new(place), MsFlags::MS_SHARED));
        scene.mount_anew("2");
        let refreshed = scene.refresh(&container);
        assert_eq!(refusal(&refreshed), reason, "{place}");
        assert_eq!(container.read("data/0").as_deref(), Some("1"));
    }
}

#[test_if(can_run)]
fn a_new_mount_that_does_not_answer_is_refused() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.begin();
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    bind(&fuse.path(), &scene.volume());
    let refreshed = scene.refresh(&container);
    assert_eq!(refusal(&refreshed), RefusedReason::SourceIsDead);
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
    drop(fuse.device.take());
}

#[test_if(can_run)]
fn without_a_mount_on_the_host_the_old_one_stays() {
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    assert!(scene.refresh(&container).mounts.is_empty());
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
}

/// `key-gone` is for a key that the kubelet removed from its volume.
#[test_if(can_run)]
fn a_source_that_vanishes_during_a_refresh_has_its_own_reason() {
    let scene = Scene::new();
    let container = scene.start();
    scene.mount_anew("2");
    let mounts = scene.bound_mounts();
    let stale = mounts.shown_in(&container.process.mounts().unwrap());
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    let opened = mounts.open_current(&stale[0]);
    let refused = Refused::new(RefusedReason::NoSource, scene.volume());
    assert_eq!(opened.unwrap_err(), refused.into());
}

/// No rule refuses the mount: another refresh may read the table.
#[test_if(can_run)]
fn without_the_hosts_mount_table_a_volume_with_mounts_in_it_is_a_failure() {
    let scene = Scene::new();
    scene.mount_below("1");
    let container = scene.start_tree();
    scene.mount_anew("2");
    let table = container.process.mounts().unwrap();
    let mounts = scene.bound_mounts();
    let stale = mounts.shown_in(&table);
    let proc = Path::new("/proc");
    mount_tmpfs(proc);
    let below = mounts.mounts_below(&stale[0], &table);
    umount2(proc, MntFlags::MNT_DETACH).unwrap();
    assert!(
        matches!(&below, Err(MountResult::Failed { error }) if error.starts_with("compare with the mounts of the host: ")),
        "{below:?}"
    );
}

/// Otherwise the next refresh would take the new mount for the container's own.
#[test_if(can_run)]
fn a_mount_that_cannot_be_recorded_is_not_made() {
    let scene = Scene::new();
    let container = scene.start();
    scene.mount_anew("2");
    let bundle = scene.pod.bundle();
    bind(&bundle, &bundle);
    let none = None::<&str>;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, &bundle, none, read_only, none).unwrap();
    let refreshed = scene.refresh(&container);
    assert!(
        failure(&refreshed).starts_with("record the new mount beside the container's bundle: "),
        "{refreshed:?}"
    );
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
    umount2(&bundle, MntFlags::MNT_DETACH).unwrap();
    for content in ["2", "3"] {
        assert_eq!(scene.refresh(&container).replaced(), 1);
        assert_eq!(container.read("data/0").as_deref(), Some(content));
        scene.mount_anew("3");
    }
}

#[test_if(can_run)]
fn a_container_that_mounted_its_own_volume_is_reported() {
    let scene = Scene::new();
    let container = scene.start_with(|| {
        umount2("/data", MntFlags::MNT_DETACH).unwrap();
        mount_tmpfs(Path::new("/data"));
    });
    let mounts = container.mounts();
    assert!(scene.refresh(&container).mounts.is_empty(), "too early");
    // A filesystem in use keeps its device number, so a later filesystem cannot get that number.
    let _pinned = fs::File::open(scene.volume()).unwrap();
    scene.mount_anew("2");
    let refreshed = scene.refresh(&container);
    let results: Vec<_> = refreshed
        .mounts
        .iter()
        .map(|it| it.outcome.clone())
        .collect();
    assert_eq!(results, [MountResult::Hidden]);
    assert_eq!(container.mounts(), mounts);
    assert_eq!(container.read("data/0"), None);
}

/// As under a shim without a guard.
#[test_if(can_run)]
fn without_a_record_a_lone_mount_is_replaced() {
    let scene = Scene::new();
    fs::remove_file(scene.pod.bundle().join("bindguard-binds.json")).unwrap();
    let container = scene.start();
    scene.mount_anew("2");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
}

/// The container could exchange a folder that it can write for a link.
#[test_if(can_run)]
fn a_link_in_the_place_of_the_volume_is_not_followed() {
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    fs::remove_dir(scene.volume()).unwrap();
    let elsewhere = scene.pod.directory().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    mount_tmpfs(&elsewhere);
    fs::write(elsewhere.join("0"), "9").unwrap();
    std::os::unix::fs::symlink(&elsewhere, scene.volume()).unwrap();
    assert!(scene.refresh(&container).mounts.is_empty());
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
}

/// Kubernetes' `recursiveReadOnly` also covers the mounts below the volume.
#[test_if(can_run)]
fn a_recursively_read_only_bind_is_read_only_below_the_volume() {
    let scene = Scene::with_options(&["rro", "rnosuid", "rnoexec"]);
    let container = scene.start();
    scene.mount_anew("2");
    let nested = scene.volume().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    assert_eq!(scene.refresh(&container).replaced(), 1);
    let below = container.mounts_at("/data/nested");
    assert!(below[0].1.starts_with("ro,nosuid,noexec"), "{below:?}");
    let host = fs::write(nested.join("file"), "the host may write");
    assert!(host.is_ok(), "{host:?}");
}

/// The kernel makes a slave private when its master is unmounted, so the old mount does not show
/// what the spec says.
#[test_if(can_run)]
fn a_bind_that_receives_mounts_of_the_host_still_does() {
    let scene = Scene::with_options(&["ro", "rslave"]);
    let container = scene.start();
    scene.mount_anew("2");
    live::change(&scene.volume(), MsFlags::MS_SHARED);
    fs::create_dir(scene.volume().join("later")).unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.propagation_at("/data"), ["master"]);
    mount_tmpfs(&scene.volume().join("later"));
    assert_eq!(container.mounts_at("/data/later").len(), 1);
    let (mounts, host) = (container.mounts(), mounts_of_host());
    assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
    assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
}

#[test_if(can_run)]
fn a_look_leaves_the_record_as_it_is() {
    let scene = Scene::new();
    let container = scene.start();
    scene.mount_anew("2");
    let record = || fs::read(scene.pod.bundle().join("bindguard-binds.json")).unwrap();
    let before = record();
    let looked = scene.act(&container, RefreshAct::Look);
    assert_eq!(looked.mounts.len(), 1, "{looked:?}");
    assert!(record() == before);
}

/// The container may have remounted its mount. Kubernetes 1.37 has mount options of a volumeMount
/// (KEP-5855), such as noexec.
#[test_if(can_run)]
fn a_new_mount_denies_what_the_spec_denies() {
    let scene = Scene::with_options(&["ro", "nosuid", "noexec"]);
    let none = None::<&str>;
    let writable = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    let container = scene.start_with(|| mount(none, "/data", none, writable, none).unwrap());
    let at = container.mounts_at("/data");
    assert!(at[0].1.starts_with("rw,"), "{at:?}");
    scene.mount_anew("2");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    let at = container.mounts_at("/data");
    assert!(at[0].1.starts_with("ro,nosuid,noexec"), "{at:?}");
}

/// runc clears the flags of the host's mount for the option `rw`, which is in every pod.
#[test_if(can_run)]
fn a_new_mount_allows_what_the_create_allowed() {
    let scene = Scene::with_options(&["rw"]);
    let none = None::<&str>;
    let strict = MsFlags::MS_REMOUNT
        | MsFlags::MS_BIND
        | MsFlags::MS_NOSUID
        | MsFlags::MS_NODEV
        | MsFlags::MS_NOEXEC;
    mount(none, &scene.volume(), none, strict, none).unwrap();
    let cleared = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    let container = scene.start_with(|| mount(none, "/data", none, cleared, none).unwrap());
    let before = container.mounts_at("/data");
    assert!(before[0].1.starts_with("rw,relatime"), "{before:?}");
    scene.mount_anew("2");
    mount(none, &scene.volume(), none, strict, none).unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(container.mounts_at("/data")[0].1, before[0].1);
}

/// Otherwise the container would receive the mounts that the host makes in the volume later.
#[test_if(can_run)]
fn a_private_bind_stays_private_although_the_container_made_a_slave_of_its_mount() {
    let scene = Scene::new();
    let data = Path::new("/data");
    let container = scene.start_with(|| {
        live::change(data, MsFlags::MS_SHARED);
        fs::create_dir("/peer").unwrap();
        bind(data, Path::new("/peer"));
        live::change(data, MsFlags::MS_SLAVE);
    });
    assert_eq!(container.propagation_at("/data"), ["master"]);
    scene.mount_anew("2");
    live::change(&scene.volume(), MsFlags::MS_SHARED);
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert!(container.propagation_at("/data").is_empty());
}
