//! The container holds the last mount of a filesystem whose server is dead: the end of that mount
//! waits for the server, although the new mount is in place.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{fuse, test_if, unmount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_scene::can_attach_beneath;
use crate::refresh_scene::host_root::Scene as HostRootScene;
use crate::refresh_scene::volume::Scene;

/// A block device with a file of the test behind it.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Option<Self> {
        File::create(file).unwrap().set_len(1 << 20).unwrap();
        let attach = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let name = String::from_utf8(attach.stdout).unwrap();
        attach
            .status
            .success()
            .then(|| Self(name.trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A `fuseblk` filesystem whose server, the test, answers its first request alone. The end of the
/// last mount waits for an answer until this value is dropped.
struct Disk {
    server: File,
    _device: LoopDevice,
}

impl Disk {
    fn mounted(image: &Path, place: &Path) -> Option<Self> {
        let server = File::options().read(true).write(true).open("/dev/fuse");
        let (Ok(mut server), Some(device)) = (server, LoopDevice::new(image)) else {
            bindguard_testing::skipped("no /dev/fuse, or no loop device");
            return None;
        };
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,blksize=512",
            server.as_raw_fd()
        );
        let (kind, flags) = (Some("fuseblk"), MsFlags::empty());
        let source = Some(device.0.as_str());
        mount(source, place, kind, flags, Some(options.as_str())).unwrap();
        fuse::begin(&mut server);
        Some(Self {
            server,
            _device: device,
        })
    }

    /// Takes the last request of the filesystem, for which a process waits, and does not answer.
    fn leave_last_request(&mut self) {
        let mut request = [0; 8192];
        assert!(self.server.read(&mut request).unwrap() > 8);
        assert_eq!(request[4..8], FUSE_DESTROY.to_ne_bytes());
    }
}

/// fuse(4): the last request of a mount of a block device.
const FUSE_DESTROY: u32 = 38;

/// The kernel waits for the answer to the last request of a `fuseblk` mount: fuse(4).
#[test_if(can_attach_beneath)]
fn a_refresh_does_not_wait_for_the_end_of_the_old_mount() {
    let scene = Scene::new();
    let data = [Inside::of(scene.volume(), "data")];
    unmount(&scene.volume());
    let Some(mut disk) = Disk::mounted(&scene.root().join("disk"), &scene.volume()) else {
        return;
    };
    fs::remove_file(scene.pod.bundle().join("bindguard-binds.json")).unwrap();
    let container = Container::start(scene.root(), &data);
    scene.mount_anew("2");
    let refreshed = scene.refresh(&container);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    disk.leave_last_request();
    let start = Instant::now();
    scene.mount_anew("3");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert!(start.elapsed() < Duration::from_secs(60), "it waited");
    assert_eq!(container.read("data/0").as_deref(), Some("3"));
}

/// The old mounts have a copy of a mount below that the host has unmounted: the call that detaches
/// them returns when the server of the copy answers.
#[test_if(can_attach_beneath)]
fn a_detach_without_an_answer_has_the_result_of_the_mount_table() {
    let scene = HostRootScene::new();
    unmount(&scene.disk());
    let image = scene.bundle().join("image");
    let Some(mut disk) = Disk::mounted(&image, &scene.disk()) else {
        return;
    };
    let container = scene.start();
    umount2(&scene.disk(), MntFlags::MNT_DETACH).unwrap();
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    let refreshed = scene.refresh(&container);
    disk.leave_last_request();
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(container.propagation_at("/host"), ["master"]);
    // The child has nothing left to do in the container: the next refresh need not wait.
    assert!(refreshed.abandoned.is_none(), "{refreshed:?}");
    assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
}
