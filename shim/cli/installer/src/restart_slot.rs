//! `--restart-slot`: permission to restart this node's runtime, from a helper that coordinates the
//! nodes.
//!
//! The helper is a program of the pod, which runs in the pod's own root with the pod's account. It
//! answers a line with a line: `bindguard-agent restart-slot`. A node without an answer does not
//! restart.

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
pub struct RestartSlot {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    /// False until this process knows that the node has no slot.
    is_freed: bool,
}

impl RestartSlot {
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
            is_freed: false,
        })
    }

    /// Takes a slot. Returns why there is none.
    pub fn take(&mut self) -> Result<Option<String>> {
        self.is_freed = false;
        let answer = self.answer("take")?;
        Ok((answer != "granted").then(|| reason(&answer)))
    }

    /// Frees the slot. Returns why it is not free.
    pub fn free(&mut self) -> Result<Option<String>> {
        if self.is_freed {
            return Ok(None);
        }
        let answer = self.answer("done")?;
        self.is_freed = answer == "ok";
        Ok((!self.is_freed).then(|| reason(&answer)))
    }

    /// Keeps the slot, and marks it.
    pub fn fail(&mut self) -> Result<()> {
        let answer = self.answer("failed")?;
        if answer == "ok" {
            Ok(())
        } else {
            bail!("mark the restart slot: {}", reason(&answer))
        }
    }

    fn answer(&mut self, request: &str) -> Result<String> {
        let stdin = self.stdin.as_mut().context("the helper's stdin")?;
        writeln!(stdin, "{request}").context("write to the helper of --restart-slot")?;
        let line = self
            .line()
            .context("read from the helper of --restart-slot")?;
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

impl Drop for RestartSlot {
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

fn reason(answer: &str) -> String {
    answer.strip_prefix("wait ").unwrap_or(answer).to_owned()
}
