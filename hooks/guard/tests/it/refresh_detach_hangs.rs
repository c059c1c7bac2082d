//! The container holds the last mount of a filesystem whose server is dead: the end of that mount
//! waits for the server, although the new mount is in place.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bindguard_testing::fuse;
use bindguard_testing::live::{Container, Inside};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::refresh_mounts::{Scene, can_run};

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

/// fuse(4): the last request of a mount of a block device.
const FUSE_DESTROY: u32 = 38;

/// The kernel waits for the answer to the last request of a `fuseblk` mount: fuse(4).
#[test]
fn a_refresh_does_not_wait_for_the_end_of_the_old_mount() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let disk = scene.root().join("disk");
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let (Ok(mut device), Some(disk)) = (device, LoopDevice::new(&disk)) else {
        bindguard_testing::skipped("no /dev/fuse, or no loop device");
        return;
    };
    let data = [Inside::of(scene.volume(), "data")];
    umount2(&scene.volume(), MntFlags::empty()).unwrap();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,blksize=512",
        device.as_raw_fd()
    );
    let (kind, flags) = (Some("fuseblk"), MsFlags::empty());
    mount(
        Some(disk.0.as_str()),
        &scene.volume(),
        kind,
        flags,
        Some(options.as_str()),
    )
    .unwrap();
    fuse::begin(&mut device);
    fs::remove_file(scene.pod.bundle().join("bindguard-binds.json")).unwrap();
    let container = Container::start(scene.root(), &data);
    scene.mount_anew("2");
    let refreshed = scene.refresh(&container);
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert_eq!(container.read("data/0").as_deref(), Some("2"));
    // The child that had the old mount open waits for the answer to this request.
    let mut request = [0; 8192];
    assert!(device.read(&mut request).unwrap() > 8);
    assert_eq!(request[4..8], FUSE_DESTROY.to_ne_bytes());
    let start = Instant::now();
    scene.mount_anew("3");
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert!(start.elapsed() < Duration::from_secs(10), "it waited");
    assert_eq!(container.read("data/0").as_deref(), Some("3"));
    drop(device);
}
