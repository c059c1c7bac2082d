//! crun reads the spec that `--config` names, and takes a relative name from the working directory.
//! The guard checks and edits that file, and policy applies. The journal has absolute paths.

use std::fs;
use std::process::{Command, Output};

use rustix::process::geteuid;
use tempfile::TempDir;

const SPEC: &str = r#"{"ociVersion":"1.0.0","linux":{},"mounts":[{"destination":"/host","type":"bind","source":"/","options":["rbind","rprivate"]}]}"#;
const EDITED: &str = r#""rootfsPropagation":"rslave""#;

/// A bundle whose own spec is no spec, and another spec in the working directory.
struct Scene(TempDir);

impl Scene {
    fn new(policy: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("bundle")).unwrap();
        fs::write(path("bundle/config.json"), "{").unwrap();
        fs::write(path("other.json"), SPEC).unwrap();
        let config = format!(
            "[runtime]\npath = \"/bin/true\"\n[journal]\npath = {:?}\n{policy}",
            path("journal.jsonl")
        );
        fs::write(path("config.toml"), config).unwrap();
        Self(folder)
    }

    fn create(&self, words: &str, folder: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_bindguard-runtime"))
            .args(words.split(' '))
            .current_dir(self.0.path().join(folder))
            .env("BINDGUARD_CONFIG", self.0.path().join("config.toml"))
            .env_remove("BINDGUARD_RUNTIME")
            .output()
            .unwrap()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).unwrap()
    }
}

#[test]
fn is_checked_and_edited_where_crun_reads_it() {
    if !geteuid().is_root() {
        eprintln!("SKIPPED: not root");
        return;
    }
    for (words, folder) in [
        ("create --bundle bundle --config other.json c", "."),
        ("create -b bundle -f ./other.json c", "."),
        ("run --config=../other.json c", "bundle"),
    ] {
        let scene = Scene::new("");
        assert!(scene.create(words, folder).status.success(), "{words}");
        let edited = scene.read("other.json");
        assert!(edited.contains(EDITED), "{words}: {edited}");
        assert_eq!(scene.read("bundle/config.json"), "{", "{words}");
        let bundle = scene.0.path().join("bundle");
        let journal = scene.read("journal.jsonl");
        assert!(
            journal.contains(&format!("\"bundle\":{bundle:?}")),
            "{words}: {journal}"
        );
    }
}

#[test]
fn is_refused_by_policy() {
    if !geteuid().is_root() {
        eprintln!("SKIPPED: not root");
        return;
    }
    let words = "create --bundle bundle --config other.json c";
    // A proof would read the bundle's own spec.
    let scene = Scene::new("[checks]\nproof = \"refuse\"\n");
    let ended = scene.create(words, ".");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("other.json"),
        "{said}"
    );
    assert_eq!(scene.read("other.json"), SPEC);
    let scene = Scene::new("[checks]\nunmounted-volumes = \"refuse\"\n");
    let volume = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/data";
    fs::write(
        scene.0.path().join("other.json"),
        SPEC.replace("\"/\"", &format!("{volume:?}")),
    )
    .unwrap();
    let ended = scene.create(words, ".");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && said.contains(volume), "{said}");
}
