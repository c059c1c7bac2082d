//! Sources whose daemon is dead or never answers (containerd#10828): told, and never waited for.
//!
//! The daemon is the test itself: it opens `/dev/fuse`, mounts, and answers nothing. See fuse(4).

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod pod;

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::Outcome;
use bindguard_guard::{Attempt, admit, check_bundle};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use pod::{Pod, mount_of, own_namespace};

/// A FUSE mount that nobody answers for. Dropping its device is the death of its daemon.
struct Fuse {
    folder: tempfile::TempDir,
    device: Option<File>,
}

impl Fuse {
    fn mounted() -> Option<Self> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
            pod::skipped("no /dev/fuse here");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        mount(Some("silent"), folder.path(), Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        Some(Self { folder, device: Some(device) })
    }

    fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.device = None;
        umount2(self.folder.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

/// A pod whose second bind is of a FUSE mount that lost its daemon.
fn pod_on_a_dead_daemon() -> Option<(Fuse, Pod)> {
    let mut fuse = Fuse::mounted()?;
    fuse.device = None;
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(&fuse.path(), "/data", "rprivate")]);
    Some((fuse, pod))
}

/// The verdict and the reason of the bind at this position.
fn told(pod: &Pod, policy: &Policy, position: usize) -> (&'static str, String) {
    let report = admit(&pod.bundle(), policy, Attempt::First).report;
    (report.binds[position].verdict, report.binds[position].reason.clone().unwrap_or_default())
}

#[test]
fn a_source_that_never_answers_is_told_in_time_and_the_others_are_mended() {
    if !own_namespace() {
        return;
    }
    let Some(mut fuse) = Fuse::mounted() else { return };
    let pod = Pod::with_keys(1);
    pod.write_spec(&[
        mount_of(&fuse.path(), "/root", "rprivate"),
        mount_of(&fuse.path().join("below"), "/below", "rprivate"),
    ]);
    pod.update(1);
    // A request that the daemon took and never answers: from here on SIGKILL does not reach who waits for it.
    let mut taken = [0; 8192];
    assert!(fuse.device.as_mut().unwrap().read(&mut taken).unwrap() > 0);

    let start = Instant::now();
    let report = admit(&pod.bundle(), &pod.policy(), Attempt::First).report;
    assert!(start.elapsed() < Duration::from_millis(1900), "{:?}", start.elapsed());
    let verdicts: Vec<_> = report.binds.iter().map(|bind| bind.verdict).collect();
    assert_eq!(verdicts, ["stale", "dead"], "{report:?}");
    assert_eq!(report.binds[0].outcome, Some(Outcome::Rebound { tries: 1 }));
    assert!(report.binds[1].reason.as_ref().unwrap().contains("did not answer within 700 ms"));
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "1");
}

#[test]
fn a_dead_daemon_is_told_by_its_answer() {
    if !own_namespace() {
        return;
    }
    let Some((_fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let (verdict, reason) = told(&pod, &pod.policy(), 1);
    assert_eq!(verdict, "dead");
    // In its words: "Transport endpoint is not connected", from Linux 7 on "Connection refused".
    assert!(reason.contains("it answers: ") && reason.to_lowercase().contains("connect"), "{reason}");
}

#[test]
fn a_volume_of_a_dead_daemon_is_dead_and_not_just_mounted() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let volume = pod.directory().join("volumes/kubernetes.io~csi/pvc-1/mount");
    fs::create_dir_all(&volume).unwrap();
    pod::bind(&fuse.path(), &volume);
    pod.write_spec(&[mount_of(&volume, "/data", "rprivate")]);
    assert_eq!(told(&pod, &pod.policy(), 1).0, "dead");
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    assert_eq!(told(&pod, &pod.policy(), 1).0, "unmounted");
}

#[test]
fn policy_refuses_a_dead_source_or_does_not_look() {
    if !own_namespace() {
        return;
    }
    let Some((fuse, pod)) = pod_on_a_dead_daemon() else { return };
    let refuse = Policy { dead_sources: Alarm::Refuse, ..pod.policy() };
    let refusal = admit(&pod.bundle(), &refuse, Attempt::First).refusal.unwrap();
    assert!(refusal.contains(fuse.path().to_str().unwrap()) && refusal.contains("is dead"), "{refusal}");
    // A refused container gets nothing else done, and a look says so.
    pod.update(1);
    let outcomes: Vec<_> = check_bundle(&pod.bundle(), &refuse).binds.into_iter().map(|bind| bind.outcome).collect();
    assert_eq!(outcomes, [None, Some(Outcome::WouldBe { done: "refused" })]);
    let off = Policy { dead_sources: Alarm::Off, ..pod.policy() };
    let admission = admit(&pod.bundle(), &off, Attempt::First);
    assert_eq!((admission.refusal, admission.report.foreign), (None, 1));
}
