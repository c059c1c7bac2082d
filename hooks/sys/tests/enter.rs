//! Replacing a mount in a container's mount namespace, step by step, by both methods.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

mod folder;
mod live;
#[allow(dead_code, reason = "not every test file needs all of it")]
mod namespace;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountEntry;
use bindguard_sys::Handle;
use bindguard_sys::enter::{EnterError, Entered, Replacement, clone_like};
use folder::Folder;
use live::{Container, Inside, change};
use nix::mount::{MsFlags, mount};

const PATIENCE: Duration = Duration::from_secs(10);
const PLACE: &str = "/etc/conf";

/// A file with versions, and the root of a container that binds it.
struct Scene {
    folder: Folder,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { folder: Folder::new() };
        fs::create_dir(scene.root()).unwrap();
        fs::write(scene.file(0), "0").unwrap();
        scene
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn file(&self, version: u32) -> PathBuf {
        self.folder.path().join(format!("file-{version}"))
    }

    fn binds(&self) -> [Inside; 1] {
        [Inside::of(self.file(0), "etc/conf")]
    }

    /// The next version; the one before is removed, as a kubelet does.
    fn update(&self, version: u32) {
        fs::write(self.file(version), version.to_string()).unwrap();
        fs::remove_file(self.file(version - 1)).unwrap();
    }
}

/// False, with a printed reason, without privilege and on older kernels.
fn can_run() -> bool {
    match live::has_mount_setattr() {
        Ok(()) => namespace::enter(true),
        Err(why) => {
            namespace::skipped(why);
            false
        }
    }
}

fn stale(container: &Container) -> (MountEntry, MountEntry) {
    let table = container.process.mounts().unwrap();
    let stale = table.stack_at(Path::new(PLACE)).last().unwrap().clone();
    let parent = table.mount(stale.parent).unwrap().clone();
    (stale, parent)
}

fn new_mount(scene: &Scene, version: u32, stale: &MountEntry, container: &Container) -> OwnedFd {
    clone_like(&Handle::of(&scene.file(version)).unwrap(), stale, &container.process).unwrap()
}

/// Enters, with the stale mount at its place open.
fn entered(container: &Container, scene: &Scene, version: u32) -> Entered {
    let (stale, parent) = stale(container);
    let new = new_mount(scene, version, &stale, container);
    let replacement = Replacement { stale: &stale, parent: Some(&parent), new: Some(new) };
    let entered = Entered::enter(&container.process, vec![replacement], PATIENCE).unwrap();
    entered.open(0).unwrap();
    entered
}

/// Attaches a mount beneath the stale one.
type Attach = fn(&Entered) -> Result<(), EnterError>;
const METHODS: [Attach; 2] = [|entered| entered.attach_beneath(0), |entered| entered.tuck(0)];

/// False, with a printed reason, where the kernel has no `MOVE_MOUNT_BENEATH`.
fn attached(attach: Attach, entered: &Entered) -> bool {
    match attach(entered) {
        Err(error) if error.is_not_possible() => {
            namespace::skipped(&format!("{error}: Linux 6.5 and newer"));
            false
        }
        done => {
            done.unwrap();
            true
        }
    }
}

#[test]
fn both_ways_show_the_new_file_and_leave_one_mount_like_the_old_one() {
    if !can_run() {
        return;
    }
    for attach in METHODS {
        for parent in [MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE, MsFlags::MS_SHARED] {
            let scene = Scene::new();
            let container = Container::start_with(&scene.root(), &scene.binds(), || {
                change(Path::new("/"), MsFlags::MS_SHARED);
                change(Path::new("/"), parent);
            });
            let look = || {
                let (mount, propagation) = (container.mounts_at(PLACE), container.propagation_at("/"));
                (container.mounts(), mount[0].1.clone(), propagation, container.propagation_at(PLACE))
            };
            let before = look();
            for version in 1..=20 {
                scene.update(version);
                let entered = entered(&container, &scene, version);
                if !attached(attach, &entered) {
                    break;
                }
                entered.detach(0).unwrap();
                entered.set_propagation(0).unwrap();
                assert_eq!(container.read("etc/conf").unwrap(), version.to_string());
            }
            assert_eq!(look(), before);
            let seen = container.stop();
            assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
        }
    }
}

/// Its mount namespace belongs to its own user namespace.
#[test]
fn a_container_in_a_user_namespace_of_its_own() {
    if !can_run() {
        return;
    }
    for attach in METHODS {
        let scene = Scene::new();
        let container = Container::start_in_user_namespace(&scene.root(), &scene.binds());
        let look = || (container.mounts(), container.mounts_at(PLACE)[0].1.clone(), container.propagation_at("/"));
        let before = look();
        for version in 1..=10 {
            scene.update(version);
            let entered = entered(&container, &scene, version);
            if !attached(attach, &entered) {
                break;
            }
            entered.detach(0).unwrap();
            entered.set_propagation(0).unwrap();
            assert_eq!(container.read("etc/conf").unwrap(), version.to_string());
        }
        assert_eq!(look(), before);
        let seen = container.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }
}

/// The agent is killed: the child ends, and what it left is finished by the next one.
#[test]
fn killed_between_attach_and_detach_leaves_whole_content_and_the_next_one_finishes() {
    if !can_run() {
        return;
    }
    for attach in METHODS {
        let scene = Scene::new();
        let container = Container::start(&scene.root(), &scene.binds());
        let before = (container.mounts(), container.propagation_at("/"));
        scene.update(1);
        let first = entered(&container, &scene, 1);
        if !attached(attach, &first) {
            continue;
        }
        drop(first);
        assert_eq!((container.read("etc/conf").as_deref(), container.mounts_at(PLACE).len()), (Some("0"), 2));
        let (stale, parent) = stale_top(&container);
        let replacement = Replacement { stale: &stale, parent: Some(&parent), new: None };
        let second = Entered::enter(&container.process, vec![replacement], PATIENCE).unwrap();
        second.open(0).unwrap();
        second.detach(0).unwrap();
        assert_eq!(container.read("etc/conf").as_deref(), Some("1"));
        assert_eq!((container.mounts(), container.propagation_at("/")), before);
    }
}

/// The mount that no other one is on.
fn stale_top(container: &Container) -> (MountEntry, MountEntry) {
    let table = container.process.mounts().unwrap();
    let stack: Vec<_> = table.stack_at(Path::new(PLACE)).cloned().collect();
    let is_top = |mount: &&MountEntry| !stack.iter().any(|other| other.parent == mount.id);
    let top = stack.iter().find(is_top).unwrap().clone();
    let parent = table.mount(top.parent).unwrap().clone();
    (top, parent)
}

/// The kubelet removes the new file as well, before the stale mount is detached: the kernel detaches it then.
#[test]
fn a_stale_mount_that_the_kernel_detached_is_no_error() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    if !attached(METHODS[0], &entered) {
        return;
    }
    scene.update(2);
    assert_eq!(container.mounts_at(PLACE).len(), 1, "the unlink detached it");
    entered.detach(0).unwrap();
    assert_eq!((container.read("etc/conf").as_deref(), container.mounts_at(PLACE).len()), (Some("1"), 1));
}

#[test]
fn a_file_removed_before_it_was_attached_is_an_error() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    scene.update(2);
    for attach in METHODS {
        let error = attach(&entered).unwrap_err();
        assert!(error.is_target_gone() || error.is_not_possible(), "{error:?}");
    }
    assert_eq!(container.read("etc/conf").as_deref(), Some("0"));
}

/// The mount table named a mount that is no longer there: nothing is opened in its place.
#[test]
fn another_mount_at_the_place_is_refused() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start_with(&scene.root(), &scene.binds(), || {
        mount(Some("/old"), "/etc", None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        fs::write("/etc/conf", "own").unwrap();
    });
    let (stale, parent) = stale(&container);
    let replacement = Replacement { stale: &stale, parent: Some(&parent), new: None };
    let entered = Entered::enter(&container.process, vec![replacement], PATIENCE).unwrap();
    assert!(matches!(entered.open(0), Err(EnterError::OtherMount)));
    assert!(entered.detach(0).is_err(), "nothing is open");
    assert_eq!((container.read("etc/conf").as_deref(), container.mounts_at(PLACE).len()), (Some("own"), 1));
}

/// The folder of the mount point may be read-only in the container.
#[test]
fn a_touch_is_an_event_of_the_folder_and_changes_no_content() {
    if !can_run() {
        return;
    }
    use rustix::fs::inotify;
    let scene = Scene::new();
    let container = Container::start_with(&scene.root(), &scene.binds(), || {
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
            None::<&str>,
        )
        .unwrap();
    });
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    let folder = format!("/proc/{}/root/etc", container.process.pid());
    inotify::add_watch(&watch, folder.as_str(), inotify::WatchFlags::ATTRIB).unwrap();
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    if !attached(METHODS[0], &entered) {
        return;
    }
    entered.detach(0).unwrap();
    let mounts = container.mounts();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    assert!(events.next().is_err(), "there is an event without a touch");
    entered.touch(0).unwrap();
    assert_eq!(events.next().unwrap().file_name(), Some(c"conf"));
    assert_eq!((container.read("etc/conf").as_deref(), container.mounts()), (Some("1"), mounts));
    assert!(container.mounts_at("/")[0].1.starts_with("ro"), "the root filesystem is still read-only");
}

/// A FUSE mount of the container above its mount point, whose daemon never answers.
#[test]
fn a_walk_that_hangs_in_the_container_is_abandoned() {
    if !can_run() {
        return;
    }
    let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else {
        return namespace::skipped("no /dev/fuse");
    };
    let scene = Scene::new();
    let container = Container::start_with(&scene.root(), &scene.binds(), || {
        use std::os::fd::AsRawFd;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
        fs::create_dir("/deep").unwrap();
        mount(Some("silent"), "/deep", Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
    });
    let (mut stale, parent) = stale(&container);
    // As if the mount table had named a place below that filesystem.
    stale.mount_point = "/deep/etc/conf".into();
    let replacement = Replacement { stale: &stale, parent: Some(&parent), new: None };
    let patience = Duration::from_millis(200);
    let start = Instant::now();
    let entered = Entered::enter(&container.process, vec![replacement], patience).unwrap();
    assert!(matches!(entered.open(0), Err(EnterError::Silent(_))));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let abandoned = entered.abandon();
    drop(fuse);
    drop(container);
    let gone = Instant::now();
    while abandoned.is_alive() {
        assert!(gone.elapsed() < Duration::from_secs(30), "the child stays after its daemon is gone");
    }
}

#[test]
fn the_child_holds_nothing_of_the_agent_open() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let (read, write) = nix::unistd::pipe().unwrap();
    let (stale, parent) = stale(&container);
    let replacement = Replacement { stale: &stale, parent: Some(&parent), new: None };
    let entered = Entered::enter(&container.process, vec![replacement], PATIENCE).unwrap();
    File::from(write).write_all(b"x").unwrap();
    // With a copy of the write end in the child, this would wait for ever.
    let mut text = String::new();
    File::from(read).read_to_string(&mut text).unwrap();
    assert_eq!(text, "x");
    entered.open(0).unwrap();
}

#[test]
fn a_process_that_ended_is_not_entered() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(container.process.pid() as i32), nix::sys::signal::SIGKILL)
        .unwrap();
    while container.process.is_alive() {}
    let error = Entered::enter(&container.process, Vec::new(), PATIENCE).unwrap_err();
    assert!(matches!(&error, EnterError::Failed(step, _) if step.words().contains("entering")), "{error:?}");
    assert!(container.process.mounts().is_err());
}
