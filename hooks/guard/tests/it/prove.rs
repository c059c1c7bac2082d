//! The comparison of a new container's mounts with the record of its admission.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use bindguard_core::policy::{Alarm, Policy};
use bindguard_guard::{Admission, Attempt, Proved, admit, prove_container};
use bindguard_sys::enter::HeldProcess;
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{Folder, Pod, mount_of, own_namespace, test_if};

/// A pod whose container has `file` of a folder of the host at `/etc/file`.
struct Scene {
    pod: Pod,
    host: Folder,
    root: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            pod: Pod::with_keys(0),
            host: Folder::new(),
            root: tempfile::tempdir().unwrap(),
        };
        fs::write(scene.file(), "1").unwrap();
        let bind = mount_of(&scene.file(), "/etc/file", "rprivate");
        scene.pod.write_spec(&[bind]);
        scene
    }

    fn file(&self) -> PathBuf {
        self.host.path().join("file")
    }

    fn record(&self) -> PathBuf {
        self.pod.bundle().join("bindguard-binds.json")
    }

    fn policy(&self) -> Policy {
        Policy {
            proof: Alarm::Refuse,
            ..self.pod.policy()
        }
    }

    fn admit(&self) -> Admission {
        let places = self.pod.places();
        admit(&self.pod.bundle(), &self.policy(), &places, Attempt::First)
    }

    fn start(&self) -> Container {
        Container::start(self.root.path(), &[Inside::of(self.file(), "etc/file")])
    }

    fn prove(&self, pid: u32) -> Proved {
        let places = self.pod.places();
        prove_container(&self.pod.bundle(), pid, &self.policy(), &places)
    }
}

/// The file is moved aside between the runtime's mount and the comparison, as a log is rotated.
/// The mount then shows the path of the moved file.
#[test_if(own_namespace)]
fn a_source_that_was_moved_since_the_mount_is_no_difference() {
    let scene = Scene::new();
    assert!(scene.admit().is_provable);
    let container = scene.start();
    let proved = scene.prove(container.process.pid());
    assert!(
        proved.refusal.is_none() && proved.report.unproven == 0,
        "{proved:?}"
    );
    fs::rename(scene.file(), scene.host.path().join("file.1")).unwrap();
    fs::write(scene.file(), "2").unwrap();
    let proved = scene.prove(container.process.pid());
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert!(proved.report.binds.is_empty(), "{proved:?}");
    assert_eq!(proved.report.unproven, 1);
}

/// A process with write access to the source's folder replaces the source by a symlink right before
/// the runtime's mount, and leaves the symlink there. A file that is replaced at the same path is no
/// difference.
#[test_if(own_namespace)]
fn a_source_that_became_a_symlink_is_wrong() {
    for becomes_symlink in [false, true] {
        let scene = Scene::new();
        assert!(scene.admit().is_provable);
        let secret = scene.root.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        fs::rename(scene.file(), scene.host.path().join("file.1")).unwrap();
        if becomes_symlink {
            symlink(&secret, scene.file()).unwrap();
        } else {
            fs::write(scene.file(), "2").unwrap();
        }
        let container = scene.start();
        let proved = scene.prove(container.process.pid());
        let expected = (becomes_symlink, 0);
        let found = (proved.refusal.is_some(), proved.report.unproven);
        assert_eq!(found, expected, "{proved:?}");
    }
}

#[test_if(own_namespace)]
fn policy_refuses_a_container_that_cannot_be_compared() {
    let scene = Scene::new();
    assert!(scene.admit().is_provable);
    let container = scene.start();
    fs::write(scene.record(), "{\"binds\":[").unwrap();
    let proved = scene.prove(container.process.pid());
    assert_eq!(proved.report.problems.len(), 1, "{proved:?}");
    assert!(proved.refusal.is_some(), "{proved:?}");
    fs::remove_file(scene.record()).unwrap();
    assert!(scene.prove(container.process.pid()).refusal.is_some());
    let places = scene.pod.places();
    let proved = prove_container(
        &scene.pod.bundle(),
        container.process.pid(),
        &scene.pod.policy(),
        &places,
    );
    assert!(proved.refusal.is_none(), "policy reports");
}

/// As with the stock shim, the create of a container whose init was killed meanwhile succeeds.
#[test_if(own_namespace)]
fn a_container_that_has_ended_is_not_refused() {
    let scene = Scene::new();
    assert!(scene.admit().is_provable);
    let mut child = Command::new("true").spawn().unwrap();
    let process = HeldProcess::open(child.id()).unwrap();
    assert!(process.ends_within(Duration::from_secs(60)));
    let is_nothing = |proved: Proved| proved.refusal.is_none() && proved.report.problems.is_empty();
    assert!(is_nothing(scene.prove(child.id())), "a zombie");
    child.wait().unwrap();
    assert!(is_nothing(scene.prove(child.id())));
}

#[test_if(own_namespace)]
fn policy_refuses_a_container_whose_record_cannot_be_written() {
    let scene = Scene::new();
    fs::create_dir(scene.record()).unwrap();
    let admission = scene.admit();
    assert!(admission.refusal.is_some(), "{admission:?}");
    let places = scene.pod.places();
    let policy = scene.pod.policy();
    let reported = admit(&scene.pod.bundle(), &policy, &places, Attempt::First);
    assert!(reported.refusal.is_none() && !reported.is_provable);
    assert_eq!(reported.report.unproven, 1, "{reported:?}");
    assert_eq!(reported.report.problems.len(), 1, "{reported:?}");
}

/// A process that waits until its standard input ends.
#[test]
#[ignore = "a test starts it"]
fn waits() {
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

/// gVisor's sandbox has a `/proc`, and none of the container's binds.
#[test_if(own_namespace)]
fn a_sandbox_proves_nothing() {
    let scene = Scene::new();
    assert!(scene.admit().is_provable);
    let [program, link] = ["runsc", "exe"].map(|name| scene.host.path().join(name));
    let mut copy = Command::new("cp");
    copy.arg(std::env::current_exe().unwrap()).arg(&program);
    assert!(copy.status().unwrap().success());
    symlink(&program, &link).unwrap();
    let mut gvisor = Command::new(link);
    gvisor
        .args(["--ignored", "--exact", "prove::waits"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    // SAFETY: a single syscall, which uses neither the heap nor a lock.
    unsafe { gvisor.pre_exec(|| Ok(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?)) };
    let mut sandbox = gvisor.spawn().unwrap();
    let proved = scene.prove(sandbox.id());
    sandbox.kill().unwrap();
    sandbox.wait().unwrap();
    assert!(proved.refusal.is_none(), "{proved:?}");
    assert_eq!(
        (proved.report.unproven, proved.report.binds.len()),
        (1, 0),
        "{proved:?}"
    );
}
