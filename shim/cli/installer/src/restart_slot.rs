//! `--restart-slot`: permission to restart this node's runtime, from a helper that coordinates the
//! nodes.
//!
//! The helper is a program of the pod, which runs in the pod's own root with the pod's account. It
//! answers a line with a line: `bindguard-agent restart-slot`. A node without an answer does not
//! restart.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

/// The running helper.
#[derive(Debug)]
pub struct RestartSlot {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// False until this process knows that the node has no slot.
    is_freed: bool,
}

impl RestartSlot {
    /// Starts the helper: before the root changes.
    pub fn start(line: &str) -> Result<Self> {
        let mut words = line.split(' ');
        let mut process = Command::new(words.next().unwrap_or_default())
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
            stdout: BufReader::new(stdout),
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
        let mut line = String::new();
        self.stdout
            .read_line(&mut line)
            .context("read from the helper of --restart-slot")?;
        if line.is_empty() {
            bail!("the helper of --restart-slot has ended");
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for RestartSlot {
    fn drop(&mut self) {
        // the helper ends when its stdin ends
        drop(self.stdin.take());
        let _ = self.process.wait();
    }
}

fn reason(answer: &str) -> String {
    answer.strip_prefix("wait ").unwrap_or(answer).to_owned()
}
