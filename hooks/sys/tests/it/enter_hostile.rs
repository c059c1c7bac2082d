//! A container that changes its mounts, hangs, or ends while a child is in its mount namespace.

use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::time::{Duration, Instant};

use bindguard_sys::enter::{Action, EnterError, Entered, ProcessError, Replacement};
use bindguard_sys::replace::ReplaceError;
use bindguard_testing::live::Container;
use bindguard_testing::{Cgroup, helper, test_if};
use nix::mount::{MsFlags, mount};

use crate::enter_scene::{METHODS, PLACE, Scene, attached, can_run, enter, entered, far, stale};

/// The mount table named a mount that is no longer there: nothing is opened in its place.
#[test_if(can_run)]
fn another_mount_at_the_place_is_refused() {
    let scene = Scene::new();
    let container = Container::start_with(&scene.root(), &scene.binds(), || {
        mount(
            Some("/old"),
            "/etc",
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
        fs::write("/etc/conf", "own").unwrap();
    });
    let (stale, parent) = stale(&container);
    let replacement = Replacement {
        stale: &stale,
        parent: Some(&parent),
        new: None,
    };
    let entered = enter(&container, replacement);
    assert!(matches!(
        entered.call(Action::Open, 0),
        Err(EnterError::Step(ReplaceError::OtherMount))
    ));
    assert!(entered.call(Action::Detach, 0).is_err(), "nothing is open");
    assert_eq!(
        (
            container.read("etc/conf").as_deref(),
            container.mounts_at(PLACE).len()
        ),
        (Some("own"), 1)
    );
}

#[test_if(can_run)]
fn a_touch_is_an_event_of_the_folder_and_changes_no_content() {
    use rustix::fs::inotify;
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    let folder = format!("/proc/{}/root/etc", container.process.pid());
    inotify::add_watch(&watch, folder.as_str(), inotify::WatchFlags::ATTRIB).unwrap();
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    if !attached(METHODS[0], &entered) {
        return;
    }
    entered.call(Action::Detach, 0).unwrap();
    let mounts = container.mounts();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    assert!(events.next().is_err(), "there is an event without a touch");
    entered.call(Action::Touch, 0).unwrap();
    assert_eq!(events.next().unwrap().file_name(), Some(c"conf"));
    assert_eq!(
        (container.read("etc/conf").as_deref(), container.mounts()),
        (Some("1"), mounts)
    );
}

/// A FUSE mount of the container above its mount point, whose daemon never answers.
#[test_if(can_run)]
fn a_walk_that_hangs_in_the_container_is_abandoned() {
    let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else {
        return bindguard_testing::skipped("no /dev/fuse");
    };
    let scene = Scene::new();
    let container = with_silent_fuse(&scene, &fuse);
    let (mut stale, parent) = stale(&container);
    // As if the mount table had named a place below that filesystem.
    stale.mount_point = "/deep/etc/conf".into();
    let replacement = Replacement {
        stale: &stale,
        parent: Some(&parent),
        new: None,
    };
    let patience = Duration::from_millis(200);
    let start = Instant::now();
    let entered = Entered::enter(
        helper(),
        &container.namespace(),
        vec![replacement],
        patience,
        far(),
    )
    .unwrap();
    assert!(matches!(
        entered.call(Action::Open, 0),
        Err(EnterError::Silent(_))
    ));
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    drop((fuse, container));
    // The late answer to the first request is no answer to the second one.
    assert!(matches!(
        entered.call(Action::Open, 0),
        Err(EnterError::Ended)
    ));
    let abandoned = entered.abandon();
    let gone = Instant::now();
    while abandoned.is_alive() {
        assert!(
            gone.elapsed() < Duration::from_secs(60),
            "the child stays after its daemon is gone"
        );
    }
}

/// It is reaped when it ends, also if nothing of it is kept. The children are those of a helper
/// process, so the test runs in a process of its own.
#[test]
fn a_child_that_was_given_up_leaves_no_zombie() {
    let mut own = Command::new(env::current_exe().unwrap());
    own.args([
        "--exact",
        "enter_hostile::given_up_in_a_process_of_its_own",
        "--ignored",
    ]);
    let ended = own.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[test_if(can_run)]
#[ignore = "another test starts it"]
fn given_up_in_a_process_of_its_own() {
    let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else {
        return bindguard_testing::skipped("no /dev/fuse");
    };
    let scene = Scene::new();
    let container = with_silent_fuse(&scene, &fuse);
    let (mut stale, parent) = stale(&container);
    stale.mount_point = "/deep/etc/conf".into();
    let replacement = Replacement {
        stale: &stale,
        parent: Some(&parent),
        new: None,
    };
    let entered = Entered::enter(
        helper(),
        &container.namespace(),
        vec![replacement],
        Duration::from_millis(200),
        far(),
    )
    .unwrap();
    assert!(matches!(
        entered.call(Action::Open, 0),
        Err(EnterError::Silent(_))
    ));
    let more = || !children().is_empty();
    assert!(more(), "no child hangs");
    // The daemon took the request of the child: not even SIGKILL ends that wait.
    answer_init(&fuse);
    let _ = (&fuse).read(&mut [0; 1 << 17]).unwrap();
    drop(entered.abandon());
    assert!(more(), "no child hangs");
    drop((fuse, container));
    let gone = Instant::now();
    while more() {
        assert!(
            gone.elapsed() < Duration::from_secs(60),
            "{:?} stay",
            children()
        );
    }
}

/// 32 children that hung in the containers of one pod stopped the refreshes of every other pod.
#[test_if(can_run)]
fn children_that_hang_in_one_pod_leave_room_for_others() {
    let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else {
        return bindguard_testing::skipped("no /dev/fuse");
    };
    let pods = (Cgroup::make("pod-hostile"), Cgroup::make("pod-other"));
    let (Some(hostile_pod), Some(other_pod)) = &pods else {
        return;
    };
    let (scene, other_scene) = (Scene::new(), Scene::new());
    let container = with_silent_fuse(&scene, &fuse);
    hostile_pod.add(container.process.pid());
    let other = Container::start(&other_scene.root(), &other_scene.binds());
    other_pod.add(other.process.pid());
    let (mut stale, parent) = stale(&container);
    stale.mount_point = "/deep/etc/conf".into();
    let enter = |container: &Container| {
        let replacement = Replacement {
            stale: &stale,
            parent: Some(&parent),
            new: None,
        };
        let (replacements, patience) = (vec![replacement], Duration::from_millis(200));
        let namespace = container.namespace();
        Entered::enter(helper(), &namespace, replacements, patience, far())
    };
    for count in 0..4 {
        let entered = enter(&container).unwrap();
        assert!(matches!(
            entered.call(Action::Open, 0),
            Err(EnterError::Silent(_))
        ));
        if count == 0 {
            answer_init(&fuse);
            let _ = (&fuse).read(&mut [0; 1 << 17]).unwrap();
        }
    }
    let refused = enter(&container).unwrap_err();
    assert!(matches!(refused, EnterError::NoChild(_)), "{refused:?}");
    assert!(enter(&other).is_ok());
    hostile_pod.add(other.process.pid());
    assert!(enter(&other).is_err());
    drop((fuse, container));
    let gone = Instant::now();
    while enter(&other).is_err() {
        assert!(gone.elapsed() < Duration::from_secs(60), "they stay");
    }
}

/// The pids of the helper process's children, zombies included.
fn children() -> String {
    let helper = helper().pid();
    fs::read_to_string(format!("/proc/{helper}/task/{helper}/children")).unwrap()
}

/// The first answer of a daemon: `fuse_out_header`, then `fuse_init_out` of version 7.31.
pub(crate) fn answer_init(mut fuse: &File) {
    let mut request = vec![0; 1 << 17];
    let _ = fuse.read(&mut request).unwrap();
    let mut answer = [0_u8; 16 + 64];
    answer[0] = 80;
    answer[8..16].copy_from_slice(&request[8..16]);
    (answer[16], answer[20]) = (7, 31);
    // `max_write`
    answer[16 + 21] = 16;
    assert_eq!(fuse.write(&answer).unwrap(), answer.len());
}

/// A container with a FUSE mount whose daemon never answers.
pub(crate) fn with_silent_fuse(scene: &Scene, fuse: &File) -> Container {
    Container::start_keeping(&scene.root(), &scene.binds(), &[fuse.as_fd()], || {
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            fuse.as_raw_fd()
        );
        fs::create_dir("/deep").unwrap();
        mount(
            Some("silent"),
            "/deep",
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
    })
}

#[test_if(can_run)]
fn the_child_holds_nothing_of_the_agent_open() {
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let (read, write) = nix::unistd::pipe().unwrap();
    let (stale, parent) = stale(&container);
    let replacement = Replacement {
        stale: &stale,
        parent: Some(&parent),
        new: None,
    };
    let entered = enter(&container, replacement);
    File::from(write).write_all(b"x").unwrap();
    // With a copy of the write end in the child, this would wait for ever.
    let mut text = String::new();
    File::from(read).read_to_string(&mut text).unwrap();
    assert_eq!(text, "x");
    entered.call(Action::Open, 0).unwrap();
}

#[test_if(can_run)]
fn a_process_that_ended_is_not_entered() {
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(container.process.pid() as i32),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    while container.process.is_alive() {}
    assert!(matches!(
        container.process.mount_namespace(),
        Err(ProcessError::Ended(_))
    ));
    assert!(container.process.mounts().is_err());
}
