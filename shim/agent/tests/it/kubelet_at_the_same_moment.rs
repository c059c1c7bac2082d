//! The agent and the kubelet work on a subpath at the same moment: exactly one mount is left, or no
//! mount after the pod's end.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use bindguard_testing::{Pod, bind, own_namespace, rounds, test_if};
use nix::mount::{MntFlags, umount2};

use crate::agent::{Agent, LAST_CHECK, until};

fn config(pod: &Pod) -> String {
    format!(
        "kubelet.roots = ['{}']\n",
        pod.places().kubelet_roots[0].display()
    )
}

fn mounts_at(path: &Path) -> usize {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table
        .lines()
        .filter(|line| line.split(' ').nth(4) == path.to_str())
        .count()
}

/// The kubelet before it starts a container again (`doBindSubPath`, 1.19 and newer): the kubelet
/// unmounts a mount of a different file, and binds the current file. False if a step fails: the
/// kubelet tries again.
fn kubelet_restarts_a_container(pod: &Pod) -> bool {
    let Ok(current) = File::open(pod.volume().join("..data/0")) else {
        return false;
    };
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (Ok(current_file), Ok(bound)) = (current.metadata(), fs::metadata(pod.subpath(0))) else {
        return false;
    };
    if mounts_at(&pod.subpath(0)) > 0 {
        if identity(current_file) == identity(bound) {
            return true;
        }
        if umount2(&pod.subpath(0), MntFlags::empty()).is_err() {
            return false;
        }
    }
    let source = format!("/proc/self/fd/{}", current.as_raw_fd());
    nix::mount::mount(
        Some(source.as_str()),
        &pod.subpath(0),
        None::<&str>,
        nix::mount::MsFlags::MS_BIND,
        None::<&str>,
    )
    .is_ok()
}

#[test_if(own_namespace)]
fn restarts_during_updates_leave_one_mount_each() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &config(&pod));
    for number in 1..=rounds(200, 1000) {
        pod.update(number);
        thread::sleep(Duration::from_micros(number % 100 * 20));
        until("the kubelet restarts the container", || {
            kubelet_restarts_a_container(&pod)
        });
        let content = || fs::read_to_string(pod.subpath(0)).unwrap_or_default();
        until("the subpath is current", || content() == number.to_string());
        until("one mount is left", || mounts_at(&pod.subpath(0)) == 1);
    }
    assert_eq!(agent.figure("bindguard_agent_thread_restarts_total"), 0.0);
}

/// The kubelet deletes a pod at the very moment of an update: nothing stays mounted, and nothing
/// comes back.
#[test_if(own_namespace)]
fn pods_that_are_deleted_during_an_update_leave_nothing() {
    let pod = Pod::with_keys(1);
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &config(&pod));
    // Parallel tests on this machine add and remove mounts.
    let pods = pod
        .directory()
        .parent()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    let mounts = || {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        table.lines().filter(|line| line.contains(&pods)).count()
    };
    let before = mounts();
    for round in 0..rounds(300, 1000) {
        let directory = pod.directory().with_file_name(format!("uid-gone-{round}"));
        let volume = directory.join("volumes/kubernetes.io~configmap/conf");
        let subpath = directory.join("volume-subpaths/conf/app/0");
        fs::create_dir_all(&volume).unwrap();
        let write = |number: u32| {
            let timestamp = format!("..2026_11_21_05_10_00.{number}");
            fs::create_dir(volume.join(&timestamp)).unwrap();
            fs::write(volume.join(&timestamp).join("key"), number.to_string()).unwrap();
            std::os::unix::fs::symlink(&timestamp, volume.join("..data_tmp")).unwrap();
            fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        };
        write(1);
        fs::create_dir_all(subpath.parent().unwrap()).unwrap();
        fs::write(&subpath, "").unwrap();
        bind(&volume.join("..data/key"), &subpath);
        write(2);
        thread::sleep(Duration::from_micros(round % 300 * 10));
        // As the kubelet: umount until nothing is mounted, then remove everything. It repeats what
        // fails.
        until("the pod's folder is removed", || {
            while mounts_at(&subpath) > 0 && umount2(&subpath, MntFlags::empty()).is_ok() {}
            mounts_at(&subpath) == 0 && fs::remove_dir_all(&directory).is_ok()
        });
    }
    agent.until_idle(LAST_CHECK);
    assert_eq!(mounts(), before);
    let left: Vec<_> = fs::read_dir(pod.directory().parent().unwrap())
        .unwrap()
        .flatten()
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(agent.figure("bindguard_agent_thread_restarts_total"), 0.0);
}
