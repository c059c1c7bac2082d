//! stderr is the container's own, and has no reader before the container exists: the guard neither
//! waits for space in it nor takes the space that the runtime needs (issue 14, item 17).

use std::fs;
use std::io::{Read, pipe};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::pipe::fcntl_setpipe_size;
use tempfile::TempDir;

const TIME_LIMIT: Duration = Duration::from_secs(60);

struct Scene {
    folder: TempDir,
}

impl Scene {
    /// A pod whose annotations are as long as Kubernetes allows, and invalid.
    fn new() -> Self {
        let scene = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let path = |name: &str| scene.folder.path().join(name);
        fs::create_dir(path("bundle")).unwrap();
        let annotations = ["mode", "propagation"]
            .map(|name| (format!("bindguard.io/{name}"), "x".repeat(120 << 10)));
        let annotations: std::collections::BTreeMap<_, _> = annotations.into();
        let spec =
            serde_json::json!({"ociVersion": "1.0.0", "mounts": [], "annotations": annotations});
        fs::write(path("bundle/config.json"), spec.to_string()).unwrap();
        let config = format!(
            "[runtime]\npath = \"/bin/echo\"\n[journal]\npath = {:?}\n[annotations]\nmode = true\npropagation = true\n",
            path("journal.jsonl")
        );
        fs::write(path("config.toml"), config).unwrap();
        scene
    }

    fn guard(&self, stderr: impl Into<Stdio>, log: Option<&str>) -> Child {
        let mut guard = Command::new(env!("CARGO_BIN_EXE_bindguard-runtime"));
        guard
            .env("BINDGUARD_CONFIG", self.folder.path().join("config.toml"))
            .env_remove("BINDGUARD_RUNTIME");
        guard
            .current_dir(self.folder.path())
            .stdout(Stdio::null())
            .stderr(stderr);
        log.map(|log| guard.args(["--log", log]));
        guard.args(["create", "-b", "bundle", "c"]).spawn().unwrap()
    }

    fn journal(&self) -> String {
        fs::read_to_string(self.folder.path().join("journal.jsonl")).unwrap_or_default()
    }
}

fn ends(mut guard: Child) {
    let deadline = Instant::now() + TIME_LIMIT;
    while guard.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            guard.kill().unwrap();
            guard.wait().unwrap();
            panic!("the guard waits");
        }
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_long_annotation_is_cut_on_stderr_and_in_the_journal() {
    let scene = Scene::new();
    let (mut read, write) = pipe().unwrap();
    ends(scene.guard(write, None));
    let mut output = String::new();
    read.read_to_string(&mut output).unwrap();
    assert!(
        output.contains("bindguard.io/mode") && output.len() < 4096,
        "{} bytes: {output:.300}",
        output.len()
    );
    let journal = scene.journal();
    assert!(
        journal.contains("is not one of its values") && journal.len() < 4096,
        "{journal:.300}"
    );
}

#[test]
fn a_full_stderr_does_not_block_the_guard() {
    let scene = Scene::new();
    let (_read, mut write) = pipe().unwrap();
    let capacity = fcntl_setpipe_size(&write, 4096).unwrap();
    std::io::Write::write_all(&mut write, &vec![b'x'; capacity]).unwrap();
    ends(scene.guard(write, None));
    assert!(scene.journal().contains("is not one of its values"));
}

#[test]
fn a_log_fifo_without_a_reader_does_not_block_the_guard() {
    let scene = Scene::new();
    let fifo = scene.folder.path().join("log");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    ends(scene.guard(Stdio::null(), Some("log")));
    assert!(scene.journal().contains("is not one of its values"));
}

/// The journal is already larger than the limit for files.
#[test]
fn a_limit_on_the_size_of_files_does_not_end_the_guard() {
    let scene = Scene::new();
    fs::write(scene.folder.path().join("journal.jsonl"), "x".repeat(4096)).unwrap();
    let mut shell = Command::new("prlimit");
    shell
        .args(["--fsize=1024", "--"])
        .arg(env!("CARGO_BIN_EXE_bindguard-runtime"))
        .args(["create", "-b", "bundle", "c"]);
    shell
        .env("BINDGUARD_CONFIG", scene.folder.path().join("config.toml"))
        .current_dir(scene.folder.path());
    let ended = shell.env_remove("BINDGUARD_RUNTIME").output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(
        String::from_utf8_lossy(&ended.stderr).contains("os error 27"),
        "{ended:?}"
    );
    assert_eq!(scene.journal().len(), 4096);
}
