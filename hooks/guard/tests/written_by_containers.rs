//! Subpaths of volumes that containers write: what vanished, was replaced or mounted anew, and what nobody may bind.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

#[path = "pod/namespace.rs"]
mod namespace;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::policy::{Alarm, FailedRepair, Policy, Vanished};
use bindguard_core::report::Outcome;
use bindguard_guard::{Admission, Attempt, admit, check_bundle};
use namespace::{bind, mount_of, own_namespace, skipped};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

/// A pod with one subpath, and the folder that is its volume.
struct Scene {
    folder: tempfile::TempDir,
    volume: PathBuf,
}

impl Scene {
    /// A volume in a folder of the pod's own.
    fn of_plugin(plugin: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join(format!("kubelet/pods/uid-1/volumes/{plugin}/data"));
        Self::with_volume(folder, volume)
    }

    /// A volume somewhere on the host.
    fn of_host_path() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join("srv/data");
        Self::with_volume(folder, volume)
    }

    fn with_volume(folder: tempfile::TempDir, volume: PathBuf) -> Self {
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir(folder.path().join("bundle")).unwrap();
        let scene = Self { folder, volume };
        fs::create_dir_all(scene.subpath().parent().unwrap()).unwrap();
        let spec = json!({"mounts": [mount_of(&scene.subpath(), "/data", "rprivate")], "linux": {}, "annotations": {}});
        fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();
        scene
    }

    fn bundle(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    fn subpath(&self) -> PathBuf {
        self.folder.path().join("kubelet/pods/uid-1/volume-subpaths/data/app/0")
    }

    /// Binds a file or directory of the volume, as the kubelet does.
    fn bound(self, sub_path: &str) -> Self {
        let target = self.volume.join(sub_path);
        if fs::metadata(&target).unwrap().is_dir() {
            fs::create_dir(self.subpath()).unwrap()
        } else {
            fs::write(self.subpath(), "").unwrap()
        }
        bind(&target, &self.subpath());
        self
    }

    fn policy(&self) -> Policy {
        Policy { kubelet_roots: vec![self.folder.path().join("kubelet")], ..Policy::default() }
    }

    fn admitted(&self, policy: &Policy) -> Admission {
        admit(&self.bundle(), policy, Attempt::First)
    }

    /// The only bind's verdict, reason and outcome.
    fn told(&self, policy: &Policy) -> (&'static str, String, Option<Outcome>) {
        let report = self.admitted(policy).report;
        let [bind] = &report.binds[..] else { panic!("{report:?}") };
        (bind.verdict, bind.reason.clone().unwrap_or_default(), bind.outcome.clone())
    }

    fn mounts_at_subpath(&self) -> usize {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        table.lines().filter(|line| line.split(' ').nth(4) == self.subpath().to_str()).count()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        while self.mounts_at_subpath() > 0 {
            umount2(&self.subpath(), MntFlags::MNT_DETACH).unwrap();
        }
        while umount2(&self.volume, MntFlags::MNT_DETACH).is_ok() {}
    }
}

fn tmpfs(at: &Path) {
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
}

/// A FUSE daemon that shows a folder at a mount point: bindfs(1).
struct Daemon(Child);

impl Daemon {
    /// `None`, said aloud, where there is no bindfs.
    fn showing(folder: &Path, at: &Path) -> Option<Self> {
        let Ok(daemon) = Command::new("bindfs").arg("-f").arg(folder).arg(at).spawn() else {
            skipped("no bindfs here");
            return None;
        };
        let daemon = Self(daemon);
        let began = Instant::now();
        while fs::metadata(at).unwrap().dev() == fs::metadata(at.parent().unwrap()).unwrap().dev() {
            assert!(began.elapsed() < Duration::from_secs(20), "bindfs did not mount");
            thread::sleep(Duration::from_millis(5));
        }
        Some(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

const REBOUND: Option<Outcome> = Some(Outcome::Rebound { tries: 1 });

#[test]
fn a_file_that_was_replaced_is_bound_anew_wherever_the_volume_lies() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::create_dir(scene.volume.join("deep")).unwrap();
        fs::write(scene.volume.join("deep/app.conf"), "old").unwrap();
        let scene = scene.bound("deep/app.conf");
        fs::remove_file(scene.volume.join("deep/app.conf")).unwrap();
        fs::write(scene.volume.join("deep/app.conf"), "new").unwrap();
        let would_be = check_bundle(&scene.bundle(), &scene.policy());
        assert!(matches!(&would_be.binds[0].outcome, Some(Outcome::WouldBe { done }) if done.contains("re-bound")));
        let (verdict, _, outcome) = scene.told(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{}", scene.volume.display());
        assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_file_that_is_gone_or_became_a_link_is_left_alone() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::write(scene.volume.join("app.conf"), "old").unwrap();
        let scene = scene.bound("app.conf");
        fs::remove_file(scene.volume.join("app.conf")).unwrap();
        let everything = Policy { vanished_directories: Vanished::Remake, ..scene.policy() };
        let (verdict, _, outcome) = scene.told(&everything);
        assert_eq!((verdict, outcome), ("orphaned", None));
        symlink("/etc/passwd", scene.volume.join("app.conf")).unwrap();
        let (verdict, reason, outcome) = scene.told(&everything);
        assert_eq!((verdict, outcome), ("unknown", None), "{reason}");
        assert!(reason.contains("symlink"), "{reason}");
        assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "old");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_directory_that_vanished_is_made_again_when_policy_says_so() {
    if !own_namespace() {
        return;
    }
    for scene in [Scene::of_plugin("kubernetes.io~empty-dir"), Scene::of_host_path()] {
        fs::create_dir_all(scene.volume.join("a/b")).unwrap();
        let scene = scene.bound("a/b");
        fs::remove_dir_all(scene.volume.join("a")).unwrap();
        let (verdict, _, outcome) = scene.told(&scene.policy());
        assert_eq!((verdict, outcome), ("orphaned", None));
        assert!(fs::symlink_metadata(scene.volume.join("a")).is_err());

        let is_below_its_root = scene.volume.starts_with(scene.folder.path().join("kubelet"));
        chown(&scene.volume, Some(1234), Some(4321)).unwrap();
        fs::set_permissions(&scene.volume, fs::Permissions::from_mode(0o2770)).unwrap();
        let (verdict, _, outcome) = scene.told(&Policy { vanished_directories: Vanished::Remake, ..scene.policy() });
        assert_eq!((verdict, outcome), ("orphaned", REBOUND));
        fs::write(scene.subpath().join("file"), "").unwrap();
        assert!(fs::metadata(scene.volume.join("a/b/file")).is_ok());
        let made = fs::metadata(scene.volume.join("a/b")).unwrap();
        if is_below_its_root {
            assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (1234, 4321, 0o2770));
        }
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_directory_is_not_made_where_something_else_is_in_the_way() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    fs::create_dir_all(scene.volume.join("a/b")).unwrap();
    let scene = scene.bound("a/b");
    fs::remove_dir_all(scene.volume.join("a")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    symlink(elsewhere.path(), scene.volume.join("a")).unwrap();
    scene.told(&Policy { vanished_directories: Vanished::Remake, ..scene.policy() });
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    assert_eq!(scene.mounts_at_subpath(), 1);
}

#[test]
fn a_claim_that_was_mounted_anew_is_bound_from_its_new_mount() {
    if !own_namespace() {
        return;
    }
    for plugin in ["kubernetes.io~local-volume", "kubernetes.io~empty-dir"] {
        let scene = Scene::of_plugin(plugin);
        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "old").unwrap();
        let scene = scene.bound("state");
        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();

        let strict = Policy { unmounted_volumes: Alarm::Refuse, ..scene.policy() };
        let refusal = scene.admitted(&strict).refusal.unwrap();
        assert!(refusal.contains(plugin) && refusal.contains("of pod uid-1 is not mounted"), "{refusal}");

        tmpfs(&scene.volume);
        fs::write(scene.volume.join("state"), "new").unwrap();
        let (verdict, reason, outcome) = scene.told(&strict);
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
        assert!(reason.contains("mounted anew"), "{reason}");
        assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test]
fn a_repair_that_fails_refuses_the_container_when_policy_says_so() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    fs::write(scene.volume.join("app.conf"), "old").unwrap();
    let scene = scene.bound("app.conf");
    fs::remove_file(scene.volume.join("app.conf")).unwrap();
    fs::write(scene.volume.join("app.conf"), "new").unwrap();
    let other_guard = fs::File::open(scene.folder.path().join("kubelet/pods/uid-1")).unwrap();
    flock(&other_guard, FlockOperation::LockExclusive).unwrap();

    assert!(scene.admitted(&scene.policy()).refusal.is_none());
    let strict = Policy { failed_repairs: FailedRepair::Refuse, ..scene.policy() };
    let refusal = scene.admitted(&strict).refusal.unwrap();
    assert!(refusal.contains("is stale and could not be mended") && refusal.contains("another guard"), "{refusal}");
    drop(other_guard);
    assert_eq!(scene.told(&strict).2, REBOUND);
}

#[test]
fn a_pod_that_asks_to_be_left_alone_is_where_the_node_lets_it() {
    if !own_namespace() {
        return;
    }
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    fs::write(scene.volume.join("app.conf"), "old").unwrap();
    let scene = scene.bound("app.conf");
    fs::remove_file(scene.volume.join("app.conf")).unwrap();
    fs::write(scene.volume.join("app.conf"), "new").unwrap();
    let spec = json!({"mounts": [mount_of(&scene.subpath(), "/data", "rprivate")], "annotations": {"bindguard.io/mode": "report"}});
    fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();

    let mut open = scene.policy();
    open.pods_may.set_mode = true;
    assert_eq!(scene.told(&open), ("stale", "the file it was bound from is deleted".to_owned(), None));
    let admission = scene.admitted(&scene.policy());
    assert_eq!(admission.report.binds[0].outcome, REBOUND);
    assert!(admission.report.problems[0].contains("bindguard.io/mode is not followed"), "{:?}", admission.report);
}

#[test]
fn a_subpath_of_a_daemon_that_died_is_bound_from_the_one_that_took_its_place() {
    if !own_namespace() {
        return;
    }
    let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(old.path().join("state"), "old").unwrap();
    fs::write(new.path().join("state"), "new").unwrap();
    let mut scene = Scene::of_plugin("kubernetes.io~csi");
    let mount_point = scene.volume.join("mount");
    fs::create_dir(&mount_point).unwrap();
    let Some(first) = Daemon::showing(old.path(), &mount_point) else { return };
    scene.volume = mount_point.clone();
    let scene = scene.bound("state");
    assert_eq!(scene.told(&scene.policy()), ("current", String::new(), None));

    drop(first);
    let (verdict, reason, outcome) = scene.told(&scene.policy());
    assert_eq!((verdict, outcome), ("dead", None), "{reason}");

    umount2(&mount_point, MntFlags::MNT_DETACH).unwrap();
    let second = Daemon::showing(new.path(), &mount_point).unwrap();
    let (verdict, reason, outcome) = scene.told(&scene.policy());
    assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
    assert!(reason.contains("its volume is alive"), "{reason}");
    assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "new");
    assert_eq!(scene.mounts_at_subpath(), 1);
    drop(second);
}
