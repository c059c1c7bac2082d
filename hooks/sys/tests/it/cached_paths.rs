//! A walk that uses the kernel's cache alone, while mounts change.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_sys::open_without_waiting;
use bindguard_testing::{own_namespace, test_if};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Any mount and umount on the node ends the kernel's walk, which then looks as if a server had to
/// answer.
#[test_if(own_namespace)]
fn a_mount_elsewhere_does_not_look_like_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let [volume, other] = ["volume", "other"].map(|name| folder.path().join(name));
    for place in [&volume, &other] {
        fs::create_dir(place).unwrap();
    }
    tmpfs(&volume);
    let is_over = AtomicBool::new(false);
    let waiting = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                tmpfs(&other);
                umount2(&other, MntFlags::MNT_DETACH).unwrap();
            }
        });
        let waits = |_: &usize| {
            let opened = open_without_waiting(&volume, |_| false);
            opened.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        };
        let waiting = (0..100_000).filter(waits).count();
        is_over.store(true, Ordering::Relaxed);
        waiting
    });
    assert_eq!(waiting, 0);
}

fn tmpfs(place: &Path) {
    let (kind, none) = (Some("tmpfs"), MsFlags::empty());
    mount(kind, place, kind, none, None::<&str>).unwrap();
}
