//! The real runtime finds the process as the caller made it. A script that records its environment
//! is called directly and through `bindguard-runtime`, by callers of all kinds, and must record the
//! same.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// Records the shell's descriptors while no pipe is open. The signals are a child's: the shell
/// blocks some signals during a fork.
const RUNTIME: &str = r#"#!/bin/sh
out=${0%/*}/found
{
  for word in "$0" "$@"; do echo "word $word"; done
  grep -aE '^(Sig(Blk|Ign)|Cap...|Seccomp|Uid|Gid|Groups|Nice|NoNewPrivs)' /proc/self/status
  ls -l /proc/$$/fd > "$out.fds"
  sed 's/.*[0-9] \([0-9]* ->\)/\1/; s/\[[0-9]*\]//' "$out.fds"
  tr '\0' '\n' < /proc/$$/environ
  readlink /proc/$$/cwd /proc/$$/ns/*
  cat /proc/$$/limits /proc/$$/oom_score_adj
  umask
} > "$out" 2>/dev/null
cat
echo said >&2
exit 42
"#;

/// The callers' preparations before the call, as shell code.
const CALLERS: [&str; 12] = [
    "exec",
    "trap '' PIPE; exec",
    "trap '' HUP INT QUIT PIPE TERM USR1 TSTP; exec",
    "exec <&-",
    "exec >&-",
    "exec 2>&-",
    "exec <&- >&- 2>&-",
    "exec 3</dev/null 4>/dev/null 9<.",
    "umask 077; ulimit -n 64; ulimit -s 1024; cd /; exec nice",
    "exec env -i Z=1 A=2 EMPTY= =x B='a b' PATH=/usr/bin:/bin BINDGUARD_CONFIG=\"$BINDGUARD_CONFIG\"",
    "exec env LISTEN_FDS=1 NOTIFY_SOCKET=/run/n _LIBCONTAINER_X=y",
    "echo 321 > /proc/self/oom_score_adj; exec setsid -w",
];

const CALLS: [&str; 5] = [
    "create -b BUNDLE c",
    "run c",
    "state c",
    "",
    "create -b /nowhere c",
];

#[test]
fn the_runtime_gets_the_same_process_state_as_without_bindguard() {
    let scene = Scene::new();
    let mut different = Vec::new();
    for caller in CALLERS {
        for call in CALLS {
            let call = call.replace("BUNDLE", &scene.path("bundle").display().to_string());
            let directly = scene.found(caller, &scene.path("runtime"), &call);
            let through = scene.found(
                caller,
                &PathBuf::from(env!("CARGO_BIN_EXE_bindguard-runtime")),
                &call,
            );
            if directly != through {
                different.push(format!(
                    "{caller} … {call}: {}",
                    directly.difference_to(&through)
                ));
            }
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n\n"));
}

#[test]
fn a_user_without_access_to_the_journal_gets_no_warning() {
    let scene = Scene::with_journal("/proc/nowhere/journal.jsonl");
    let guard = PathBuf::from(env!("CARGO_BIN_EXE_bindguard-runtime"));
    let stderr = |caller: &str| scene.found(caller, &guard, "run c").output.stderr;
    let users = ["exec unshare -Ur", "exec setpriv --bounding-set -sys_admin"];
    for user in users.into_iter().filter(|user| works(user)) {
        assert_eq!(String::from_utf8_lossy(&stderr(user)), "said\n", "{user}");
    }
    if works("exec setpriv --bounding-set +sys_admin") {
        assert!(
            String::from_utf8_lossy(&stderr("exec")).contains("bindguard: "),
            "the node's root gets the warning"
        );
    }
}

fn works(caller: &str) -> bool {
    let tried = Command::new("sh")
        .args(["-c", &format!("{caller} true")])
        .output()
        .unwrap();
    if !tried.status.success() {
        eprintln!(
            "SKIPPED {caller}: {}",
            String::from_utf8_lossy(&tried.stderr)
        );
    }
    tried.status.success()
}

#[test]
fn the_script_distinguishes_its_callers() {
    let scene = Scene::new();
    let runtime = scene.path("runtime");
    let [plain, ignoring, closed] =
        [CALLERS[0], CALLERS[1], CALLERS[6]].map(|c| scene.found(c, &runtime, "state c"));
    assert_eq!(plain.output.status.code(), Some(42));
    assert_ne!(plain.record, ignoring.record);
    assert_ne!(plain.record, closed.record);
}

#[derive(Debug, PartialEq, Eq)]
struct Found {
    record: String,
    output: Output,
}

impl Found {
    /// Only the differences.
    fn difference_to(&self, other: &Self) -> String {
        let lines = |found: &Self, than: &Self| {
            let lines = found
                .record
                .lines()
                .filter(|line| !than.record.lines().any(|l| l == *line));
            lines.collect::<Vec<_>>().join("\n  ")
        };
        let [directly, through] = [lines(self, other), lines(other, self)];
        format!(
            "directly {:?}\n  {directly}\nthrough {:?}\n  {through}",
            self.output, other.output
        )
    }
}

/// A separate process writes the file: a child of a parallel test would inherit the file open for
/// writing, and then execve(2) fails (ETXTBSY).
fn write_program(file: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell
        .args(["-ec", "cat > \"$0\"; chmod 755 \"$0\""])
        .arg(file)
        .stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    assert!(shell.wait().unwrap().success());
}

struct Scene {
    folder: TempDir,
}

impl Scene {
    fn new() -> Self {
        Self::with_journal("journal.jsonl")
    }

    fn with_journal(journal: &str) -> Self {
        let scene = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let runtime = scene.path("runtime");
        write_program(&runtime, RUNTIME);
        fs::create_dir(scene.path("bundle")).unwrap();
        fs::write(
            scene.path("bundle/config.json"),
            r#"{"ociVersion":"1.0.0","mounts":[]}"#,
        )
        .unwrap();
        let config = format!(
            "[runtime]\npath = {runtime:?}\n[journal]\npath = {:?}\n",
            scene.path(journal)
        );
        fs::write(scene.path("config.toml"), config).unwrap();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The runtime's record, and the output that its caller saw.
    fn found(&self, caller: &str, program: &PathBuf, call: &str) -> Found {
        fs::write(self.path("stdin"), b"to stdin\n").unwrap();
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &format!("{caller} \"$0\" \"$@\"")])
            .arg(program)
            .args(call.split_whitespace());
        shell
            .current_dir(self.path("bundle"))
            .stdin(Stdio::from(fs::File::open(self.path("stdin")).unwrap()));
        shell
            .env("BINDGUARD_CONFIG", self.path("config.toml"))
            .env_remove("BINDGUARD_RUNTIME");
        let output = shell.output().unwrap();
        let record = fs::read_to_string(self.path("found")).unwrap();
        fs::remove_file(self.path("found")).unwrap();
        Found { record, output }
    }
}
