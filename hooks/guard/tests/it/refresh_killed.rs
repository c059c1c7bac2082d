//! A release, a refresh of a bound file and a proof that are killed before each of their calls:
//! nothing is lost, nothing is left over, and the next run finishes.

use crate::release_copies::is_without_record;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecView;
use bindguard_guard::prove_container;
use bindguard_guard::refresh::{
    BoundFiles, FileBind, HeldProcess, HelperProcess, HostRoots, REPLACE_TIMEOUT, RefreshAct,
    Refreshed, Release, TuckRecords, refresh_container, release_copies,
};
use bindguard_testing::live::{self, Container};
use bindguard_testing::{mounts_of_host, test_if, unmount};
use nix::libc;

use crate::refresh_files::{self, NO_OTHERS, PLACE, spec};
use crate::refresh_scene::can_run;
use crate::refresh_scene::host_root::{self, can_record};
use crate::refresh_scene::supervised::{
    MOUNT_CALLS, Work, begin, without_return_of, work_killed_after,
};

/// The environment of the programs.
const FOLDER: &str = "BINDGUARD_TEST_FOLDER";
const INIT: &str = "BINDGUARD_TEST_INIT";

/// More calls than each program makes.
const MAX_CALLS: u32 = 300;

/// The calls that read or change files.
const FILE_CALLS: [libc::c_long; 6] = [
    libc::SYS_openat,
    libc::SYS_write,
    libc::SYS_fchmod,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
];

fn work(test: &'static str, folder: &Path, container: &Container) -> Work {
    let init: OsString = container.process.pid().to_string().into();
    Work {
        test,
        environment: vec![(FOLDER, folder.into()), (INIT, init)],
        has_beneath: true,
    }
}

/// The folder and the init of a program's container. `None`, with a printed reason, if no test
/// started the program.
fn program() -> Option<(PathBuf, u32)> {
    let Some(folder) = env::var_os(FOLDER) else {
        bindguard_testing::skipped("it is the program of other tests");
        return None;
    };
    Some((folder.into(), env::var(INIT).unwrap().parse().unwrap()))
}

/// The settings of [`host_root::Scene::for_record`].
fn settings(folder: &Path) -> (PathBuf, Policy, Places) {
    let policy = Policy {
        host_root: Mode::Report,
        ..Policy::default()
    };
    let places = Places {
        kubelet_roots: vec![folder.join("kubelet")],
        ..Places::default()
    };
    (folder.join("bundle"), policy, places)
}

#[test]
#[ignore = "other tests run this program"]
fn releases() {
    let Some((folder, init)) = program() else {
        return;
    };
    let (bundle, policy, places) = settings(&folder);
    let process = HeldProcess::open(init).unwrap();
    let roots = HostRoots::open(&bundle, &policy, &places).unwrap();
    begin(&MOUNT_CALLS);
    let helper = HelperProcess::start().unwrap();
    let spec = live::spec_of(None);
    let extent = Release::Unmount;
    release_copies(&helper, &process, Some(&spec), &roots, |_, _| true, extent).unwrap();
}

#[test_if(can_record)]
fn a_release_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    let mut was_killed_before_umount = 0;
    for calls in 0..MAX_CALLS {
        let (scene, container) = host_root::Scene::recorded(|| {});
        unmount(&scene.disk());
        let (mounts, host) = (container.mounts(), mounts_of_host());
        let release = work("refresh_killed::releases", scene.host.path(), &container);
        let has_ended = work_killed_after(calls, &release);
        let is_there = !container.mounts_at("/host/disk").is_empty();
        was_killed_before_umount += u32::from(is_there);
        assert_eq!(container.mounts(), mounts - usize::from(!is_there));
        let released = scene.release(&container, Release::Unmount);
        assert_eq!(released.len(), usize::from(is_there), "{released:?}");
        assert!(container.mounts_at("/host/disk").is_empty(), "{released:?}");
        assert_eq!((container.mounts(), mounts_of_host()), (mounts - 1, host));
        if has_ended {
            assert!(was_killed_before_umount > 1);
            return;
        }
    }
    panic!("the release makes new calls without an end");
}

#[test]
#[ignore = "other tests run this program"]
fn refreshes_a_file() {
    if let Some((folder, init)) = program() {
        refresh_file(&folder, init);
    }
}

fn refresh_file(folder: &Path, init: u32) -> Refreshed {
    let process = HeldProcess::open(init).unwrap();
    let spec = spec(&[(&folder.join("conf/app.conf"), PLACE)]);
    let binds = FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap());
    let (files, errors) = BoundFiles::open(binds, init, &NO_OTHERS);
    assert!(errors.is_empty(), "{errors:?}");
    let (act, records) = (
        RefreshAct::Replace(Notify::None),
        TuckRecords::at(&folder.join("tucks")),
    );
    begin(&MOUNT_CALLS);
    let helper = HelperProcess::start().unwrap();
    let spec = live::spec_of(None);
    refresh_container(
        &helper,
        REPLACE_TIMEOUT,
        &process,
        Some(&spec),
        &[&files],
        act,
        &records,
    )
    .unwrap()
}

#[test]
#[ignore = "other tests run this program"]
fn refreshes_a_file_without_a_detach() {
    let Some((folder, init)) = program() else {
        return;
    };
    let refreshed = refresh_file(&folder, init);
    let [only] = &refreshed.mounts[..] else {
        panic!("{refreshed:?}");
    };
    assert!(
        matches!(&only.outcome, MountResult::Failed { error } if error.starts_with("the container did not answer within ")),
        "{refreshed:?}"
    );
    assert!(refreshed.abandoned.is_some(), "{refreshed:?}");
}

/// The old mount is still in the table.
#[test_if(can_run)]
fn a_detach_that_hangs_before_it_begins_is_a_failure_and_finished_later() {
    let scene = refresh_files::Scene::new();
    let container = scene.start();
    let before = container.mounts();
    fs::write(scene.at("next"), "1").unwrap();
    fs::rename(scene.at("next"), scene.at("app.conf")).unwrap();
    let test = "refresh_killed::refreshes_a_file_without_a_detach";
    let refresh = work(test, scene.folder.path(), &container);
    without_return_of(libc::SYS_umount2, &refresh);
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("0"));
    assert_eq!(container.mounts(), before + 1);
    let next = scene.refresh(&container);
    assert_eq!(next.replaced(), 1, "{next:?}");
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("1"));
    assert_eq!(container.mounts(), before);
}

#[test_if(can_run)]
fn a_refresh_of_a_file_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    for has_beneath in [false, true] {
        let scene = refresh_files::Scene::new();
        let container = scene.start().reading();
        let look = || {
            let propagation = ["/", PLACE].map(|place| container.propagation_at(place));
            (container.mounts(), propagation)
        };
        let (before, mut left_old) = (look(), 0);
        let host = mounts_of_host();
        for calls in 0..=MAX_CALLS {
            assert!(calls < MAX_CALLS, "it makes new calls without an end");
            let content = (calls + 1).to_string();
            fs::write(scene.at("next"), &content).unwrap();
            fs::rename(scene.at("next"), scene.at("app.conf")).unwrap();
            let refresh = Work {
                has_beneath,
                ..work(
                    "refresh_killed::refreshes_a_file",
                    scene.folder.path(),
                    &container,
                )
            };
            let has_ended = work_killed_after(calls, &refresh);
            let read = || container.read("etc/app.conf");
            let shown = read();
            assert!(
                [Some(calls.to_string()), Some(content.clone())].contains(&shown),
                "after {calls} calls: {shown:?}"
            );
            left_old += u32::from(shown.as_ref() != Some(&content));
            let next = scene.refresh(&container);
            assert!(next.is_current(), "after {calls} calls: {next:?}");
            assert_eq!(look(), before, "after {calls} calls");
            assert_eq!(read(), Some(content));
            assert_eq!(mounts_of_host(), host);
            if has_ended {
                break;
            }
        }
        assert!(left_old > 1, "no kill was in a refresh");
        let records = fs::read_dir(scene.folder.path().join("tucks"));
        assert_eq!(records.map_or(0, Iterator::count), 0, "records are left");
        let seen = container.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }
}

#[test]
#[ignore = "other tests run this program"]
fn proves() {
    let Some((folder, init)) = program() else {
        return;
    };
    let (bundle, policy, places) = settings(&folder);
    begin(&FILE_CALLS);
    let proved = prove_container(&bundle, init, &policy, &places);
    assert!(proved.report.problems.is_empty(), "{proved:?}");
}

/// The proof is repeated if the runtime's `start` is repeated.
#[test_if(can_record)]
fn a_proof_that_is_killed_before_each_call_leaves_a_whole_record() {
    let mut without_record = 0;
    for calls in 0..MAX_CALLS {
        let scene = host_root::Scene::for_record();
        let container = scene.start_unproved();
        let list = || {
            let entries = fs::read_dir(scene.bundle()).unwrap();
            let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name()).collect();
            names.sort_unstable();
            names
        };
        let (mounts, files) = (container.mounts(), list());
        let prove = work("refresh_killed::proves", scene.host.path(), &container);
        let has_ended = work_killed_after(calls, &prove);
        unmount(&scene.disk());
        let looked = scene.release(&container, Release::Look);
        without_record += match &looked[..] {
            [only] => u32::from(is_without_record(only)),
            others => panic!("after {calls} calls: {others:?}"),
        };
        scene.prove(&container);
        assert_eq!(list(), files, "after {calls} calls");
        let released = scene.release(&container, Release::Unmount);
        assert!(container.mounts_at("/host/disk").is_empty(), "{released:?}");
        assert_eq!(container.mounts(), mounts - 1);
        if has_ended {
            assert!(without_record > 1);
            return;
        }
    }
    panic!("the proof makes new calls without an end");
}

#[test]
#[ignore = "other tests run this program"]
fn refreshes_a_host_root() {
    let Some((folder, init)) = program() else {
        return;
    };
    let (bundle, _, places) = settings(&folder);
    let process = HeldProcess::open(init).unwrap();
    let roots = HostRoots::open(&bundle, &Policy::default(), &places).unwrap();
    let records = TuckRecords::at(&folder.join("tucks"));
    begin(&MOUNT_CALLS);
    let helper = HelperProcess::start().unwrap();
    let (spec, act) = (live::spec_of(None), RefreshAct::Replace(Notify::None));
    refresh_container(
        &helper,
        REPLACE_TIMEOUT,
        &process,
        Some(&spec),
        &[&roots],
        act,
        &records,
    )
    .unwrap();
}

/// No record says which of two mounts of the host's root a refresh made.
#[test_if(can_run)]
fn a_refresh_of_a_host_root_that_is_killed_before_each_call_is_finished_by_the_next_one() {
    let mut was_killed_between = 0;
    for calls in 0..MAX_CALLS {
        let scene = host_root::Scene::new();
        let container = scene.start();
        let (mounts, host) = (container.mounts(), mounts_of_host());
        let test = "refresh_killed::refreshes_a_host_root";
        let refresh = work(test, scene.host.path(), &container);
        let has_ended = work_killed_after(calls, &refresh);
        was_killed_between += u32::from(container.mounts_at("/host").len() > 1);
        let next = scene.refresh(&container);
        assert!(next.is_current(), "after {calls} calls: {next:?}");
        let at = container.mounts_at("/host");
        assert_eq!(at.len(), 1, "after {calls} calls: {at:?}");
        assert_eq!(container.propagation_at("/host"), ["master"]);
        let now = (container.mounts(), mounts_of_host());
        assert_eq!(now, (mounts, host), "after {calls} calls");
        if has_ended {
            assert!(was_killed_between > 0);
            return;
        }
    }
    panic!("the refresh makes new calls without an end");
}
