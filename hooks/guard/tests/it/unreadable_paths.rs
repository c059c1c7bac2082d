//! An unreadable source is unknown, and nothing else: not unmounted, not stale, and no reason to
//! refuse.

use std::fs;
use std::path::Path;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, FailedRepair, Policy, Vanished};
use bindguard_guard::{Attempt, admit};
use serde_json::json;

/// ENAMETOOLONG, which even root gets.
fn too_long() -> String {
    "x".repeat(256)
}

fn verdict_and_refusal(source: &Path, kubelet: &Path) -> (&'static str, bool) {
    let bundle = tempfile::tempdir().unwrap();
    let mount =
        json!({"type": "bind", "source": source, "destination": "/data", "options": ["rbind"]});
    let spec = json!({"mounts": [mount], "linux": {"rootfsPropagation": "rslave"}}).to_string();
    fs::write(bundle.path().join("config.json"), &spec).unwrap();
    let policy = Policy {
        unmounted_volumes: Alarm::Refuse,
        dead_sources: Alarm::Refuse,
        failed_repairs: FailedRepair::Refuse,
        vanished_directories: Vanished::Remake,
        ..Policy::default()
    };
    let places = Places {
        kubelet_roots: vec![kubelet.to_owned()],
        ..Places::default()
    };
    let admission = admit(bundle.path(), &policy, &places, Attempt::First);
    assert_eq!(
        fs::read_to_string(bundle.path().join("config.json")).unwrap(),
        spec
    );
    let [bind] = &admission.report.binds[..] else {
        panic!("{:?}", admission.report)
    };
    assert_eq!(bind.outcome, None, "{bind:?}");
    (bind.verdict().as_str(), admission.refusal.is_some())
}

#[test]
fn a_volume() {
    let kubelet = tempfile::tempdir().unwrap();
    let volume = kubelet.path().join("pods/uid-1/volumes/kubernetes.io~nfs");
    fs::create_dir_all(&volume).unwrap();
    assert_eq!(
        verdict_and_refusal(&volume.join(too_long()), kubelet.path()),
        ("unknown", false)
    );
}

#[test]
fn a_subpath() {
    let kubelet = tempfile::tempdir().unwrap();
    let subpaths = kubelet.path().join("pods/uid-1/volume-subpaths");
    fs::create_dir_all(&subpaths).unwrap();
    assert_eq!(
        verdict_and_refusal(&subpaths.join(too_long()).join("app/0"), kubelet.path()),
        ("unknown", false)
    );
}

#[test]
fn the_hosts_root() {
    let kubelet = tempfile::tempdir().unwrap();
    // A kubelet's folder on the way to which is a file.
    fs::write(kubelet.path().join("file"), "").unwrap();
    let behind_a_file = kubelet.path().join("file/kubelet");
    assert_eq!(
        verdict_and_refusal(&behind_a_file, &behind_a_file),
        ("unknown", false)
    );
}
