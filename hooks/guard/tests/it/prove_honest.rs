//! Mounts of honest runtimes whose place, order or number is unusual: no false alarm.

use std::fs;
use std::os::unix::fs::symlink;

use bindguard_guard::Proved;
use bindguard_testing::live::Inside;
use bindguard_testing::{bind, mount_tmpfs, own_namespace, test_if};
use nix::mount::{MsFlags, mount};
use serde_json::json;

use super::prove_hostile::{Scene, tmpfs_entry};

/// All binds were compared, and none differs.
#[track_caller]
fn is_proven(proved: &Proved) {
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert!(proved.report.binds.is_empty(), "{proved:?}");
    assert_eq!(proved.report.unproven, 0, "{proved:?}");
}

#[test_if(own_namespace)]
fn a_source_twice_and_a_destination_twice() {
    let scene = Scene::with_image(&[]);
    let pairs = [
        ("right", "a"),
        ("right", "b"),
        ("left", "twice"),
        ("right", "twice"),
        ("left", "same"),
        ("left", "same"),
    ];
    scene.admit(&pairs.map(|(source, place)| scene.entry(source, &format!("/{place}"))));
    is_proven(&scene.proved(&pairs.map(|(source, place)| scene.mounted(source, place))));
}

/// The outer bind that is mounted last covers the inner bind.
#[test_if(own_namespace)]
fn nested_destinations_in_both_orders() {
    for pairs in [
        [("left", "data"), ("right", "data/sub")],
        [("right", "data/sub"), ("left", "data")],
    ] {
        let scene = Scene::with_image(&[]);
        scene.admit(&pairs.map(|(source, place)| scene.entry(source, &format!("/{place}"))));
        is_proven(&scene.proved(&pairs.map(|(source, place)| scene.mounted(source, place))));
    }
}

#[test_if(own_namespace)]
fn a_tmpfs_of_the_spec_over_an_earlier_bind() {
    for tmpfs in ["/data/sub", "/data"] {
        let scene = Scene::with_image(&[]);
        scene.admit(&[scene.entry("right", "/data/sub"), tmpfs_entry(tmpfs)]);
        let right = [scene.mounted("right", "data/sub")];
        is_proven(&scene.proved_with(&right, || mount_tmpfs(tmpfs.as_ref())));
    }
}

#[test_if(own_namespace)]
fn shared_memory_in_a_tmpfs_of_the_spec() {
    let scene = Scene::with_image(&[]);
    for folder in ["dev", "shm"] {
        fs::create_dir(scene.host(folder)).unwrap();
        mount_tmpfs(&scene.host(folder));
    }
    fs::create_dir(scene.host("dev/shm")).unwrap();
    scene.admit(&[
        tmpfs_entry("/dev"),
        tmpfs_entry("/dev/shm"),
        scene.entry("shm", "/dev/shm"),
    ]);
    let dev = Inside::writable(scene.host("dev"), "dev");
    is_proven(&scene.proved(&[dev, scene.mounted("shm", "dev/shm")]));
}

/// The links of the image, the destination, and the place of the mount.
#[test_if(own_namespace)]
fn destinations_through_links_of_the_image() {
    type Links = &'static [(&'static str, &'static str)];
    let cases: [(Links, &str, &'static str); 8] = [
        (&[("var/run", "/run")], "/var/run/x", "run/x"),
        (&[("var/run", "../run")], "/var/run/x", "run/x"),
        (&[("data", "/real")], "/data", "real"),
        (&[("data", "missing/real")], "/data", "missing/real"),
        (
            &[("one", "two"), ("two", "/three"), ("three", "real/end")],
            "/one/x",
            "real/end/x",
        ),
        (&[("out", "../../../../real")], "/out/x", "real/x"),
        (&[], "/var/../real/./x/", "real/x"),
        (&[], "real/x", "real/x"),
    ];
    for (links, destination, place) in cases {
        let scene = Scene::with_image(&["var", "real/end"]);
        for (link, target) in links {
            symlink(target, scene.image(link)).unwrap();
        }
        scene.admit(&[scene.entry("right", destination)]);
        let proved = scene.proved(&[scene.mounted("right", place)]);
        assert!(proved.refusal.is_none(), "{links:?} {destination}");
        is_proven(&proved);
    }
}

/// The same place by its name and through a link: the later bind covers the earlier bind.
#[test_if(own_namespace)]
fn a_destination_by_two_names() {
    for names in [["/run/x", "/var/run/x"], ["/var/run/x", "/run/x"]] {
        let scene = Scene::with_image(&["var"]);
        symlink("/run", scene.image("var/run")).unwrap();
        scene.admit(&[
            scene.entry("left", names[0]),
            scene.entry("right", names[1]),
        ]);
        let mounted = ["left", "right"].map(|source| scene.mounted(source, "run/x"));
        is_proven(&scene.proved(&mounted));
    }
}

/// The link is in a volume that the spec binds before.
#[test_if(own_namespace)]
fn a_destination_through_a_link_of_a_volume() {
    let scene = Scene::with_image(&["real"]);
    symlink("/real", scene.host("left/inner")).unwrap();
    symlink("sub", scene.host("left/beside")).unwrap();
    scene.admit(&[
        scene.entry("left", "/vol"),
        scene.entry("right", "/vol/inner/x"),
        scene.entry("right/file", "/vol/beside/file"),
    ]);
    fs::write(scene.host("left/sub/file"), "").unwrap();
    is_proven(&scene.proved(&[
        scene.mounted("left", "vol"),
        scene.mounted("right", "real/x"),
        scene.mounted("right/file", "vol/sub/file"),
    ]));
}

/// After the spec's mounts, runc binds each read-only path over itself, and mounts an empty tmpfs or
/// /dev/null over each masked path.
#[test_if(own_namespace)]
fn masked_and_read_only_paths_over_binds() {
    let scene = Scene::with_image(&[]);
    scene.write_spec(&[
        scene.entry("right", "/masked"),
        scene.entry("right", "/above/sub"),
        scene.entry("right/file", "/etc/file"),
        scene.entry("left", "/data"),
    ]);
    scene.edit_spec(|spec| {
        spec["linux"]["maskedPaths"] = json!(["/masked", "/above", "/etc/file", "/missing"]);
        spec["linux"]["readonlyPaths"] = json!(["/data", "/missing"]);
    });
    scene.admit_written();
    let mounted = [
        scene.mounted("right", "masked"),
        scene.mounted("right", "above/sub"),
        scene.mounted("right/file", "etc/file"),
        scene.mounted("left", "data"),
        Inside::of("/dev/null".into(), "etc/file"),
    ];
    is_proven(&scene.proved_with(&mounted, || {
        mount_tmpfs("/masked".as_ref());
        mount_tmpfs("/above".as_ref());
        bind("/data".as_ref(), "/data".as_ref());
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, "/data", None::<&str>, flags, None::<&str>).unwrap();
    }));
}

/// A volume with mounts inside, and binds of the spec at the places of the inner mounts.
#[test_if(own_namespace)]
fn a_volume_with_mounts_inside() {
    let scene = Scene::with_image(&[]);
    fs::create_dir(scene.host("left/free")).unwrap();
    mount_tmpfs(&scene.host("left/sub"));
    scene.admit(&[
        scene.entry("right", "/before/sub"),
        scene.entry("left", "/before"),
        scene.entry("left", "/after"),
        scene.entry("right", "/after/sub"),
        scene.entry("right", "/after/free"),
    ]);
    let tree = |place| Inside::tree(scene.host("left"), place);
    is_proven(&scene.proved_with(
        &[
            scene.mounted("right", "before/sub"),
            tree("before"),
            tree("after"),
            scene.mounted("right", "after/sub"),
            scene.mounted("right", "after/free"),
        ],
        || {
            for place in ["/before", "/after"] {
                let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(None::<&str>, place, None::<&str>, flags, None::<&str>).unwrap();
            }
        },
    ));
}

/// A hook, as nvidia-container-cli, mounts at places that are no destination and not above one.
#[test_if(own_namespace)]
fn mounts_of_hooks_beside_and_below_the_binds() {
    let scene = Scene::with_image(&["usr/lib"]);
    scene.admit(&[scene.entry("right", "/data")]);
    let right = [scene.mounted("right", "data")];
    is_proven(&scene.proved_with(&right, || {
        mount_tmpfs("/usr/lib".as_ref());
        mount_tmpfs("/data/sub".as_ref());
    }));
}

/// The source of the later bind is made after the admission: the bind is not recorded, but its entry
/// is in the spec.
#[test_if(own_namespace)]
fn an_unproven_bind_over_a_proven_bind() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[
        scene.entry("right/file", "/etc/file"),
        scene.entry("left/late", "/etc/file"),
    ]);
    fs::write(scene.host("left/late"), "late").unwrap();
    let mounted = ["right/file", "left/late"].map(|file| scene.mounted(file, "etc/file"));
    let proved = scene.proved(&mounted);
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert!(proved.report.binds.is_empty(), "{proved:?}");
}

/// The host mounts over the source after the runtime's mount. The mount reaches a bind that is a
/// slave: the container has both mounts.
#[test_if(own_namespace)]
fn a_mount_that_the_host_made_on_the_source_since() {
    let scene = Scene::with_image(&[]);
    let mut entry = scene.entry("right", "/data");
    entry["options"] = json!(["rbind", "rslave", "ro"]);
    scene.admit(&[entry]);
    fs::create_dir(scene.host("before")).unwrap();
    bind(&scene.host("right"), &scene.host("before"));
    mount_tmpfs(&scene.host("right"));
    let proved = scene.proved(&[
        scene.mounted("before", "data"),
        Inside::writable(scene.host("right"), "data"),
    ]);
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert!(proved.report.binds.is_empty(), "{proved:?}");
}

/// A log is rotated meanwhile, and a wrapper put its own bind before the bind of the log: the
/// positions of the new spec are not those of the record.
#[test_if(own_namespace)]
fn a_moved_source_in_a_spec_with_an_added_bind() {
    let scene = Scene::with_image(&[]);
    let entry = scene.entry("right/file", "/etc/file");
    scene.admit(std::slice::from_ref(&entry));
    scene.write_spec(&[scene.entry("added", "/added"), entry]);
    let mounted = [
        scene.mounted("added", "added"),
        scene.mounted("right/file", "etc/file"),
    ];
    let container = scene.start(&mounted, || {});
    fs::rename(scene.host("right/file"), scene.host("right/file.1")).unwrap();
    fs::write(scene.host("right/file"), "2").unwrap();
    let proved = scene.prove(&container);
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert!(proved.report.binds.is_empty(), "{proved:?}");
}
