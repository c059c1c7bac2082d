//! A volume whose daemon is silent for hours: a kubelet tries the create of its container again and
//! again, and each guard is a process of its own.

use std::env;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_guard::{Attempt, admit};
use bindguard_testing::{Fuse, Pod, bind, mount_of, own_namespace, skipped, test_if};

/// The environment of the program.
const BUNDLE: &str = "BINDGUARD_TEST_BUNDLE";
const KUBELET: &str = "BINDGUARD_TEST_KUBELET";

/// The share of a pod.
const MAX_IN_POD: usize = 4;

const CREATES: usize = 8;

#[test]
#[ignore = "another test runs this program"]
fn creates() {
    let Some(bundle) = env::var_os(BUNDLE) else {
        skipped("it is the program of another test");
        return;
    };
    let policy = Policy {
        dead_sources: Alarm::Refuse,
        ..Policy::default()
    };
    let places = Places {
        kubelet_roots: vec![env::var_os(KUBELET).unwrap().into()],
        ..Places::default()
    };
    let admission = admit(Path::new(&bundle), &policy, &places, Attempt::First);
    let refusal = admission.refusal.unwrap_or_default();
    assert!(refusal.contains("is dead"), "{:?}", admission.report);
}

fn create(pod: &Pod) {
    let mut program = Command::new("/proc/self/exe");
    program
        .args([
            "--exact",
            "silent_sources_of_many_creates::creates",
            "--ignored",
        ])
        .env(BUNDLE, pod.bundle())
        .env(KUBELET, &pod.places().kubelet_roots[0]);
    let ended = program.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

/// The filesystem of a daemon that takes all requests, as a volume of the pod at this path.
fn silent_volume(pod: &Pod) -> Option<(Fuse, PathBuf)> {
    let mut fuse = Fuse::mounted()?;
    fuse.begin();
    let mut device = fuse.device.as_ref()?.try_clone().unwrap();
    thread::spawn(move || while device.read(&mut vec![0; 1 << 17]).is_ok() {});
    let volume = pod.directory().join("volumes/kubernetes.io~csi/pv/mount");
    fs::create_dir_all(&volume).unwrap();
    bind(&fuse.path(), &volume);
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    Some((fuse, volume))
}

/// The processes in the mount namespace of this test's thread. The test's main thread is in another
/// mount namespace.
fn left_over() -> usize {
    let namespace_in = |folder: &Path| fs::read_link(folder.join("ns/mnt")).ok();
    let own = namespace_in("/proc/thread-self".as_ref());
    let names = fs::read_dir("/proc").unwrap().flatten();
    let pids = names.filter(|it| it.file_name().to_string_lossy().parse::<u32>().is_ok());
    pids.filter(|pid| namespace_in(&pid.path()) == own).count()
}

/// Each create left a process that not even SIGKILL ends.
#[test_if(own_namespace)]
fn creates_on_a_silent_volume_are_refused_and_leave_few_processes() {
    let pod = Pod::with_keys(1);
    let Some((_fuse, _)) = silent_volume(&pod) else {
        return;
    };
    let mut left = Vec::new();
    for _ in 0..CREATES {
        create(&pod);
        left.push(left_over());
    }
    assert!(left.iter().all(|count| *count <= MAX_IN_POD), "{left:?}");
    assert!(left[0] > 0, "no probe hangs: {left:?}");
}
