//! The complete output of a process in a container.
//!
//! `ctr` opens the fifos of a process late, and skips an unopened fifo when the process has ended:
//! on a busy machine the last line of a process is sometimes lost, under any shim (docs/parity.md).
//! So a process whose output a story needs runs until the story has received the output.

use std::io::{ErrorKind, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};

use crate::process::{Finished, LIMIT, display};

/// The line that a process writes at the end of stdout and of stderr.
const END: &str = "[that is all]";

/// Runs its arguments and ends with the same exit code. [`END`] is in pieces, because ps(1) may
/// print the script.
const STAYING: &str = r#""$@"; code=$?; printf '[that is %s]' all; printf '[that is %s]' all >&2; read -r line; exit $code"#;

/// The command to run in a container to receive all output of `words`.
pub fn staying<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&["sh", "-c", STAYING, "sh"], words].concat()
}

/// Runs the client of a process that stays, and ends the process once its output was received.
pub fn read_all_output(mut client: Command) -> Result<Finished> {
    let line = display(&client);
    client
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = client.spawn().with_context(|| format!("start {line}"))?;
    let mut stdin = child.stdin.take().context("the client has a stdin")?;
    let (sender, ends) = mpsc::channel();
    let stdout = listen(
        child.stdout.take().context("the client has a stdout")?,
        sender.clone(),
    );
    let stderr = listen(
        child.stderr.take().context("the client has a stderr")?,
        sender,
    );

    let deadline = Instant::now() + LIMIT;
    let mut to_come = 2;
    loop {
        match ends.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(()) if to_come > 1 => to_come -= 1,
            Ok(()) => {
                // a client that has lost its process needs no input
                let _ = stdin.write_all(b"\n");
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                bail!("{line}: not done after {LIMIT:?}, killed");
            }
        }
    }
    let said = |stream: JoinHandle<String>| {
        stream
            .join()
            .map_err(|_| anyhow!("{line}: a reader of it panicked"))
    };
    let (stdout, stderr) = (said(stdout)?, without_ctrs_warnings(&said(stderr)?));
    let status = child.wait().with_context(|| format!("wait for {line}"))?;
    Ok(Finished {
        line,
        status,
        stdout,
        stderr,
    })
}

/// `ctr` of containerd 2.2 and newer warns about cgroup v1 in front of the process's own stderr.
fn without_ctrs_warnings(stderr: &str) -> String {
    let is_warning = |line: &&str| {
        line.starts_with("time=") && line.contains("level=warning msg=\"DEPRECATION: ")
    };
    stderr
        .split_inclusive('\n')
        .filter(|line| !is_warning(line))
        .collect()
}

/// Reads a stream to its end, and sends a message to `ends` for every [`END`]. A terminal's stream
/// has the [`END`] of stdout and of stderr.
fn listen(mut stream: impl Read + Send + 'static, ends: Sender<()>) -> JoinHandle<String> {
    thread::spawn(move || {
        let (mut said, mut reported, mut buffer) = (Vec::new(), 0, [0; 16 * 1024]);
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => said.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
            let found = String::from_utf8_lossy(&said).matches(END).count();
            for _ in reported..found {
                // no receiver is left when the client takes too long
                let _ = ends.send(());
            }
            reported = found;
        }
        String::from_utf8_lossy(&said).replace(END, "")
    })
}
