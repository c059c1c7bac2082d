//! A container that changes its mounts, hangs, or ends while a child is in its mount namespace.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_sys::enter::{EnterError, Entered, Replacement};
use bindguard_testing::live::Container;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, mknod};

use crate::enter_scene::{
    METHODS, PATIENCE, PLACE, Scene, attached, can_run, can_run_with_mount_setattr, entered, stale,
};

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
    if !can_run_with_mount_setattr() {
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
    if !Path::new("/dev/fuse").exists() {
        return bindguard_testing::skipped("no /dev/fuse");
    }
    let scene = Scene::new();
    let container = Container::start_with(&scene.root(), &scene.binds(), || {
        use std::os::fd::IntoRawFd;
        let device = nix::sys::stat::makedev(10, 229);
        mknod("/fuse", SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device).unwrap();
        // Open until the container ends.
        let fuse = File::options().read(true).write(true).open("/fuse").unwrap().into_raw_fd();
        let options = format!("fd={fuse},rootmode=40000,user_id=0,group_id=0");
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
