//! A 9p share with a real server: the emulator of this virtual machine. The emulator exports the
//! directory under two tags; a second client changes the directory through the second tag.
//!
//! Runs in the virtual machine that `make kernels` starts for it.

use std::fs;
use std::path::Path;

use bindguard_testing::scene::{REBOUND, Scene};
use bindguard_testing::{own_namespace, skipped, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A plugin whose volume may be of any filesystem.
const PLUGIN: &str = "kubernetes.io~csi";

fn mount_tag(tag: &str, at: &Path, options: &str) {
    let options = format!("trans=virtio,version=9p2000.L,access=client,{options}");
    mount(
        Some(tag),
        at,
        Some("9p"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .unwrap();
}

/// The server's folder, mounted by a second client.
struct Elsewhere(tempfile::TempDir);

impl Elsewhere {
    /// `None`, with a printed reason, if the kernel has no client.
    fn mount() -> Option<Self> {
        if !fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.contains("\t9p\n")) {
            skipped("this kernel has no 9p loaded: one of `make kernels` has");
            return None;
        }
        let elsewhere = Self(tempfile::tempdir().unwrap());
        mount_tag("same", elsewhere.0.path(), "cache=none");
        Some(elsewhere)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A share with one file, and a pod with the share as its volume.
    fn volume(&self) -> Scene {
        let _ = fs::remove_dir_all(self.path().join("db"));
        fs::create_dir(self.path().join("db")).unwrap();
        fs::write(self.path().join("db/state"), "old").unwrap();
        let mut scene = Scene::of_plugin(PLUGIN);
        scene.volume.push("mount");
        fs::create_dir(&scene.volume).unwrap();
        mount_tag("share", &scene.volume, "cache=none");
        scene
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}

fn replace(path: &Path) {
    fs::write(path.with_extension("next"), "new").unwrap();
    fs::rename(path.with_extension("next"), path).unwrap();
}

/// The client finds a bound file by its path.
#[test_if(own_namespace)]
fn a_healthy_share_and_one_whose_file_was_replaced_elsewhere_are_current() {
    let Some(elsewhere) = Elsewhere::mount() else {
        return;
    };
    for sub_path in ["db", "db/state"] {
        let scene = elsewhere.volume().bound(sub_path);
        for content in ["old", "new"] {
            fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
            assert_eq!(
                scene.finding(&scene.policy()),
                ("current", String::new(), None),
                "{sub_path}"
            );
            assert_eq!(scene.content(), content, "{sub_path}");
            replace(&elsewhere.path().join("db/state"));
        }
    }
}

#[test_if(own_namespace)]
fn a_file_removed_elsewhere_is_reported_and_not_repaired() {
    let Some(elsewhere) = Elsewhere::mount() else {
        return;
    };
    let scene = elsewhere.volume().bound("db/state");
    fs::remove_file(elsewhere.path().join("db/state")).unwrap();
    for _ in 0..2 {
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("orphaned", None), "{reason}");
    }
    assert_eq!(scene.mounts_at_subpath(), 1);
}

#[test_if(own_namespace)]
fn a_file_replaced_on_this_node_is_bound_anew() {
    let Some(elsewhere) = Elsewhere::mount() else {
        return;
    };
    for is_removed_first in [true, false] {
        let scene = elsewhere.volume().bound("db/state");
        let path = scene.volume.join("db/state");
        if is_removed_first {
            fs::remove_file(&path).unwrap();
        }
        replace(&path);
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
        assert_eq!(scene.content(), "new");
        assert_eq!(scene.mounts_at_subpath(), 1);
        assert_eq!(
            scene.finding(&scene.policy()),
            ("current", String::new(), None)
        );
    }
}
