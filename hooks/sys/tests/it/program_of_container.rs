//! The process of a container that gets a signal by the name of its program.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::ProgramName;
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_testing::{Cgroup, own_namespace};
use rustix::process::Signal;

/// A container, as far as the signal needs it: a cgroup with an init.
struct Container {
    folder: tempfile::TempDir,
    processes: Vec<Child>,
    cgroup: Cgroup,
}

impl Container {
    fn start(test: &str) -> Option<Self> {
        if !own_namespace() {
            return None;
        }
        let mut container = Self {
            folder: tempfile::tempdir().unwrap(),
            processes: Vec::new(),
            cgroup: Cgroup::make(test)?,
        };
        container.run(&container.program("init"), "echo; read forever", true);
        Some(container)
    }

    /// A shell with this file name.
    fn program(&self, name: impl AsRef<OsStr>) -> PathBuf {
        let path = self.folder.path().join(name.as_ref());
        fs::copy("/bin/sh", &path).unwrap();
        path
    }

    /// Runs a script until it prints a line, in the container or outside.
    fn run(&mut self, program: &Path, script: &str, is_inside: bool) -> u32 {
        let members = self.cgroup.members();
        let enter = match is_inside {
            true => format!("echo 0 > {}; exec \"$@\"", members.display()),
            false => "exec \"$@\"".to_owned(),
        };
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(enter).arg("sh");
        command.arg(program).arg("-c").arg(script).arg(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let pid = child.id();
        self.processes.push(child);
        pid
    }

    fn kill_last(&mut self) {
        let mut child = self.processes.pop().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn init(&self) -> HeldProcess {
        let init = HeldProcess::open(self.processes[0].id()).unwrap();
        init.of_container(self.cgroup.id())
    }

    /// The pid of the process that runs nginx.
    fn nginx(&self) -> Option<u32> {
        match self
            .init()
            .running(&ProgramName::from_text("nginx").unwrap(), in_time())
        {
            Ok(found) => Some(found.pid()),
            Err(ProcessError::NoProgram(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

fn in_time() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

impl Drop for Container {
    fn drop(&mut self) {
        for child in &mut self.processes {
            let _ = child.kill();
            child.wait().unwrap();
        }
        let members = fs::read_to_string(self.cgroup.members()).unwrap();
        for pid in members.lines().filter_map(|pid| pid.parse().ok()) {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    }
}

/// As nginx: the workers run the same program.
#[test]
fn the_master_gets_the_signal_and_its_worker_does_not() {
    let Some(mut container) = Container::start("master") else {
        return;
    };
    let got = container.folder.path().join("got");
    let program = container.program("nginx");
    let trap = |name: &str| format!("trap 'echo {name} >> {}' USR1", got.display());
    let worker = format!("{}; echo; while :; do sleep 0.05; done", trap("worker"));
    let worker = format!("$0 -c \"{}\" $0 &", worker.replace('"', "\\\""));
    let script = format!("{}; {worker} while :; do sleep 0.05; done", trap("master"));
    let master = container.run(&program, &script, true);
    assert_eq!(container.nginx(), Some(master));
    let nginx = ProgramName::from_text("nginx").unwrap();
    let found = container.init().running(&nginx, in_time()).unwrap();
    found.signal(Signal::USR1).unwrap();
    let start = Instant::now();
    while fs::read_to_string(&got).unwrap_or_default() != "master\n" {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    // The upgrade of a package removes the file of the running program.
    fs::remove_file(&program).unwrap();
    assert_eq!(container.nginx(), Some(master));
}

/// The pod may have the pid namespace of the host.
#[test]
fn a_process_of_the_host_or_of_an_inner_container_gets_no_signal() {
    let Some(mut container) = Container::start("outside") else {
        return;
    };
    let program = container.program("nginx");
    container.run(&program, "echo; read forever", false);
    assert_eq!(container.nginx(), None);
    let script = format!(
        "exec unshare --pid --fork {} -c 'echo; read forever'",
        program.display()
    );
    let shell = container.program("shell");
    container.run(&shell, &script, true);
    assert_eq!(container.nginx(), None);
    let own = container.run(&program, "echo; read forever", true);
    assert_eq!(container.nginx(), Some(own));
}

/// A container that can make cgroups names a cgroup after the victim.
#[test]
fn a_process_in_a_cgroup_of_the_same_name_elsewhere_gets_no_signal() {
    let Some(mut container) = Container::start("victim") else {
        return;
    };
    let Some(hostile) = Cgroup::make("hostile") else {
        return;
    };
    let Some(fake) = hostile.below(container.cgroup.id()) else {
        return;
    };
    let program = container.program("nginx");
    let impostor = container.run(&program, "echo; read forever", false);
    fake.add(impostor);
    let found = container.nginx();
    container.kill_last();
    assert_eq!(found, None);
}

#[test]
fn only_the_whole_file_name_is_compared() {
    let Some(mut container) = Container::start("names") else {
        return;
    };
    for name in [
        &b"x\nnginx"[..],
        b"nginx\n",
        b"nginx (deleted) ",
        b"nginx-debug",
        b"\xffnginx",
    ] {
        let program = container.program(OsStr::from_bytes(name));
        container.run(&program, "echo; read forever", true);
    }
    assert_eq!(container.nginx(), None);
    let missing = container
        .init()
        .running(&ProgramName::from_text("nginx").unwrap(), in_time());
    let words = missing.unwrap_err().to_string();
    assert_eq!(words, "no process of the container runs \"nginx\"");
}

/// The number of reads that this thread made.
fn reads() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/io").ok()?;
    let count = text.lines().find_map(|line| line.strip_prefix("syscr: "))?;
    count.parse().ok()
}

#[test]
fn the_processes_of_others_are_not_read() {
    let Some(mut container) = Container::start("others") else {
        return;
    };
    let Some(before) = reads() else {
        return bindguard_testing::skipped("this kernel does not count reads");
    };
    let program = container.program("nginx");
    let own = container.run(&program, "echo; read forever", true);
    assert_eq!(container.nginx(), Some(own));
    let alone = reads().unwrap() - before;
    for _ in 0..100 {
        let other = Command::new("sleep").arg("1000").spawn().unwrap();
        container.processes.push(other);
    }
    let before = reads().unwrap();
    assert_eq!(container.nginx(), Some(own));
    let beside_others = reads().unwrap() - before;
    assert!(beside_others < alone + 50, "{alone}, {beside_others}");
}

/// A process in a cgroup that the container made is a process of the container.
#[test]
fn a_process_in_a_cgroup_below_gets_the_signal() {
    let Some(mut container) = Container::start("below") else {
        return;
    };
    let program = container.program("nginx");
    let own = container.run(&program, "echo; read forever", true);
    let Some(below) = container.cgroup.below("nginx.service") else {
        return;
    };
    below.add(own);
    let found = container.nginx();
    container.kill_last();
    assert_eq!(found, Some(own));
}

/// The search ends in time, and no part of the processes counts as all of them.
#[test]
fn in_a_container_that_forks_on_the_program_is_found_or_not_known() {
    let Some(mut container) = Container::start("forks") else {
        return;
    };
    let program = container.program("nginx");
    let own = container.run(&program, "echo; read forever", true);
    let script = "echo; while :; do (sleep 0.01 &); done";
    container.run(&container.program("forks"), script, true);
    let nginx = ProgramName::from_text("nginx").unwrap();
    for millis in [0, 1, 2, 5, 10, 50, 1000] {
        let until = Instant::now() + Duration::from_millis(millis);
        match container.init().running(&nginx, until) {
            Ok(found) => assert!(found.pid() == own && millis > 0),
            Err(ProcessError::TooManyProcesses(_)) => {}
            Err(error) => panic!("{millis}: {error}"),
        }
        assert!(until.elapsed() < Duration::from_secs(60), "{millis}");
    }
}
