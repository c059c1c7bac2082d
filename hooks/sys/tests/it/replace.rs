//! Swapping a stale mount for a current mount, both ways, in mount namespaces of the tests' own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use bindguard_core::mount_table::{MountAttributes, MountRoot};
use bindguard_sys::replace::{
    NewMount, ReplaceError, attach_beneath, attach_tucked, clone_mount, detach,
};
use bindguard_sys::{Handle, read_mount_table};
use bindguard_testing::Folder;
use bindguard_testing::namespace;

/// The name of the mount point in its folder.
const NAME: &str = "mounted";

/// A file that is bound over an empty file, and then replaced.
struct Stale {
    folder: Folder,
}

impl Stale {
    fn new() -> Self {
        let stale = Self {
            folder: Folder::new(),
        };
        fs::write(stale.mounted(), "").unwrap();
        fs::write(stale.file(0), "version 0").unwrap();
        bindguard_testing::bind(&stale.file(0), &stale.mounted());
        fs::remove_file(stale.file(0)).unwrap();
        stale
    }

    fn mounted(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    fn file(&self, version: u32) -> PathBuf {
        self.folder.path().join(format!("file-{version}"))
    }

    fn target(&self, version: u32) -> Handle {
        fs::write(self.file(version), format!("version {version}")).unwrap();
        Handle::of(&self.file(version)).unwrap()
    }

    fn roots(&self) -> Vec<MountRoot> {
        let table = read_mount_table().unwrap();
        table
            .stack_at(&self.mounted())
            .map(|entry| entry.root.clone())
            .collect()
    }

    fn content(&self) -> String {
        fs::read_to_string(self.mounted()).unwrap()
    }
}

/// Opens the path all the time; counts how often the empty file underneath was seen.
fn watched(path: &Path, during: impl FnOnce()) -> u32 {
    let (seen_empty, done) = (AtomicU32::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if fs::read(path).unwrap().is_empty() {
                    seen_empty.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        during();
        done.store(true, Ordering::Relaxed);
    });
    seen_empty.into_inner()
}

#[test]
fn beneath_leaves_one_mount_and_never_shows_the_file_underneath() {
    if !namespace::enter(true) {
        return;
    }
    let stale = Stale::new();
    assert!(stale.roots()[0].deleted);
    let seen_empty = watched(&stale.mounted(), || {
        for version in 1..300 {
            let top = Handle::of(&stale.mounted()).unwrap();
            match attach_beneath(&new(&stale.target(version), None), &top) {
                Err(error) if error.is_not_possible() => {
                    return bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
                }
                other => other.unwrap(),
            }
            detach(&top).unwrap();
            assert_eq!(stale.content(), format!("version {version}"));
        }
    });
    assert_eq!((seen_empty, stale.roots().len()), (0, 1));
}

#[test]
fn tucked_under_a_shared_parent_leaves_one_mount_and_never_shows_the_file_underneath() {
    if !namespace::enter(true) {
        return;
    }
    let stale = Stale::new();
    let folder = Handle::of(stale.folder.path()).unwrap();
    let seen_empty = watched(&stale.mounted(), || {
        for version in 1..100 {
            let top = Handle::of(&stale.mounted()).unwrap();
            attach_tucked(&new(&stale.target(version), None), &folder, NAME.as_ref()).unwrap();
            assert_eq!(stale.roots().len(), 2, "it arrived below");
            detach(&top).unwrap();
            assert_eq!(stale.content(), format!("version {version}"));
        }
    });
    assert_eq!((seen_empty, stale.roots().len()), (0, 1));
}

#[test]
fn tucked_under_a_private_parent_does_not_arrive_and_changes_nothing() {
    if !namespace::enter(false) {
        return;
    }
    let stale = Stale::new();
    let folder = Handle::of(stale.folder.path()).unwrap();
    attach_tucked(&new(&stale.target(1), None), &folder, NAME.as_ref()).unwrap();
    assert_eq!(stale.roots().len(), 1);
    assert_eq!(stale.content(), "version 0");
}

#[test]
fn a_target_removed_meanwhile_is_an_error_and_changes_nothing() {
    if !namespace::enter(true) {
        return;
    }
    let stale = Stale::new();
    let new = new(&stale.target(1), None);
    fs::remove_file(stale.file(1)).unwrap();
    let top = Handle::of(&stale.mounted()).unwrap();
    let error = attach_beneath(&new, &top).unwrap_err();
    assert!(
        error.is_target_gone() || error.is_not_possible(),
        "{error:?}"
    );
    let folder = Handle::of(stale.folder.path()).unwrap();
    let error = attach_tucked(&new, &folder, NAME.as_ref()).unwrap_err();
    assert!(error.is_target_gone(), "{error:?}");
    assert_eq!(
        (stale.content().as_str(), stale.roots().len()),
        ("version 0", 1)
    );
}

/// Names are a container's to change: what was opened is bound, whatever has its name by then.
#[test]
fn the_opened_file_is_bound() {
    if !namespace::enter(true) {
        return;
    }
    for way in [attach_beneath_top, attach_tucked_under_top] {
        let stale = Stale::new();
        let target = stale.target(1);
        fs::rename(stale.file(1), stale.file(2)).unwrap();
        fs::write(stale.file(1), "something else").unwrap();
        let top = Handle::of(&stale.mounted()).unwrap();
        match way(&stale, &target, &top) {
            Err(error) if error.is_not_possible() => {
                bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5")
            }
            attached => {
                attached.unwrap();
                detach(&top).unwrap();
                assert_eq!(stale.content(), "version 1");
            }
        }
    }
}

fn attach_beneath_top(_: &Stale, target: &Handle, top: &Handle) -> Result<(), ReplaceError> {
    attach_beneath(&new(target, None), top)
}

fn attach_tucked_under_top(stale: &Stale, target: &Handle, _: &Handle) -> Result<(), ReplaceError> {
    let folder = Handle::of(stale.folder.path()).unwrap();
    attach_tucked(&new(target, None), &folder, NAME.as_ref())
}

fn new(target: &Handle, keep: Option<MountAttributes>) -> NewMount {
    clone_mount(target, keep).unwrap()
}

/// A kubelet detached the stale mount and bound again before the guard acted.
#[test]
fn detaching_takes_no_mount_but_the_one_that_was_opened() {
    if !namespace::enter(true) {
        return;
    }
    let stale = Stale::new();
    let top = Handle::of(&stale.mounted()).unwrap();
    detach(&top).unwrap();
    stale.target(1);
    bindguard_testing::bind(&stale.file(1), &stale.mounted());
    detach(&top).unwrap();
    assert_eq!(
        (stale.content().as_str(), stale.roots().len()),
        ("version 1", 1)
    );
}

#[test]
fn detaching_twice_takes_one_mount() {
    if !namespace::enter(true) {
        return;
    }
    let stale = Stale::new();
    let top = Handle::of(&stale.mounted()).unwrap();
    detach(&top).unwrap();
    detach(&top).unwrap();
    assert_eq!((stale.content().as_str(), stale.roots().len()), ("", 0));
}

/// Without them, a bind from another mount of the filesystem would allow more.
#[test]
fn attributes_to_keep_are_kept_both_ways() {
    if !namespace::enter(true) {
        return;
    }
    let keep = MountAttributes::from_options("ro,nosuid,nodev,noexec,noatime,nodiratime".as_ref());
    let beneath = |stale: &Stale, target: &Handle, top: &Handle| match attach_beneath(
        &new(target, Some(keep)),
        top,
    ) {
        Err(error) if error.is_not_possible() => {
            bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
            tucked_keeping(stale, target, keep)
        }
        attached => attached,
    };
    for way in [
        &beneath as &dyn Fn(&Stale, &Handle, &Handle) -> _,
        &|stale, target, _| tucked_keeping(stale, target, keep),
    ] {
        let stale = Stale::new();
        let top = Handle::of(&stale.mounted()).unwrap();
        way(&stale, &stale.target(1), &top).unwrap();
        detach(&top).unwrap();
        let table = read_mount_table().unwrap();
        let attributes: Vec<_> = table
            .stack_at(&stale.mounted())
            .map(|entry| entry.attributes)
            .collect();
        assert_eq!(
            (stale.content().as_str(), attributes),
            ("version 1", vec![keep])
        );
    }
}

fn tucked_keeping(
    stale: &Stale,
    target: &Handle,
    keep: MountAttributes,
) -> Result<(), ReplaceError> {
    let folder = Handle::of(stale.folder.path()).unwrap();
    attach_tucked(&new(target, Some(keep)), &folder, NAME.as_ref())
}
