//! Under `proof = "refuse"`, a `start` is refused if the container's mounts cannot be compared with
//! the guard's record, wherever the runtime keeps its state and however the call is written.

use std::fs;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A container of crun, whose state is in the folder of `XDG_RUNTIME_DIR`. The guard's record in its
/// bundle is damaged.
struct Scene(TempDir);

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["bundle", "run/crun/proof-c1"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        fs::write(path("bundle/config.json"), "{}").unwrap();
        fs::write(path("bundle/bindguard-binds.json"), "damaged").unwrap();
        let (pid, bundle) = (std::process::id(), path("bundle"));
        let status = format!("{{\"pid\":{pid},\"bundle\":{bundle:?}}}");
        fs::write(path("run/crun/proof-c1/status"), status).unwrap();
        let config = "[runtime]\npath = \"/bin/true\"\n[journal]\npath = \"/dev/null\"\n[checks]\nproof = \"refuse\"\n";
        fs::write(path("config.toml"), config).unwrap();
        Self(folder)
    }

    fn start(&self, words: &str, runtime_folder: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_bindguard-runtime"))
            .args(words.split(' '))
            .current_dir(self.0.path())
            .env("BINDGUARD_CONFIG", self.0.path().join("config.toml"))
            .env("XDG_RUNTIME_DIR", self.0.path().join(runtime_folder))
            .env_remove("BINDGUARD_RUNTIME")
            .output()
            .unwrap()
    }
}

#[test]
fn a_start_that_cannot_be_proven_is_refused() {
    let scene = Scene::new();
    for (words, runtime_folder) in [
        ("start proof-c1", "run"),
        ("-- start proof-c1", "run"),
        ("--root run/crun start proof-c1", "elsewhere"),
        // The beginning of a flag of crun's.
        ("--roo=run/crun start proof-c1", "elsewhere"),
        ("--log-f state start proof-c1", "run"),
    ] {
        let ended = scene.start(words, runtime_folder);
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success(), "{words}");
        assert!(said.contains("refused: its mounts could not be"), "{said}");
    }
    for words in [
        "start proof-c1",
        "--root run/other start proof-c1",
        "state proof-c1",
    ] {
        assert!(scene.start(words, "elsewhere").status.success(), "{words}");
    }
}
