//! The removed and the kept leftovers of an ended pod.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::places::Places;
use bindguard_operator::ended_pods::{
    AbsentPod, EndedPod, EndedPodsError, LeftOutcome, LeftoversAct, PodFolders, left_by,
};
use bindguard_sys::read_mount_table;
use bindguard_testing::{Folder, bind, own_namespace};
use nix::mount::{MsFlags, mount};

struct Node {
    folder: Folder,
}

impl Node {
    fn new() -> Self {
        let node = Self {
            folder: Folder::new(),
        };
        fs::create_dir_all(node.pod()).unwrap();
        node
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("kubelet")
    }

    fn pod(&self) -> PathBuf {
        self.root().join("pods/uid-1")
    }

    fn make(&self, below: &str) -> PathBuf {
        let path = self.pod().join(below);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn folders(&self) -> PodFolders {
        let places = Places {
            kubelet_roots: vec![self.root()],
            ..Places::default()
        };
        PodFolders::here(&places).unwrap().unwrap()
    }

    fn left(&self, absent_s: u64, act: LeftoversAct) -> EndedPod {
        let uid = "uid-1".to_owned();
        let pod = AbsentPod { uid, absent_s };
        left_by(pod, &self.folders(), &read_mount_table().unwrap(), act)
    }
}

fn tmpfs(source: &str, target: &Path) {
    let nothing = None::<&str>;
    mount(
        Some(source),
        target,
        Some("tmpfs"),
        MsFlags::empty(),
        nothing,
    )
    .unwrap();
}

#[test]
fn nothing_is_removed_before_ten_minutes_or_when_only_listed() {
    if !own_namespace() {
        return;
    }
    let node = Node::new();
    let volume = node.make("volumes/kubernetes.io~secret/keys");
    tmpfs("tmpfs", &volume);
    for (absent_s, act) in [(599, LeftoversAct::Remove), (600, LeftoversAct::List)] {
        let left = node.left(absent_s, act);
        assert_eq!(left.mounts[0].outcome, LeftOutcome::Left);
        assert!(left.is_left() && !left.removed && volume.join("..").is_here());
    }
    let left = node.left(600, LeftoversAct::Remove);
    assert_eq!(left.mounts[0].outcome, LeftOutcome::Unmounted);
    assert!(!left.is_left() && !node.pod().is_here(), "{left:?}");
}

#[test]
fn no_file_no_symlink_and_nothing_behind_a_mount_is_removed() {
    if !own_namespace() {
        return;
    }
    let node = Node::new();
    let elsewhere = node.folder.path().join("elsewhere");
    fs::create_dir_all(elsewhere.join("empty")).unwrap();
    // The bind is on the same filesystem: only the mount table shows the boundary.
    let bound = node.make("volumes/kubernetes.io~local-volume/data");
    bind(&elsewhere, &bound);
    let user = fs::File::open(&bound).unwrap();
    let links = node.make("volumes/kubernetes.io~empty-dir/links");
    symlink(&elsewhere, links.join("link")).unwrap();
    let csi = node.make("volumes/kubernetes.io~csi/pv");
    fs::write(csi.join("vol_data.json"), "{}").unwrap();
    node.make("volumes/kubernetes.io~empty-dir/none/deep");
    let left = node.left(600, LeftoversAct::Remove);
    assert_eq!(left.mounts[0].outcome, LeftOutcome::Busy);
    assert!(elsewhere.join("empty").is_here(), "{left:?}");
    assert_eq!((left.file_count, left.files.len()), (2, 2), "{left:?}");
    assert!(left.problems.is_empty(), "{left:?}");
    let names: Vec<_> = left
        .empty_directories
        .iter()
        .filter_map(|path| path.file_name())
        .collect();
    assert_eq!(names, ["deep", "none"]);
    drop(user);
    // A child of a parallel test has a copy of the descriptor between fork and exec.
    let start = Instant::now();
    while bound.is_here() {
        assert!(start.elapsed() < Duration::from_secs(60), "it stays busy");
        node.left(600, LeftoversAct::Remove);
    }
    assert!(elsewhere.join("empty").is_here());
    assert!(csi.join("vol_data.json").is_here());
}

#[test]
fn block_devices_of_csi_drivers_are_only_listed() {
    if !own_namespace() {
        return;
    }
    let node = Node::new();
    // As a filesystem on a device: the table names the device.
    let device = node.make("volumes/kubernetes.io~csi/disk/mount");
    tmpfs("/dev/sdz", &device);
    let share = node.make("volumes/kubernetes.io~csi/share/mount");
    tmpfs("server:/share", &share);
    let raw = node.make("volumeDevices/kubernetes.io~csi/raw");
    tmpfs("devtmpfs", &raw);
    let left = node.left(600, LeftoversAct::Remove);
    let outcome = |place: &Path| {
        let mount = left.mounts.iter().find(|mount| mount.mount_point == place);
        mount.unwrap().outcome.clone()
    };
    assert_eq!(outcome(&device), LeftOutcome::BlockDevice);
    assert_eq!(outcome(&raw), LeftOutcome::BlockDevice);
    assert_eq!(outcome(&share), LeftOutcome::Unmounted);
    assert!(device.is_here() && !share.is_here());
}

#[test]
fn of_a_stack_the_topmost_mount_goes_first() {
    if !own_namespace() {
        return;
    }
    let node = Node::new();
    let volume = node.make("volumes/kubernetes.io~nfs/data");
    tmpfs("one", &volume);
    tmpfs("two", &volume);
    fs::create_dir(volume.join("inside")).unwrap();
    tmpfs("three", &volume.join("inside"));
    let left = node.left(600, LeftoversAct::Remove);
    let sources: Vec<_> = left
        .mounts
        .iter()
        .map(|mount| mount.source.as_str())
        .collect();
    assert_eq!(sources, ["three", "two", "one"]);
    assert!(!left.is_left(), "{left:?}");
}

/// The list of each kubelet lacks the pods of the other kubelet.
#[test]
fn two_kubelets_are_refused() {
    let node = Node::new();
    let other = node.folder.path().join("other");
    fs::create_dir_all(other.join("pods/uid-2")).unwrap();
    let places = Places {
        kubelet_roots: vec![node.root(), other],
        ..Places::default()
    };
    let refused = PodFolders::here(&places);
    assert!(matches!(refused, Err(EndedPodsError::TwoKubelets(..))));
}

trait IsHere {
    fn is_here(&self) -> bool;
}

impl IsHere for Path {
    fn is_here(&self) -> bool {
        fs::exists(self).unwrap()
    }
}
