//! A container that answers slowly, or has thousands of mounts: its refresh ends in time, and is
//! finished later.

use bindguard_core::report::MountResult;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::SubpathInContainer;
use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    CurrentFiles, MAX_MOUNTS_OF_FILE, PodVolumes, REPLACE_TIMEOUT, RefreshAct, Refreshed,
    refresh_container,
};
use bindguard_sys::Handle;
use bindguard_sys::replace::CloneSettings;
use bindguard_testing::helper;
use bindguard_testing::hostile_process::{HostileProcess, Step, errno, slow_fuse};
use nix::libc;
use nix::mount::{MsFlags, mount};

use crate::refresh_scene::{Scene, can_run};

/// The descriptor of the FUSE device, which the process inherits.
const DEVICE: i32 = 610;
const DELAY: Duration = Duration::from_millis(600);
const FIRST_TURN: Duration = Duration::from_millis(300);

const MOUNT_SLOW: usize = 0;
const BIND_THOUSANDS: usize = 1;
const STEPS: [Step; 2] = [
    || {
        fs::create_dir("/slow").unwrap();
        let options = format!("fd={DEVICE},rootmode=40000,user_id=0,group_id=0");
        let mounted = mount(
            Some("slow"),
            "/slow",
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        );
        errno(mounted.and_then(|()| bind_to("/slow/file")))
    },
    || {
        fs::create_dir("/many").unwrap();
        for number in 0..5000 {
            let place = format!("/many/{number}");
            fs::write(&place, "").unwrap();
            bind_to(&place).unwrap();
        }
        0
    },
];

fn bind_to(place: &str) -> nix::Result<()> {
    mount(
        Some("/etc/app/0"),
        place,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
}

fn refresh(scene: &Scene, container: &HostileProcess, within: Option<Duration>) -> Refreshed {
    scene.rebind();
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let spec = SpecUsers::from_spec(br#"{"mounts":[{"destination":"/etc/app/0"}]}"#).unwrap();
    let act = RefreshAct::Replace(Notify::None);
    let (process, records) = (&container.process, scene.records());
    match within {
        Some(time) => refresh_container(
            helper(),
            time,
            process,
            Some(&spec),
            &[&volumes],
            act,
            &records,
        )
        .unwrap(),
        None => refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            process,
            Some(&spec),
            &[&volumes],
            act,
            &records,
        )
        .unwrap(),
    }
}

/// A child of a parallel test would keep this test's pipes open.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_container_with_slow_answers_ends_its_first_turn_in_time_and_is_current_after_the_last() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
        eprintln!("SKIPPED: no /dev/fuse");
        return;
    };
    // SAFETY: no value owns this number. The copy stays open until the test ends.
    assert_eq!(unsafe { libc::dup2(device.as_raw_fd(), DEVICE) }, DEVICE);
    let slow_down = slow_fuse::serve_after(Arc::new(device), DELAY);
    let scene = Scene::with_keys(1);
    let mut container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    assert_eq!(container.does(MOUNT_SLOW), 0);
    slow_down();
    scene.pod.update_keeping_old(1);
    let start = Instant::now();
    let first = refresh(&scene, &container, Some(FIRST_TURN));
    // A turn that waited for the slow answer would have its child's result.
    assert!(!first.is_current(), "{first:?}");
    let child = first.abandoned.expect("its child waits in the container");
    while child.is_alive() {
        assert!(start.elapsed() < Duration::from_secs(60), "the child stays");
        sleep(Duration::from_millis(10));
    }
    // A busy machine makes an answer so late that the refresh gives it up; the agent repeats that.
    loop {
        let next = refresh(&scene, &container, None);
        if next.is_current() {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{next:?}");
    }
    for place in ["etc/app/0", "slow/file"] {
        let inside = format!("/proc/{}/root/{place}", container.process.pid());
        assert_eq!(fs::read_to_string(inside).unwrap(), "1", "{place}");
    }
}

/// Files that change whenever a refresh has finished a round.
struct Restless<'a> {
    files: PodVolumes,
    scene: &'a Scene,
    looks: AtomicU64,
}

impl CurrentFiles for Restless<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let look = self.looks.fetch_add(1, Ordering::Relaxed);
        self.scene.pod.update_keeping_old(look + 1);
        if look > 0 {
            // The time is over after the first round.
            sleep(FIRST_TURN);
        }
        self.files.shown_in(table)
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        self.files.open_current(stale)
    }
}

/// On a busy node the last turn may end while the volume still changes. A refresh follows each
/// change, so a restless volume is no failure.
#[test]
fn a_volume_that_changes_until_the_time_is_over_is_restless() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    let files = Restless {
        files: PodVolumes::open(&scene.pod.directory()).unwrap(),
        scene: &scene,
        looks: AtomicU64::new(0),
    };
    let spec = SpecUsers::from_spec(br#"{"mounts":[{"destination":"/etc/app/0"}]}"#).unwrap();
    let act = RefreshAct::Replace(Notify::None);
    let (process, records) = (&container.process, scene.records());
    let refreshed = refresh_container(
        helper(),
        FIRST_TURN,
        process,
        Some(&spec),
        &[&files],
        act,
        &records,
    )
    .unwrap();
    let outcomes: Vec<_> = refreshed.mounts.iter().map(|it| &it.outcome).collect();
    assert_eq!(outcomes, [&MountResult::Restless]);
    assert!(refreshed.is_out_of_time);
}

#[test]
fn of_thousands_of_mounts_of_a_file_those_of_the_runtime_are_refreshed() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let scene = Scene::with_keys(1);
    let mut container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    assert_eq!(container.does(BIND_THOUSANDS), 0);
    for version in 1..=3 {
        scene.pod.update_keeping_old(version);
        let refreshed = refresh(&scene, &container, None);
        let expected = (MAX_MOUNTS_OF_FILE, 5001 - MAX_MOUNTS_OF_FILE, true);
        assert_eq!(
            (
                refreshed.replaced(),
                refreshed.overlooked,
                refreshed.is_current()
            ),
            expected
        );
        let inside = format!("/proc/{}/root/etc/app/0", container.process.pid());
        assert_eq!(fs::read_to_string(inside).unwrap(), version.to_string());
    }
}
