//! Mounts that are moved, unmounted and listed while a descriptor of them is open: the scenes of the
//! kernel's own selftests for move_mount, umount propagation, mount notifications and statmount.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountTable;
use bindguard_sys::replace::{NewMount, ReplaceError, attach_beneath, clone_mount, detach};
use bindguard_sys::{Handle, MountWatch, Mounts, read_mount_table};
use bindguard_testing::{Folder, bind, mount_tmpfs, namespace, skipped, unmount};
use nix::mount::{MsFlags, mount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A folder with a mount at `top`, in which the file `name` says whose mount it is.
struct Scene {
    folder: Folder,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            folder: Folder::new(),
        };
        fs::create_dir(scene.at("top")).unwrap();
        scene.mount("top", "old");
        scene
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn mount(&self, place: &str, name: &str) {
        mount_tmpfs(&self.at(place));
        fs::write(self.at(place).join("name"), name).unwrap();
    }

    /// A new mount of a filesystem that no path shows.
    fn new_mount(&self, name: &str) -> NewMount {
        fs::create_dir(self.at(name)).unwrap();
        self.mount(name, name);
        let target = Handle::of(&self.at(name)).unwrap();
        let new = clone_mount(&target, None).unwrap();
        detach(&target).unwrap();
        new
    }

    fn name_at(&self, place: &str) -> Option<String> {
        fs::read_to_string(self.at(place).join("name")).ok()
    }

    fn count_at(&self, place: &str) -> usize {
        table().stack_at(&self.at(place)).count()
    }

    /// The folder `shared`, a peer of it and a slave of it.
    fn with_receivers(&self) {
        for name in ["shared", "peer", "slave"] {
            fs::create_dir(self.at(name)).unwrap();
        }
        mount_tmpfs(&self.at("shared"));
        change(&self.at("shared"), MsFlags::MS_SHARED);
        fs::create_dir(self.at("shared/x")).unwrap();
        for name in ["peer", "slave"] {
            bind(&self.at("shared"), &self.at(name));
        }
        change(&self.at("slave"), MsFlags::MS_SLAVE);
    }
}

fn table() -> MountTable {
    read_mount_table().unwrap()
}

fn change(place: &Path, to: MsFlags) {
    mount(None::<&str>, place, None::<&str>, to, None::<&str>).unwrap();
}

/// False, with a printed reason, where the kernel has no `MOVE_MOUNT_BENEATH`.
fn is_attached(attached: Result<(), ReplaceError>) -> bool {
    match attached {
        Err(error) if error.is_not_possible() => {
            skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
            false
        }
        attached => {
            attached.unwrap();
            true
        }
    }
}

/// Kernels answer EINVAL or ENOENT. After both, a refresh reads the mount table again.
fn is_refusal(error: ReplaceError) -> bool {
    error.is_not_possible() || error.is_target_gone()
}

/// CVE-2026-98995: the kernel used freed memory.
#[test]
fn nothing_is_attached_beneath_a_mount_that_was_unmounted() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    let new = scene.new_mount("new");
    let top = Handle::of(&scene.at("top")).unwrap();
    let file = File::open(scene.at("top/name")).unwrap();
    detach(&top).unwrap();
    let before = bindguard_testing::mounts_of_host();
    for _ in 0..100 {
        let refused = attach_beneath(&new, &top).unwrap_err();
        assert!(is_refusal(refused), "{refused:?}");
    }
    assert_eq!(bindguard_testing::mounts_of_host(), before);
    assert_eq!(std::io::read_to_string(&file).unwrap(), "old");
}

/// Nor beneath a mount that lies in an unmounted tree, which the kernel keeps whole for the
/// descriptor.
#[test]
fn nothing_is_attached_beneath_a_mount_of_an_unmounted_tree() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    fs::create_dir(scene.at("top/inner")).unwrap();
    scene.mount("top/inner", "inner");
    let new = scene.new_mount("new");
    let inner = Handle::of(&scene.at("top/inner")).unwrap();
    detach(&Handle::of(&scene.at("top")).unwrap()).unwrap();
    let refused = attach_beneath(&new, &inner).unwrap_err();
    assert!(is_refusal(refused), "{refused:?}");
    assert_eq!((scene.count_at("top"), scene.name_at("top")), (0, None));
}

#[test]
fn a_mount_beneath_lies_between_those_whose_descriptors_are_open() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    let lowest = Handle::of(&scene.at("top")).unwrap();
    scene.mount("top", "upper");
    let upper = Handle::of(&scene.at("top")).unwrap();
    let mut file = File::open(scene.at("top/name")).unwrap();
    let ids = [&lowest, &upper].map(|it| it.mount_id().unwrap());
    let new = scene.new_mount("new");
    if !is_attached(attach_beneath(&new, &upper)) {
        return;
    }
    let between = table().mount(ids[1]).unwrap().parent;
    assert_eq!(table().mount(between).unwrap().parent, ids[0]);
    assert_eq!(scene.name_at("top").as_deref(), Some("upper"));
    detach(&upper).unwrap();
    assert_eq!(scene.name_at("top").as_deref(), Some("new"));
    file.rewind().unwrap();
    let mut shown = String::new();
    file.read_to_string(&mut shown).unwrap();
    assert_eq!(shown, "upper", "the descriptor still reads its mount");
    detach(&Handle::of(&scene.at("top")).unwrap()).unwrap();
    assert_eq!(scene.name_at("top").as_deref(), Some("old"));
    assert_eq!(lowest.mount_id().unwrap(), ids[0]);
}

#[test]
fn an_umount_reaches_every_receiver_whose_mount_is_open() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    scene.with_receivers();
    let places = ["shared/x", "peer/x", "slave/x"];
    scene.mount("shared/x", "x");
    let held = places.map(|place| {
        assert_eq!(scene.count_at(place), 1, "{place}");
        let root = Handle::of(&scene.at(place)).unwrap();
        (root, File::open(scene.at(place).join("name")).unwrap())
    });
    detach(&held[0].0).unwrap();
    for (place, (root, file)) in places.iter().zip(&held) {
        assert_eq!(scene.count_at(place), 0, "{place}");
        assert_eq!(std::io::read_to_string(file).unwrap(), "x", "{place}");
        assert!(Mounts::default().mount_of(root).is_err(), "{place}");
    }
    // A slave's own umount stays there.
    scene.mount("shared/x", "again");
    detach(&Handle::of(&scene.at("slave/x")).unwrap()).unwrap();
    let left = places.map(|place| scene.count_at(place));
    assert_eq!(left, [1, 1, 0]);
}

/// The receiver mounted over the copy: its own mount takes the copy's place.
#[test]
fn an_umount_leaves_the_mount_over_a_received_copy() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    scene.with_receivers();
    scene.mount("shared/x", "x");
    change(&scene.at("slave/x"), MsFlags::MS_PRIVATE);
    scene.mount("slave/x", "own");
    let own = Handle::of(&scene.at("slave/x")).unwrap();
    let id = own.mount_id().unwrap();
    assert_eq!(scene.count_at("slave/x"), 2);
    detach(&Handle::of(&scene.at("shared/x")).unwrap()).unwrap();
    let counts = ["shared/x", "peer/x", "slave/x"].map(|place| scene.count_at(place));
    assert_eq!(counts, [0, 0, 1]);
    assert_eq!(scene.name_at("slave/x").as_deref(), Some("own"));
    assert_eq!(own.mount_id().unwrap(), id);
}

/// While a descriptor of a mount is open, no other mount gets its id.
#[test]
fn the_id_of_an_open_mount_is_not_given_again() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    let top = Handle::of(&scene.at("top")).unwrap();
    let id = top.mount_id().unwrap();
    detach(&top).unwrap();
    assert!(Mounts::default().mount_of(&top).is_err());
    for _ in 0..50 {
        scene.mount("top", "next");
        let next = Handle::of(&scene.at("top")).unwrap();
        assert_ne!(next.mount_id().unwrap(), id);
        let found = Mounts::default().mount_of(&next).unwrap();
        assert_eq!(found.entry.mount_point, scene.at("top"));
        drop(next);
        unmount(&scene.at("top"));
    }
    assert_eq!(top.mount_id().unwrap(), id);
}

/// A mount that arrives by propagation, or beneath another mount, is announced as any other mount.
#[test]
fn the_watch_names_mounts_beneath_and_received_mounts() {
    if !namespace::enter(true) {
        return;
    }
    let scene = Scene::new();
    scene.with_receivers();
    let new = scene.new_mount("new");
    let mut watch = MountWatch::open().unwrap();
    scene.mount("shared/x", "x");
    let mut appeared = appeared(&mut watch);
    appeared.sort();
    let places = ["peer/x", "shared/x", "slave/x"].map(|place| scene.at(place));
    assert_eq!(appeared, places);
    let top = Handle::of(&scene.at("top")).unwrap();
    if !is_attached(attach_beneath(&new, &top)) {
        return;
    }
    assert_eq!(self::appeared(&mut watch), [scene.at("top")]);
    detach(&top).unwrap();
    assert!(self::appeared(&mut watch).is_empty(), "nothing is new");
}

fn appeared(watch: &mut MountWatch) -> Vec<PathBuf> {
    let limit = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    let woken = poll(&mut [PollFd::new(&*watch, PollFlags::PRI)], Some(&limit)).unwrap();
    assert_eq!(woken, 1, "the change wakes the watch");
    watch.appeared().unwrap()
}
