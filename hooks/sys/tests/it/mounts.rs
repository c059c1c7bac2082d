//! statmount(2) and mountinfo report the same for a mount.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bindguard_core::mount_table::MountEntry;
use bindguard_sys::enter::mounts_in;
use bindguard_sys::{Handle, Mounts, read_mount_table};
use bindguard_testing::Folder;
use bindguard_testing::namespace;
use nix::mount::{MsFlags, mount};

/// The fields that statmount(2) reports: it has neither options nor the source's name.
fn comparable(entry: &MountEntry) -> MountEntry {
    let nothing = || std::ffi::OsString::new();
    MountEntry {
        options: nothing(),
        source: nothing(),
        super_options: nothing(),
        ..entry.clone()
    }
}

#[test]
fn all_sources_agree_on_every_reachable_mount() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    let odd = folder.path().join("odd \\ name\nand more");
    fs::create_dir(&odd).unwrap();
    mount(
        Some("tmpfs"),
        &odd,
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    bindguard_testing::bind(&odd, &odd);

    let table = read_mount_table().unwrap();
    let mut compared = 0;
    for entry in table.entries() {
        let Ok(handle) = Handle::of(&entry.mount_point) else {
            continue;
        };
        // A covered mount cannot be reached by its path.
        if handle.mount_id().unwrap() != entry.id {
            continue;
        }
        let seen = Mounts::default().mount_of(&handle).unwrap();
        let from_table = Mounts::from_mountinfo().mount_of(&handle).unwrap();
        assert_eq!(*from_table.entry, *entry);
        assert_eq!(comparable(&seen.entry), comparable(entry));
        assert!(seen.is_mount_point && from_table.is_mount_point);
        // If the kernel has a filesystem that queries its server, this uses the descriptor's own
        // mount and path.
        let unqueried = Mounts::default()
            .mount_of(&Handle::of(&entry.mount_point).unwrap().unqueried())
            .unwrap();
        assert_eq!(
            (comparable(&unqueried.entry), unqueried.is_mount_point),
            (comparable(entry), true)
        );
        assert_eq!(
            seen.parent.map(|parent| parent.id),
            from_table.parent.map(|parent| parent.id)
        );
        compared += 1;
    }
    assert!(compared > 2, "{compared} mounts");
}

#[test]
fn a_path_that_is_no_mount_point_is_on_its_mount() {
    if !namespace::enter(true) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let seen = Mounts::default()
        .mount_of(&Handle::of(&folder.path().join("file")).unwrap())
        .unwrap();
    assert!(!seen.is_mount_point && folder.path().starts_with(&seen.entry.mount_point));
}

#[test]
fn a_path_longer_than_the_usual_buffer_is_read_whole() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    let deep = (0..14).fold(folder.path().to_owned(), |path, _| {
        path.join("d".repeat(200))
    });
    fs::create_dir_all(&deep).unwrap();
    bindguard_testing::bind(&deep, &deep);
    let seen = Mounts::default()
        .mount_of(&Handle::of(Path::new(&deep)).unwrap())
        .unwrap();
    assert_eq!(seen.entry.mount_point, deep);
    assert!(seen.entry.root.path.as_os_str().as_bytes().len() > 2500);
}

/// The kernel's list of mounts equals the mountinfo of the namespace.
#[test]
fn listed_mounts_are_those_of_the_text() {
    if !namespace::enter(true) {
        return;
    }
    let folder = Folder::new();
    bindguard_testing::bind(folder.path(), folder.path());
    let own = File::open("/proc/thread-self/ns/mnt").unwrap();
    let no_text = || -> io::Result<File> { Err(io::ErrorKind::Unsupported.into()) };
    let Ok(listed) = mounts_in(&own, no_text) else {
        eprintln!("SKIPPED: before Linux 6.11");
        return;
    };
    let text = read_mount_table().unwrap();
    let expected: Vec<_> = text.entries().iter().map(comparable).collect();
    let unique: BTreeSet<_> = listed.entries().iter().map(|it| it.unique_id).collect();
    assert!(unique.len() == expected.len() && !unique.contains(&None));
    let listed = listed.entries().iter().map(|listed| MountEntry {
        unique_id: None,
        ..listed.clone()
    });
    assert_eq!(listed.collect::<Vec<_>>(), expected);
}
