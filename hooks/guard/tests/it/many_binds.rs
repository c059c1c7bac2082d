//! More binds than a runtime may have files open: each is still inspected.

use std::fs;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_guard::{Attempt, admit};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

#[test]
fn the_last_of_two_thousand_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let volume = folder
        .path()
        .join("kubelet/pods/u/volumes/kubernetes.io~nfs/share");
    fs::create_dir_all(&volume).unwrap();
    let sources = (0..1_999).map(|n| folder.path().join(n.to_string()));
    let sources = sources
        .inspect(|source| fs::create_dir(source).unwrap())
        .chain([volume]);
    let mounts: Vec<_> = sources
        .map(|source| json!({"type": "bind", "source": source, "destination": "/x"}))
        .collect();
    fs::write(
        folder.path().join("config.json"),
        json!({ "mounts": mounts }).to_string(),
    )
    .unwrap();
    let few = Rlimit {
        current: Some(1_024),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, few).unwrap();

    let roots = vec![folder.path().join("kubelet")];
    let places = Places {
        kubelet_roots: roots,
        ..Places::default()
    };
    let strict = Policy {
        unmounted_volumes: Alarm::Refuse,
        ..Policy::default()
    };
    let admission = admit(folder.path(), &strict, &places, Attempt::First);
    assert!(
        admission
            .refusal
            .is_some_and(|why| why.contains("not mounted")),
        "{:?}",
        admission.report.binds
    );
}
