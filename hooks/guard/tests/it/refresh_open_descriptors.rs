//! A refresh of a volume while the container has files of the old or the new mounts open: the scenes
//! of the kernel's own selftests for umount propagation, with the mounts of a refresh.

use std::fs::{self, File};
use std::path::Path;

use bindguard_testing::live::{self, Container};
use bindguard_testing::{mounts_of_host, test_if};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, umount2};

use crate::refresh_scene::can_run;
use crate::refresh_scene::volume::Scene;

/// Each propagation of the bind, and the methods: true where only propagation attaches.
const KINDS: [(&str, bool); 4] = [
    ("rprivate", false),
    ("rslave", false),
    ("rprivate", true),
    ("rslave", true),
];

/// A volume with a mount in it, in a running container.
fn started(option: &str, by_propagation: bool) -> (Scene, Container) {
    let scene = Scene::of_an_unprivileged_container(option);
    scene.mount_below("1");
    let container = match by_propagation {
        true => scene.start_where_only_propagation_attaches(),
        false => scene.start_tree(),
    };
    (scene, container)
}

fn mount_anew(scene: &Scene, content: &str) {
    scene.mount_anew(content);
    live::change(&scene.volume(), MsFlags::MS_SHARED);
    scene.mount_below(content);
}

/// Opens a file on the container's own mount. The descriptor keeps that mount, as a descriptor of the
/// container does.
fn open_inside(container: &Container, path: &str) -> File {
    File::open(format!("/proc/{}/root/{path}", container.process.pid())).unwrap()
}

fn text_of(file: &File) -> String {
    std::io::read_to_string(file).unwrap()
}

#[test_if(can_run)]
fn an_open_file_keeps_the_old_mounts_and_no_other_process_sees_them() {
    for (option, by_propagation) in KINDS {
        let (scene, container) = started(option, by_propagation);
        let mounts = container.mounts();
        let files = ["data/0", "data/nested/file"];
        let mut held = Vec::new();
        for content in ["1", "2", "3"] {
            held.push((content, files.map(|file| open_inside(&container, file))));
            let next = (content.parse::<u32>().unwrap() + 1).to_string();
            mount_anew(&scene, &next);
            let host = mounts_of_host();
            let refreshed = scene.refresh(&container);
            assert_eq!(refreshed.replaced(), 1, "{option}: {refreshed:?}");
            assert_eq!(
                files.map(|file| container.read(file)),
                [(); 2].map(|()| Some(next.clone()))
            );
            assert_eq!(
                (container.mounts(), mounts_of_host()),
                (mounts, host),
                "{option}"
            );
        }
        for (content, files) in &held {
            assert_eq!(files.each_ref().map(text_of), [*content; 2], "{option}");
        }
    }
}

/// With CVE-2026-98996 fixed, an umount of the host fails where a received copy is in use. Before, the
/// copy is gone, too. Never is it gone on one side alone.
#[test_if(can_run)]
fn the_hosts_umount_of_a_mount_that_the_container_has_open_reaches_both_or_none() {
    for (option, by_propagation) in KINDS {
        let (scene, container) = started(option, by_propagation);
        mount_anew(&scene, "2");
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{option}: {refreshed:?}");
        let held = open_inside(&container, "data/nested/file");
        let nested = scene.volume().join("nested");
        let is_slave = option == "rslave";
        let in_container = || container.mounts_at("/data/nested").len();
        let on_host = |place: &Path| {
            let line = format!(" {} ", place.display());
            mounts_of_host()
                .iter()
                .filter(|it| it.contains(&line))
                .count()
        };
        let host = on_host(&nested);
        let unmounted = umount2(&nested, MntFlags::empty());
        let expected = match unmounted {
            Err(Errno::EBUSY) if is_slave => (host, 1),
            Ok(()) => (host - 1, usize::from(!is_slave)),
            other => panic!("{option}: {other:?}"),
        };
        assert_eq!((on_host(&nested), in_container()), expected, "{option}");
        if unmounted.is_err() {
            umount2(&nested, MntFlags::MNT_DETACH).unwrap();
        }
        let expected = (host - 1, usize::from(!is_slave));
        assert_eq!((on_host(&nested), in_container()), expected, "{option}");
        assert_eq!(text_of(&held), "2", "{option}");
        // The next volume comes whatever is open.
        mount_anew(&scene, "3");
        assert_eq!(scene.refresh(&container).replaced(), 1, "{option}");
        assert_eq!(container.read("data/nested/file").as_deref(), Some("3"));
        assert!(fs::metadata(&nested).unwrap().is_dir());
    }
}
