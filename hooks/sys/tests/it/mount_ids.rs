//! The unique id that separates the mounts of a moment from later mounts.

use std::fs::{self, File};
use std::path::Path;

use bindguard_sys::enter::mounts_in;
use bindguard_sys::next_mount_id;
use bindguard_testing::{Folder, namespace, unmount};
use nix::mount::{MsFlags, mount};

/// The unique id of a new mount at this place; `None` before Linux 6.11.
fn mounted(place: &Path) -> Option<u64> {
    fs::create_dir(place).unwrap();
    let none = MsFlags::empty();
    mount(Some("tmpfs"), place, Some("tmpfs"), none, None::<&str>).unwrap();
    let own = File::open("/proc/thread-self/ns/mnt").unwrap();
    let table = mounts_in(&own, || File::open("/proc/thread-self/mountinfo")).unwrap();
    table.stack_at(place).next().unwrap().unique_id
}

#[test]
fn the_next_id_separates_earlier_mounts_from_later_ones() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    let Some(earlier) = mounted(&folder.path().join("earlier")) else {
        eprintln!("SKIPPED: before Linux 6.11");
        return;
    };
    let next = next_mount_id().unwrap();
    let later = mounted(&folder.path().join("later")).unwrap();
    assert!(earlier < next && next <= later, "{earlier} {next} {later}");
    for name in ["earlier", "later"] {
        unmount(&folder.path().join(name));
    }
}
