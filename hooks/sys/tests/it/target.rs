//! The file that a sub path leads to: never out of its volume (CVE-2017-1002101), and always the
//! current target.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_core::kubelet::{TimestampDirectory, VolumeLayout};
use bindguard_sys::{Handle, TargetError, make_directories, open_target, remove_payload};
use bindguard_testing::Folder;
use bindguard_testing::namespace;
use tempfile::TempDir;

const OLD: &str = "..2026_11_21_05_10_00.1";
const NEW: &str = "..2026_11_21_05_10_01.2";

fn payload(volume: &TempDir, timestamp: &str, files: &[&str]) {
    for file in files {
        let path = volume.path().join(timestamp).join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, timestamp).unwrap();
    }
}

fn swap(volume: &TempDir, timestamp: &str) {
    symlink(timestamp, volume.path().join("..data_tmp")).unwrap();
    fs::rename(
        volume.path().join("..data_tmp"),
        volume.path().join("..data"),
    )
    .unwrap();
}

fn open(
    volume: &impl AsRef<Path>,
    path: &str,
    layout: VolumeLayout,
) -> Result<Option<Handle>, TargetError> {
    open_target(
        &Handle::of(volume.as_ref()).unwrap(),
        Path::new(path),
        layout,
    )
    .map(|opened| opened.file)
}

#[test]
fn a_payload_is_opened_through_the_data_link() {
    let volume = tempfile::tempdir().unwrap();
    payload(&volume, OLD, &["app.conf"]);
    payload(&volume, NEW, &["app.conf", "dir/nested.conf"]);
    swap(&volume, NEW);
    let current = |path: &str| {
        Handle::of(&volume.path().join(NEW).join(path))
            .unwrap()
            .identity()
            .unwrap()
    };
    for path in ["app.conf", "dir", "dir/nested.conf", ""] {
        let file = open(&volume, path, VolumeLayout::Payload).unwrap().unwrap();
        assert_eq!(file.identity().unwrap(), current(path), "{path:?}");
    }
    assert!(
        open(&volume, "gone.conf", VolumeLayout::Payload)
            .unwrap()
            .is_none()
    );
}

/// The payload that the link named is removed before it is walked to: that is no missing key.
#[test]
fn a_key_is_there_in_every_moment_of_an_update() {
    let volume = tempfile::tempdir().unwrap();
    // A name that was used never comes back.
    let name = |number: u32| format!("..2026_11_21_05_10_00.{number}");
    payload(&volume, &name(0), &["app.conf"]);
    swap(&volume, &name(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in (1..).take_while(|_| !done.load(Ordering::Relaxed)) {
                payload(&volume, &name(number), &["app.conf"]);
                swap(&volume, &name(number));
                fs::remove_dir_all(volume.path().join(name(number - 1))).unwrap();
            }
        });
        let missing = (0..20_000)
            .filter(|_| matches!(open(&volume, "app.conf", VolumeLayout::Payload), Ok(None)))
            .count();
        done.store(true, Ordering::Relaxed);
        assert_eq!(missing, 0);
    });
}

#[test]
fn a_volume_without_a_payload_differs_from_one_with_a_false_link() {
    let volume = tempfile::tempdir().unwrap();
    assert!(matches!(
        open(&volume, "app.conf", VolumeLayout::Payload),
        Err(TargetError::NoPayload(_))
    ));
    for lie in ["/", "../..", "somewhere"] {
        swap(&volume, lie);
        assert!(
            matches!(
                open(&volume, "etc", VolumeLayout::Payload),
                Err(TargetError::NotAPayload { .. })
            ),
            "{lie}"
        );
    }
}

#[test]
fn no_symlink_leads_out_of_a_volume_that_containers_write() {
    let volume = tempfile::tempdir().unwrap();
    symlink("/", volume.path().join("absolute")).unwrap();
    symlink("../../../../..", volume.path().join("up")).unwrap();
    symlink("inside", volume.path().join("even-inside")).unwrap();
    fs::create_dir_all(volume.path().join("inside/deeper")).unwrap();
    let leading_out = [
        "absolute",
        "absolute/etc",
        "up/etc",
        "../..",
        "inside/../../..",
    ];
    for path in leading_out
        .into_iter()
        .chain(["even-inside", "even-inside/deeper"])
    {
        let opened = open(&volume, path, VolumeLayout::Plain);
        assert!(
            matches!(
                opened,
                Err(TargetError::Symlink { .. } | TargetError::Open { .. })
            ),
            "{path}: {opened:?}"
        );
    }
    assert!(
        open(&volume, "inside/deeper", VolumeLayout::Plain)
            .unwrap()
            .is_some()
    );
}

/// A container with the right to mount, or a mistake on the host: what is mounted there is not the
/// volume's.
#[test]
fn another_mount_in_the_way_is_neither_opened_nor_written_to() {
    if !namespace::enter(false) {
        return;
    }
    let (volume, outside) = (Folder::new(), tempfile::tempdir().unwrap());
    fs::create_dir_all(volume.path().join("door/inside")).unwrap();
    fs::create_dir(outside.path().join("inside")).unwrap();
    bindguard_testing::bind(outside.path(), &volume.path().join("door"));
    for path in ["door", "door/inside"] {
        let opened = open(&volume, path, VolumeLayout::Plain);
        assert!(
            matches!(opened, Err(TargetError::Open { .. })),
            "{path}: {opened:?}"
        );
    }
    make_directories(&Handle::of(volume.path()).unwrap(), Path::new("door/new")).unwrap_err();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn a_directory_swapped_for_a_symlink_in_a_loop_never_lets_anything_outside_be_opened() {
    let volume = tempfile::tempdir().unwrap();
    let (inside, link, shelf) = (
        volume.path().join("door"),
        volume.path().join("link"),
        volume.path().join("shelf"),
    );
    fs::create_dir_all(inside.join("etc")).unwrap();
    symlink("/", &link).unwrap();
    let outside = Handle::of(Path::new("/etc")).unwrap().identity().unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (from, to) in [
                    (&inside, &shelf),
                    (&link, &inside),
                    (&inside, &link),
                    (&shelf, &inside),
                ] {
                    fs::rename(from, to).unwrap();
                }
            }
        });
        let (mut opened, mut tries) = (0, 0);
        // until it was open once: the thread that swaps the door may pause and leave it shut
        while tries < 20_000 || opened == 0 && tries < 20_000_000 {
            tries += 1;
            if let Ok(Some(file)) = open(&volume, "door/etc", VolumeLayout::Plain) {
                assert_ne!(file.identity().unwrap(), outside);
                opened += 1;
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(opened > 0, "the door was never open");
    });
}

#[test]
fn a_stranded_payload_is_removed_and_nothing_else() {
    let volume = tempfile::tempdir().unwrap();
    payload(&volume, OLD, &["app.conf", "dir/nested.conf"]);
    payload(&volume, NEW, &["app.conf"]);
    let kept = tempfile::tempdir().unwrap();
    fs::write(kept.path().join("kept"), "").unwrap();
    symlink(kept.path(), volume.path().join(OLD).join("link")).unwrap();
    let handle = Handle::of(volume.path()).unwrap();
    let old = TimestampDirectory::from_name(OLD.as_ref()).unwrap();
    let left_after_a_removal = || {
        remove_payload(&handle, &old).unwrap();
        let names = fs::read_dir(volume.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<BTreeSet<_>>()
    };
    assert!(
        left_after_a_removal().contains(OLD),
        "the current payload is unknown"
    );
    swap(&volume, OLD);
    assert!(
        left_after_a_removal().contains(OLD),
        "it is the current one"
    );
    swap(&volume, NEW);
    assert_eq!(
        left_after_a_removal(),
        BTreeSet::from([NEW, "..data"].map(str::to_owned))
    );
    assert_eq!(left_after_a_removal().len(), 2);
    assert!(kept.path().join("kept").metadata().is_ok());
}
