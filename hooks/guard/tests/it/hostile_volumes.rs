//! A container that tries to have something else bound in its file's place (CVE-2017-1002101), or
//! to confuse programs that read its mounts. It uses names, depth, and changes of its volume while
//! it is admitted.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Outcome, Report};
use bindguard_guard::{Attempt, admit};
use bindguard_testing::{Folder, bind, mount_of, own_namespace, skipped, test_if};
use rustix::fs::{CWD, RenameFlags, mkdirat, renameat_with};
use rustix::io::Errno;
use serde_json::json;

const SECRET: &str = "the host's secret";

/// A pod with an emptyDir; a path in the emptyDir is its container's subpath.
struct Scene {
    folder: Folder,
}

impl Scene {
    fn of(sub_path: &Path) -> Self {
        let scene = Self {
            folder: Folder::new(),
        };
        let file = scene.volume().join(sub_path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "start").unwrap();
        fs::create_dir_all(scene.subpath().parent().unwrap()).unwrap();
        fs::write(scene.subpath(), "").unwrap();
        bind(&file, &scene.subpath());
        fs::create_dir(scene.bundle()).unwrap();
        let spec =
            json!({"mounts": [mount_of(&scene.subpath(), "/data", "rprivate")], "linux": {}});
        fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();
        scene
    }

    fn bundle(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    fn volume(&self) -> PathBuf {
        self.folder
            .path()
            .join("kubelet/pods/uid-1/volumes/kubernetes.io~empty-dir/data")
    }

    fn subpath(&self) -> PathBuf {
        self.folder
            .path()
            .join("kubelet/pods/uid-1/volume-subpaths/data/app/0")
    }

    fn admitted(&self) -> Report {
        let places = Places {
            kubelet_roots: vec![self.folder.path().join("kubelet")],
            ..Places::default()
        };
        let report = admit(&self.bundle(), &Policy::default(), &places, Attempt::First).report;
        serde_json::to_string(&report).unwrap();
        report
    }

    fn mounts_at_subpath(&self) -> usize {
        let table =
            String::from_utf8_lossy(&fs::read("/proc/thread-self/mountinfo").unwrap()).into_owned();
        let path = self.subpath().to_str().unwrap().to_owned();
        table
            .lines()
            .filter(|line| line.split(' ').nth(4) == Some(&path))
            .count()
    }
}

/// Replaces the old file by a new file in a single step.
fn replace(file: &Path, content: &str) {
    let new = file.parent().unwrap().join("new");
    fs::write(&new, content).unwrap();
    fs::rename(new, file).unwrap();
}

fn odd_names() -> Vec<OsString> {
    let mut names: Vec<OsString> = [
        "two\nlines",
        "tab\tand space",
        "back\\slash",
        "\\040",
        "\\134134",
        "quote\"and'",
        "deleted",
        " (deleted)",
        "x (deleted)",
        "..data",
        "..2026_11_21_05_10_00.1",
        "...",
        "-",
        "#",
        "\u{202e}gnp.exe",
        "\u{1b}[2J",
    ]
    .map(OsString::from)
    .to_vec();
    names.push(OsString::from_vec(vec![b'x'; 255]));
    names.push(OsString::from_vec(b"not \xff\xfe text".to_vec()));
    names.push(OsString::from_vec(
        (1..=255).filter(|byte| *byte != b'/').collect(),
    ));
    names
}

#[test_if(own_namespace)]
fn a_file_of_any_name_is_bound_anew() {
    for name in odd_names() {
        for sub_path in [
            PathBuf::from(&name),
            Path::new("folder").join(&name),
            Path::new(&name).join("file"),
        ] {
            let scene = Scene::of(&sub_path);
            replace(&scene.volume().join(&sub_path), "current");
            let report = scene.admitted();
            assert_eq!(
                report.binds[0].outcome,
                Some(Outcome::Rebound { tries: 1 }),
                "{sub_path:?}: {report:?}"
            );
            assert_eq!(
                fs::read_to_string(scene.subpath()).unwrap(),
                "current",
                "{sub_path:?}"
            );
            assert_eq!(scene.mounts_at_subpath(), 1, "{sub_path:?}");
            let again = scene.admitted();
            assert_eq!(
                (again.binds[0].verdict().as_str(), &again.binds[0].outcome),
                ("current", &None),
                "{sub_path:?}"
            );
        }
    }
}

#[test_if(own_namespace)]
fn a_path_as_long_as_paths_get_is_bound_anew() {
    // 4095 bytes with the volume's own path: what the kubelet can name
    let scene = Scene::of(Path::new("file"));
    let room = 4095 - scene.volume().as_os_str().len() - "/file".len();
    let deep: PathBuf = vec![OsStr::from_bytes(&[b'd'; 200]); room / 201]
        .iter()
        .collect();
    drop(scene);
    let scene = Scene::of(&deep.join("file"));
    replace(&scene.volume().join(&deep).join("file"), "current");
    let report = scene.admitted();
    assert_eq!(
        report.binds[0].outcome,
        Some(Outcome::Rebound { tries: 1 }),
        "{report:?}"
    );
    assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "current");
}

/// A container can move the bound file to a place that no path reaches. Then nothing is known of
/// it, and nothing is done.
#[test_if(own_namespace)]
fn a_file_that_was_moved_deeper_than_paths_reach_is_left_alone() {
    let scene = Scene::of(Path::new("folder/file"));
    let mut directory = rustix::fs::open(
        scene.volume(),
        rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    let name = OsStr::from_bytes(&[b'd'; 250]);
    for _ in 0..30 {
        mkdirat(&directory, name, 0o755.into()).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        directory = rustix::fs::openat(&directory, name, flags, rustix::fs::Mode::empty()).unwrap();
    }
    rustix::fs::renameat(CWD, scene.volume().join("folder"), &directory, "folder").unwrap();
    let report = scene.admitted();
    assert!(
        !matches!(report.binds[0].outcome, Some(Outcome::Rebound { .. })),
        "{report:?}"
    );
    assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "start");
    assert_eq!(scene.mounts_at_subpath(), 1);
}

/// Attacks as fast as a processor can. Each step is a single rename.
fn attack(scene: &Scene, outside: &Path, over: &AtomicBool) {
    let volume = scene.volume();
    let [folder, link, other] = ["folder", "link", "other"].map(|name| volume.join(name));
    let file = folder.join("file");
    symlink(outside, &link).unwrap();
    fs::create_dir_all(other.join("file")).unwrap();
    let exchange = |a: &Path, b: &Path| match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        // During a swap the file is a mount point in this namespace, unlike in a container's own.
        Ok(()) | Err(Errno::BUSY) => {}
        Err(errno) => panic!("exchange {} and {}: {errno}", a.display(), b.display()),
    };
    let replaced = |path: &Path, make: &dyn Fn(&Path)| {
        let new = volume.join("new");
        make(&new);
        match fs::rename(&new, path) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => fs::remove_file(&new).unwrap(),
            done => done.unwrap(),
        }
    };
    while !over.load(Ordering::Relaxed) {
        replaced(&file, &|new| fs::write(new, "inside").unwrap());
        exchange(&folder, &link);
        exchange(&folder, &link);
        replaced(&file, &|new| symlink(outside.join("file"), new).unwrap());
        replaced(&file, &|new| {
            symlink("/proc/self/root/etc/passwd", new).unwrap()
        });
        // A directory where a file was.
        exchange(&folder, &other);
        exchange(&folder, &other);
        replaced(&file, &|new| fs::write(new, "inside").unwrap());
    }
}

#[test_if(own_namespace)]
fn names_that_change_all_the_time_lead_nowhere_else() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("file"), SECRET).unwrap();
    let scene = Scene::of(Path::new("folder/file"));
    let over = AtomicBool::new(false);
    let rebound = thread::scope(|scope| {
        scope.spawn(|| attack(&scene, outside.path(), &over));
        let admitted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..400)
                .filter(|_| is_still_a_file_of_the_volume(&scene))
                .count()
        }));
        over.store(true, Ordering::Relaxed);
        admitted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if rebound == 0 {
        skipped("the attacker was never slow enough for a re-bind");
    }
    // The attacker left a real file behind.
    replace(&scene.volume().join("folder/file"), "at last");
    scene.admitted();
    assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "at last");
    assert_eq!(scene.mounts_at_subpath(), 1);
}

/// Admits; returns true if something was re-bound.
fn is_still_a_file_of_the_volume(scene: &Scene) -> bool {
    let report = scene.admitted();
    let shown = fs::symlink_metadata(scene.subpath()).unwrap();
    assert!(
        shown.is_file(),
        "{:?} where a file was: {report:?}",
        shown.file_type()
    );
    let content = fs::read_to_string(scene.subpath()).unwrap();
    assert!(
        ["start", "inside"].contains(&content.as_str()),
        "it shows {content:?}: {report:?}"
    );
    matches!(report.binds[0].outcome, Some(Outcome::Rebound { .. }))
}
