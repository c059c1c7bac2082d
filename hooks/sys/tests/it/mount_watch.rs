//! New mounts of the host wake a watch, and are named.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use bindguard_sys::MountWatch;
use bindguard_testing::{Folder, deny_call, is_before_linux_6_8, namespace, skipped};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// True if a change wakes the watch within this time.
fn is_woken(watch: &MountWatch, seconds: i64) -> bool {
    let limit = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(watch, PollFlags::PRI)], Some(&limit)).unwrap() > 0
}

fn tmpfs(place: &Path) {
    let none = MsFlags::empty();
    mount(Some("tmpfs"), place, Some("tmpfs"), none, None::<&str>).unwrap();
}

fn only_new_mounts_are_named(mut watch: MountWatch, folder: &Path) {
    let places = ["a", "b"].map(|name| folder.join(name));
    places.iter().for_each(|it| fs::create_dir_all(it).unwrap());
    assert!(!is_woken(&watch, 0));
    assert_eq!(watch.appeared().unwrap(), [""; 0].map(PathBuf::from));
    places.iter().for_each(|place| tmpfs(place));
    assert!(is_woken(&watch, 10));
    let mut appeared = watch.appeared().unwrap();
    appeared.sort();
    assert_eq!(appeared, places);
    assert!(!is_woken(&watch, 0), "the changes are known");
    // Both changes happen before the next list: the place gets another mount.
    let open = fs::File::open(&places[0]).unwrap();
    umount2(&places[0], MntFlags::MNT_DETACH).unwrap();
    tmpfs(&places[0]);
    umount2(&places[1], MntFlags::MNT_DETACH).unwrap();
    assert!(is_woken(&watch, 10));
    assert_eq!(watch.appeared().unwrap(), [places[0].clone()]);
    drop(open);
    umount2(&places[0], MntFlags::MNT_DETACH).unwrap();
    assert!(is_woken(&watch, 10));
    assert!(watch.appeared().unwrap().is_empty(), "nothing is new");
}

#[test]
fn a_new_mount_wakes_the_watch() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    only_new_mounts_are_named(MountWatch::open().unwrap(), folder.path());
}

/// As before Linux 6.8.
#[test]
fn a_new_mount_wakes_the_watch_without_unique_ids() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    only_new_mounts_are_named(MountWatch::open_without_ids().unwrap(), folder.path());
}

/// A call that fails for a moment hid the new mounts for ever, or made all of them look gone.
#[test]
fn a_new_mount_that_could_not_be_read_is_named_later() {
    if !namespace::enter(true) {
        return;
    }
    const SYS_STATMOUNT: i64 = 457;
    const SYS_LISTMOUNT: i64 = 458;
    if is_before_linux_6_8() {
        return skipped("no listmount before Linux 6.8");
    }
    let folder = Folder::new();
    let mut watch = MountWatch::open().unwrap();
    tmpfs(folder.path());
    for (call, errno) in [
        (SYS_STATMOUNT, Errno::ENOMEM),
        (SYS_LISTMOUNT, Errno::EPERM),
    ] {
        let watch = &mut watch;
        thread::scope(|scope| {
            let failing = scope.spawn(|| {
                deny_call(call, errno);
                watch.appeared()
            });
            assert!(failing.join().unwrap().is_err(), "{errno}");
        });
    }
    assert_eq!(watch.appeared().unwrap(), [folder.path()]);
}
