//! On a kernel without a call of Linux 5.14 every create goes on, and one line refuses its repairs.
//! seccomp(2) answers in the kernel's stead.

use std::fs;
use std::path::Path;
use std::thread;

use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    PodVolumes, REPLACE_TIMEOUT, RefreshAct, VolumeOfPod, rebind_volume, refresh_container,
};
use bindguard_guard::{Attempt, admit};
use bindguard_testing::{Pod, deny_call, helper, mount_of, own_namespace, test_if};
use nix::errno::Errno;
use nix::libc::{self, c_long};

use crate::refresh_scene::{Scene, can_run};

const REQUIRED: &str = "require Linux 5.14 or newer";

const CALLS: [(c_long, Errno); 6] = [
    (libc::SYS_openat2, Errno::ENOSYS),
    (libc::SYS_open_tree, Errno::ENOSYS),
    (libc::SYS_move_mount, Errno::ENOSYS),
    (libc::SYS_mount_setattr, Errno::ENOSYS),
    (libc::SYS_close_range, Errno::ENOSYS),
    // older seccomp profiles of Docker
    (libc::SYS_close_range, Errno::EPERM),
];

/// Runs `work` in a thread for which the kernel has no such call.
fn without<T: Send>((call, errno): (c_long, Errno), work: impl FnOnce() -> T + Send) -> T {
    let filtered = || {
        deny_call(call, errno);
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

#[test_if(own_namespace)]
fn a_create_goes_on_unchanged_with_one_line() {
    let pod = Pod::with_keys(3);
    pod.write_spec(&[mount_of(Path::new("/"), "/host", "rprivate")]);
    pod.update(1);
    let (spec, policy) = (fs::read(pod.config()).unwrap(), pod.policy());
    let strict = Policy {
        unmounted_volumes: Alarm::Refuse,
        ..policy
    };
    for call in CALLS {
        let admitted =
            |policy: &Policy| admit(&pod.bundle(), policy, &pod.places(), Attempt::First);
        let (lax, strict) = without(call, || (admitted(&policy), admitted(&strict)));
        let [problem] = &lax.report.problems[..] else {
            panic!("{call:?}: {:?}", lax.report.problems);
        };
        assert!(problem.contains(REQUIRED), "{call:?}: {problem}");
        assert!(lax.report.binds.is_empty() && lax.refusal.is_none());
        assert!(!lax.is_provable && !lax.worth_another_try);
        // As for a spec that cannot be read.
        assert!(strict.refusal.unwrap().contains(REQUIRED));
        assert_eq!(fs::read(pod.config()).unwrap(), spec);
        assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "0", "{call:?}");
    }
    admit(&pod.bundle(), &policy, &pod.places(), Attempt::First);
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "1");
}

#[test_if(can_run)]
fn the_host_and_running_containers_are_left_as_they_are() {
    let scene = Scene::with_keys(1);
    let container = scene.start(1);
    scene.pod.update(1);
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    let refresh = |act| {
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&volumes],
            act,
            &scene.records(),
        )
    };
    let directory = scene.pod.directory();
    let volume = VolumeOfPod {
        kubelet_root: directory.ancestors().nth(2).unwrap().to_owned(),
        pod_uid: directory.file_name().unwrap().to_str().unwrap().to_owned(),
        volume: "conf".to_owned(),
    };
    for call in CALLS {
        let (refused, report) = without(call, || {
            let refused = refresh(RefreshAct::Replace(Notify::None)).unwrap_err();
            (refused, rebind_volume(&volume, &scene.pod.policy()))
        });
        assert!(refused.to_string().contains(REQUIRED), "{refused}");
        let [problem] = &report.problems[..] else {
            panic!("{:?}", report.problems);
        };
        assert!(problem.contains(REQUIRED) && report.binds.is_empty());
    }
    let found = without((libc::SYS_mount_setattr, Errno::ENOSYS), || {
        refresh(RefreshAct::Look)
    });
    assert_eq!(
        found.unwrap().mounts.len(),
        1,
        "a survey finds the old file"
    );
    assert_eq!(container.read("etc/app/0").as_deref(), Some("0"));
    assert!(
        refresh(RefreshAct::Replace(Notify::None))
            .unwrap()
            .is_current()
    );
}
