//! `--restart-slot`: permission to restart this node's runtime, from a helper that coordinates the
//! nodes.
//!
//! The helper is a program of the pod, which runs in the pod's own root with the pod's account. It
//! answers a line with a line: `bindguard-agent restart-slot`. A node without an answer does not
//! restart.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

/// The running helper.
#[derive(Debug)]
pub struct RestartSlot(RefCell<Helper>);

#[derive(Debug)]
struct Helper {
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
        Ok(Self(RefCell::new(Helper {
            process,
            stdin,
            stdout: BufReader::new(stdout),
            is_freed: false,
        })))
    }

    /// Takes a slot. Returns why there is none.
    pub fn take(&self) -> Result<Option<String>> {
        let mut helper = self.0.borrow_mut();
        helper.is_freed = false;
        let answer = helper.answer("take")?;
        Ok((answer != "granted").then(|| reason(&answer)))
    }

    /// Frees the slot. Returns why it is not free.
    pub fn free(&self) -> Result<Option<String>> {
        let mut helper = self.0.borrow_mut();
        if helper.is_freed {
            return Ok(None);
        }
        let answer = helper.answer("done")?;
        helper.is_freed = answer == "ok";
        Ok((!helper.is_freed).then(|| reason(&answer)))
    }

    /// Keeps the slot, and marks it.
    pub fn fail(&self) -> Result<()> {
        let answer = self.0.borrow_mut().answer("failed")?;
        if answer == "ok" {
            Ok(())
        } else {
            bail!("mark the restart slot: {}", reason(&answer))
        }
    }
}

impl Helper {
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

impl Drop for Helper {
    fn drop(&mut self) {
        // the helper ends when its stdin ends
        drop(self.stdin.take());
        let _ = self.process.wait();
    }
}

fn reason(answer: &str) -> String {
    answer.strip_prefix("wait ").unwrap_or(answer).to_owned()
}
