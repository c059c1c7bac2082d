//! A running agent, and requests to it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Enough for a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Longer than from an update to the last check of its volume.
pub const LAST_CHECK: Duration = Duration::from_millis(1200);

/// The agent's process. Dropping this value kills the process.
pub struct Agent {
    child: Child,
    socket: PathBuf,
}

impl Agent {
    /// Starts the agent with this config and waits until the agent is ready.
    pub fn start(folder: &Path, config: &str) -> Self {
        let (socket, file) = (folder.join("agent.sock"), folder.join("agent.toml"));
        let own = format!(
            "agent.metrics = 'off'\nagent.socket = '{}'\njournal.path = '{}/journal.jsonl'\n",
            socket.display(),
            folder.display()
        );
        fs::write(&file, own + config).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_bindguard-agent"))
            .arg("--config")
            .arg(file)
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let agent = Self { child, socket };
        until("the agent is ready", || {
            agent.get("/readyz").starts_with("HTTP/1.1 200")
        });
        agent
    }

    /// The whole answer to a GET; empty if nothing answers.
    pub fn get(&self, path: &str) -> String {
        self.request(&format!(
            "GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"
        ))
    }

    /// The whole answer to a request.
    pub fn request(&self, request: &str) -> String {
        let Ok(mut stream) = UnixStream::connect(&self.socket) else {
            return String::new();
        };
        let mut answer = String::new();
        let _ = stream
            .write_all(request.as_bytes())
            .and_then(|()| stream.read_to_string(&mut answer));
        answer
    }

    /// The value of a figure, its labels included in the name.
    pub fn figure(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// Waits until nothing wakes the agent for this long.
    pub fn until_idle(&self, period: Duration) {
        until(&format!("nothing wakes the agent for {period:?}"), || {
            let before = self.wake_ups();
            thread::sleep(period);
            self.wake_ups() == before
        });
    }

    /// The voluntary context switches of all threads: proc_pid_status(5).
    fn wake_ups(&self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        // A thread that has just ended counts nothing.
        let status =
            |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let switches = |status: String| -> u64 {
            let value = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            value.map_or(0, |value| value.trim().parse().unwrap())
        };
        tasks.flatten().map(status).map(switches).sum()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM, and returns its exit code.
    pub fn terminate(mut self) -> Option<i32> {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something is true.
pub fn until(what: &str, is_true: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < ANSWER_TIMEOUT, "not in time: {what}");
        thread::sleep(Duration::from_micros(200));
    }
    start.elapsed()
}
