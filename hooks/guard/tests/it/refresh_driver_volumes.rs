//! A running container gets the new files of an inline CSI volume that its driver writes as the
//! kubelet writes a secret; nothing that a container can write leads anywhere.

use std::convert::Infallible;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_guard::refresh::{
    PodVolumes, REPLACE_TIMEOUT, RefreshAct, Refreshed, TuckRecords, VolumeOfPod, rebind_volume,
    refresh_container,
};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::scene::tmpfs;
use bindguard_testing::{Folder, Fuse, bind, helper, test_if};

use crate::refresh_scene::can_run;

const INLINE: &str =
    r#"{"driverName":"secrets-store.csi.k8s.io","volumeLifecycleMode":"Ephemeral"}"#;

struct Scene {
    folder: Folder,
    root: tempfile::TempDir,
}

impl Scene {
    /// A volume with a file and a folder, both bound as the kubelet binds subPaths.
    fn new() -> Self {
        let scene = Self {
            folder: Folder::new(),
            root: tempfile::tempdir().unwrap(),
        };
        fs::create_dir_all(scene.volume()).unwrap();
        fs::write(scene.volume().with_file_name("vol_data.json"), INLINE).unwrap();
        tmpfs(&scene.volume());
        scene.write(1);
        fs::create_dir_all(scene.subpath("1")).unwrap();
        fs::write(scene.subpath("0"), "").unwrap();
        let payload = scene.volume().join(timestamp(1));
        bind(&payload.join("tls.crt"), &scene.subpath("0"));
        bind(&payload.join("folder"), &scene.subpath("1"));
        scene
    }

    fn pod(&self) -> PathBuf {
        self.folder.path().join("kubelet/pods/uid-1")
    }

    fn volume(&self) -> PathBuf {
        self.pod().join("volumes/kubernetes.io~csi/tls/mount")
    }

    fn subpath(&self, index: &str) -> PathBuf {
        self.pod().join("volume-subpaths/tls/app").join(index)
    }

    /// As AtomicWriter does it, but for the removal of the old payload.
    fn write(&self, number: u32) {
        let payload = self.volume().join(timestamp(number));
        fs::create_dir_all(payload.join("folder")).unwrap();
        fs::write(payload.join("tls.crt"), number.to_string()).unwrap();
        fs::write(payload.join("folder/key"), number.to_string()).unwrap();
        self.link(&timestamp(number));
    }

    fn link(&self, target: &str) {
        symlink(target, self.volume().join("..data_tmp")).unwrap();
        fs::rename(
            self.volume().join("..data_tmp"),
            self.volume().join("..data"),
        )
        .unwrap();
    }

    fn update(&self, number: u32) {
        self.write(number);
        fs::remove_dir_all(self.volume().join(timestamp(number - 1))).unwrap();
    }

    fn start(&self) -> Container {
        let file = Inside::of(self.subpath("0"), "etc/tls.crt");
        let folder = Inside::of(self.subpath("1"), "etc/tls");
        Container::start(self.root.path(), &[file, folder])
    }

    /// The steps of the agent. `writable`: the writable binds of the pod's containers.
    fn refresh(&self, container: &Container, writable: Option<&[PathBuf]>) -> Refreshed {
        let volume = VolumeOfPod {
            kubelet_root: self.folder.path().join("kubelet"),
            pod_uid: "uid-1".to_owned(),
            volume: "tls".to_owned(),
        };
        rebind_volume(&volume, &bindguard_core::policy::Policy::default());
        let volumes = PodVolumes::open(&self.pod()).unwrap();
        let writable = || writable.map(<[PathBuf]>::to_vec).ok_or("no answer");
        let volumes = volumes.with_drivers(&self.pod(), writable).unwrap();
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&volumes],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&self.folder.path().join("tucks")),
        )
        .unwrap()
    }
}

fn timestamp(number: u32) -> String {
    format!("..2026_11_21_05_10_00.{number}")
}

fn contents(container: &Container) -> [Option<String>; 2] {
    ["etc/tls.crt", "etc/tls/key"].map(|path| container.read(path))
}

fn both(content: &str) -> [Option<String>; 2] {
    [Some(content.to_owned()), Some(content.to_owned())]
}

#[test_if(can_run)]
fn a_rotated_certificate_reaches_the_running_container() {
    let scene = Scene::new();
    let container = scene.start();
    let elsewhere = [scene.pod().join("volumes/kubernetes.io~empty-dir/tls")];
    for number in 2..=3 {
        scene.update(number);
        let refreshed = scene.refresh(&container, Some(&elsewhere));
        assert!(refreshed.is_current(), "{refreshed:?}");
        assert_eq!(contents(&container), both(&number.to_string()));
        let mounts = container.mounts_at("/etc/tls.crt");
        assert!(
            mounts.len() == 1 && mounts[0].1.contains("ro"),
            "{mounts:?}"
        );
    }
}

/// A container with a writable bind could have made `..data`, also an init container that ended.
#[test_if(can_run)]
fn a_volume_that_a_container_may_write_is_refused() {
    let scene = Scene::new();
    let container = scene.start();
    scene.update(2);
    let (writable, unknown) = (RefusedReason::WritableVolume, RefusedReason::MountsUnknown);
    for (sources, expected) in [
        (Some(vec![scene.volume()]), writable),
        (Some(vec![scene.volume().join("folder")]), writable),
        (Some(vec![scene.subpath("1")]), writable),
        (Some(vec![scene.pod().join("volumes")]), writable),
        (None, unknown),
    ] {
        let refreshed = scene.refresh(&container, sources.as_deref());
        let refused = refreshed
            .mounts
            .iter()
            .map(|mount| match mount.outcome.clone() {
                MountResult::Refused(Refused { reason, path, .. }) => (reason, path),
                other => panic!("{sources:?}: {other:?}"),
            });
        let directory = scene.volume();
        let expected = vec![(expected, directory); 2];
        assert_eq!(refused.collect::<Vec<_>>(), expected, "{sources:?}");
        assert_eq!(contents(&container)[0].as_deref(), Some("1"));
    }
}

#[test_if(can_run)]
fn a_volume_of_a_claim_or_of_a_daemon_is_left_alone() {
    let scene = Scene::new();
    let container = scene.start();
    scene.update(2);
    let record = scene.volume().with_file_name("vol_data.json");
    for text in [r#"{"volumeLifecycleMode":"Persistent"}"#, "{}", ""] {
        fs::write(&record, text).unwrap();
        let refreshed = scene.refresh(&container, Some(&[]));
        assert_eq!(refreshed.subpaths, 0, "{text}: {refreshed:?}");
    }
    fs::remove_file(&record).unwrap();
    assert_eq!(scene.refresh(&container, Some(&[])).subpaths, 0);

    // A daemon that never answers holds no refresh up.
    fs::write(&record, INLINE).unwrap();
    let Some(fuse) = Fuse::mounted() else { return };
    bind(&fuse.path(), &scene.volume());
    let volumes = PodVolumes::open(&scene.pod()).unwrap();
    let unused = || -> Result<_, Infallible> { panic!("the mounts of containers are not needed") };
    assert!(volumes.with_drivers(&scene.pod(), unused).is_ok());
}

/// Links as a hostile process would make them if it could write the volume.
#[test_if(can_run)]
fn hostile_links_lead_out_of_no_volume() {
    let scene = Scene::new();
    let container = scene.start();
    let outside = scene.folder.path().join("outside");
    fs::create_dir_all(outside.join("folder")).unwrap();
    fs::write(outside.join("tls.crt"), "of the host").unwrap();
    fs::write(outside.join("folder/key"), "of the host").unwrap();
    let chain = scene.volume().join(timestamp(8));
    symlink(&outside, &chain).unwrap();
    let payload = scene.volume().join(timestamp(9));
    fs::create_dir(&payload).unwrap();
    symlink(outside.join("tls.crt"), payload.join("tls.crt")).unwrap();
    symlink(outside.join("folder"), payload.join("folder")).unwrap();
    for target in [
        outside.to_str().unwrap(),
        "../../../../../../outside",
        "..data",
        "/proc/self/root",
        &timestamp(8),
        &timestamp(9),
    ] {
        scene.link(target);
        scene.refresh(&container, Some(&[]));
        let shown = contents(&container);
        assert_eq!(shown, both("1"), "{target}");
        assert_eq!(container.mounts_at("/etc/tls.crt").len(), 1, "{target}");
    }
    scene.write(10);
    assert!(scene.refresh(&container, Some(&[])).is_current());
    assert_eq!(contents(&container), both("10"));
}
