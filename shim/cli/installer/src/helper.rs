//! A helper of the installer, which runs in the pod's own root with the pod's account and answers a
//! line with a line, such as `bindguard-agent restart-slot`.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bindguard_operator::root_program::RootProgram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The time limit for an answer of the helper, which calls the API server: another installer waits
/// for this one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// The time that the helper has to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The running helper.
#[derive(Debug)]
pub struct Helper {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
}

impl Helper {
    /// Starts the helper: before the root changes.
    pub fn start(line: &str) -> Result<Self> {
        let mut words = line.split(' ');
        let name = Path::new(words.next().unwrap_or_default());
        let program = RootProgram::find(name, None)?;
        let program = program.with_context(|| format!("find {}", name.display()))?;
        let mut process = program
            .command()
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {line}"))?;
        let stdin = process.stdin.take();
        let stdout = process.stdout.take().context("the helper's stdout")?;
        Ok(Self {
            process,
            stdin,
            stdout,
        })
    }

    /// The answer to a request.
    pub fn answer(&mut self, request: &str) -> Result<String> {
        let stdin = self.stdin.as_mut().context("the helper's stdin")?;
        writeln!(stdin, "{request}").context("write to the installer's helper")?;
        let line = self.line().context("read from the installer's helper")?;
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    fn line(&mut self) -> Result<Vec<u8>> {
        let (start, mut line) = (Instant::now(), Vec::new());
        while line.last() != Some(&b'\n') {
            let left = Timespec::try_from(ANSWER_TIMEOUT.saturating_sub(start.elapsed()))?;
            let ready = poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&left))?;
            ensure!(ready > 0, "no answer within {} s", ANSWER_TIMEOUT.as_secs());
            let mut byte = [0];
            if self.stdout.read(&mut byte)? == 0 {
                bail!("it has ended");
            }
            line.extend(byte);
        }
        Ok(line)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // the helper ends when its stdin ends
        drop(self.stdin.take());
        let start = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) {
            if start.elapsed() > END_TIMEOUT {
                let _ = self.process.kill();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The reason in an answer that is not the expected one.
pub fn reason(answer: &str) -> String {
    answer.strip_prefix("wait ").unwrap_or(answer).to_owned()
}
