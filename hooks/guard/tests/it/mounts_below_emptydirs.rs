//! Mounts of the host below a pod's emptyDir, at the end of the pod's sandbox: the kubelet would
//! remove the files that they show (kubernetes#129550). The pod's containers may have chosen every
//! name below the emptyDir.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_core::places::Places;
use bindguard_core::report::{ReleaseLine, ReleaseResult};
use bindguard_guard::{NotDetached, detach_below_emptydirs};
use bindguard_testing::held_memory::unless_it_hangs;
use bindguard_testing::{Folder, bind, mount_tmpfs, mounts_of_host, own_namespace, rounds};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use serde_json::json;

const UID: &str = "d3ddcaaf-0088-4d72-b57b-f31f05314446";

/// A node with a pod whose sandbox ends.
struct Scene {
    node: Folder,
}

impl Scene {
    fn new() -> Option<Self> {
        if !own_namespace() {
            return None;
        }
        let scene = Self {
            node: Folder::new(),
        };
        fs::create_dir_all(scene.volume()).unwrap();
        fs::create_dir_all(scene.at("data")).unwrap();
        fs::write(scene.at("data/file"), "precious").unwrap();
        scene.write_bundle("old", UID, "sandbox");
        Some(scene)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.node.path().join(name)
    }

    fn volume(&self) -> PathBuf {
        let pod = self.at("kubelet/pods").join(UID);
        pod.join("volumes/kubernetes.io~empty-dir/ed")
    }

    /// A folder of the emptyDir, on which the host's data is bound.
    fn bound(&self, name: &str) -> PathBuf {
        let place = self.volume().join(name);
        fs::create_dir_all(&place).unwrap();
        bind(&self.at("data"), &place);
        place
    }

    fn write_bundle(&self, id: &str, uid: &str, kind: &str) {
        let bundle = self.at("bundles").join(id);
        fs::create_dir_all(&bundle).unwrap();
        let spec = json!({"ociVersion": "1.2.0", "annotations": {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.sandbox-uid": uid,
            "io.kubernetes.cri.sandbox-namespace": "shop",
            "io.kubernetes.cri.sandbox-name": "web",
        }});
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
    }

    fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.at("kubelet")],
            ..Places::default()
        }
    }

    fn detach(&self) -> Result<Vec<ReleaseLine>, NotDetached> {
        detach_below_emptydirs(&self.at("bundles/old"), "old", &self.places())
    }

    /// The mounts below the node's folder, but for those of the data itself.
    fn mounts(&self) -> Vec<String> {
        let folder = self.node.path().display().to_string();
        let mut mounts = mounts_of_host();
        mounts.retain(|line| line.contains(&folder));
        mounts
    }

    fn keeps_its_data(&self) {
        assert_eq!(
            fs::read_to_string(self.at("data/file")).unwrap(),
            "precious"
        );
    }
}

fn all_released(lines: &[ReleaseLine]) -> bool {
    let copies = lines.iter().flat_map(|line| &line.copies);
    copies
        .into_iter()
        .all(|it| it.result == ReleaseResult::Released)
}

#[test]
fn they_go_and_the_emptydir_of_memory_stays() {
    let Some(scene) = Scene::new() else { return };
    mount_tmpfs(&scene.volume());
    let before = scene.mounts();
    scene.bound("a/deep/place");
    scene.bound("b");
    let detached = scene.detach().unwrap();
    assert_eq!(detached.len(), 2);
    assert!(all_released(&detached), "{detached:?}");
    assert_eq!(scene.mounts(), before);
    scene.keeps_its_data();
    assert!(scene.detach().unwrap().is_empty(), "a second time");
}

#[test]
fn of_another_pod_another_volume_or_another_container_nothing_goes() {
    let Some(scene) = Scene::new() else { return };
    let pods = scene.at("kubelet/pods");
    for place in [
        format!("{UID}/volumes/kubernetes.io~csi/pvc/mount"),
        format!("{UID}/volume-subpaths/ed/app/0"),
        "another/volumes/kubernetes.io~empty-dir/ed/disk".to_owned(),
        format!("{UID}-2/volumes/kubernetes.io~empty-dir/ed/disk"),
    ] {
        fs::create_dir_all(pods.join(&place)).unwrap();
        bind(&scene.at("data"), &pods.join(&place));
    }
    let before = scene.mounts();
    assert!(scene.detach().unwrap().is_empty());
    scene.bound("disk");
    let before_with_disk = scene.mounts();
    for (uid, kind) in [
        (UID, "container"),
        ("", "sandbox"),
        ("..", "sandbox"),
        (".", "sandbox"),
        ("another/../x", "sandbox"),
    ] {
        scene.write_bundle("old", uid, kind);
        assert!(scene.detach().unwrap().is_empty(), "{uid:?} {kind}");
        assert_eq!(scene.mounts(), before_with_disk, "{uid:?} {kind}");
    }
    scene.write_bundle("old", UID, "sandbox");
    assert_eq!(scene.detach().unwrap().len(), 1);
    assert_eq!(scene.mounts(), before);
}

/// A privileged container renames folders of its emptyDir, and puts symlinks to the host's own
/// mounts in their places, as fast as it can.
#[test]
fn a_container_that_swaps_folders_for_symlinks_gains_nothing() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.at("victim");
    fs::create_dir_all(victim.join("disk")).unwrap();
    mount_tmpfs(&victim.join("disk"));
    let (folder, aside) = (scene.volume().join("folder"), scene.volume().join("aside"));
    let before = scene.mounts();
    for round in 0..rounds(30, 2000) {
        scene.bound("folder/disk");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let swapping = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = fs::rename(&folder, &aside);
                    let _ = symlink(&victim, &folder);
                    let _ = fs::remove_file(&folder);
                    let _ = fs::rename(&aside, &folder);
                }
            });
            let _ = scene.detach().unwrap();
            done.store(true, Ordering::Relaxed);
            swapping.join().unwrap();
        });
        // without the swaps the rest goes
        scene.detach().unwrap();
        assert_eq!(scene.mounts(), before, "round {round}");
    }
    scene.keeps_its_data();
}

#[test]
fn stacked_mounts_go_with_what_they_hide() {
    let Some(scene) = Scene::new() else { return };
    let before = scene.mounts();
    let place = scene.bound("disk");
    fs::create_dir(scene.at("data/inner")).unwrap();
    mount_tmpfs(&place.join("inner"));
    bind(&scene.at("data"), &place);
    mount_tmpfs(&place);
    let detached = scene.detach().unwrap();
    assert!(all_released(&detached), "{detached:?}");
    assert_eq!(scene.mounts(), before);
    scene.keeps_its_data();
}

/// The pod has a new sandbox, or a container of it still runs: the mount is in use.
#[test]
fn a_pod_that_came_back_keeps_its_mounts() {
    let Some(scene) = Scene::new() else { return };
    scene.bound("disk");
    let before = scene.mounts();
    for kind in ["sandbox", "container"] {
        scene.write_bundle("new", UID, kind);
        let kept = scene.detach();
        assert!(
            matches!(&kept, Err(NotDetached::PodLives(bundle)) if bundle.ends_with("new")),
            "{kept:?}"
        );
        assert_eq!(scene.mounts(), before);
    }
    // a spec that cannot be read may be of this pod
    fs::write(scene.at("bundles/new/config.json"), "{").unwrap();
    assert!(scene.detach().is_err());
    assert_eq!(scene.mounts(), before);
    scene.write_bundle("new", "another", "sandbox");
    assert_eq!(scene.detach().unwrap().len(), 1);
}

/// A process of the host works in the mount.
#[test]
fn a_mount_in_use_is_detached_and_its_user_keeps_it() {
    let Some(scene) = Scene::new() else { return };
    let before = scene.mounts();
    let place = scene.bound("disk");
    let used = fs::File::open(place.join("file")).unwrap();
    let detached = scene.detach().unwrap();
    assert!(
        detached.len() == 1 && all_released(&detached),
        "{detached:?}"
    );
    assert_eq!(scene.mounts(), before);
    assert_eq!(std::io::read_to_string(used).unwrap(), "precious");
}

/// SIGKILL, in the middle of many mounts: the next call does the rest.
#[test]
fn a_delete_that_is_killed_in_the_middle_is_finished_by_the_next() {
    let Some(scene) = Scene::new() else { return };
    let before = scene.mounts();
    for round in 0..rounds(3, 50) {
        let number = 60;
        for mount in 0..number {
            scene.bound(&format!("disk-{mount}"));
        }
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
        // returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let _ = std::panic::catch_unwind(|| drop(scene.detach()));
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { nix::libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                let still_runs = || waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
                while scene.mounts().len() == before.len() + number {
                    assert_eq!(still_runs(), WaitStatus::StillAlive, "nothing went");
                }
                kill(child, Signal::SIGKILL).unwrap();
                waitpid(child, None).unwrap();
            }
        }
        scene.detach().unwrap();
        assert_eq!(scene.mounts(), before, "round {round}");
        scene.keeps_its_data();
    }
}

/// A FUSE daemon that does not answer, with a mount below it and another beside it.
#[test]
fn a_fuse_mount_that_hangs_goes_and_delays_no_other() {
    let Some(scene) = Scene::new() else { return };
    let Ok(device) = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
    else {
        return bindguard_testing::skipped("no /dev/fuse here");
    };
    let before = scene.mounts();
    let hanging = scene.volume().join("hanging");
    fs::create_dir(&hanging).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&device);
    let options = format!("fd={number},rootmode=40000,user_id=0,group_id=0");
    let kind = Some("fuse");
    mount(kind, &hanging, kind, MsFlags::empty(), Some(&*options)).unwrap();
    scene.bound("beside");
    let (bundle, places) = (scene.at("bundles/old"), scene.places());
    let namespace = fs::File::open("/proc/thread-self/ns/mnt").unwrap();
    let detached = unless_it_hangs(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).unwrap();
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        detach_below_emptydirs(&bundle, "old", &places)
    });
    let detached = detached.expect("it hangs").unwrap();
    assert_eq!(detached.len(), 2);
    assert_eq!(scene.mounts(), before, "{detached:?}");
    scene.keeps_its_data();
    drop(device);
}

/// The kubelet's root is a link on many nodes, and the table has the kernel's name.
#[test]
fn a_kubelet_root_behind_a_link_is_found() {
    let Some(scene) = Scene::new() else { return };
    let before = scene.mounts();
    scene.bound("disk");
    let link = scene.at("link");
    symlink(scene.at("kubelet"), &link).unwrap();
    let places = Places {
        kubelet_roots: vec![link],
        ..Places::default()
    };
    let detached = detach_below_emptydirs(&scene.at("bundles/old"), "old", &places);
    assert_eq!(detached.unwrap().len(), 1);
    assert_eq!(scene.mounts(), before);
}
