//! Asking another program, which may hang.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// How long a program may think.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether somebody answers for a path, if only that it is not there: nobody waits for a server here.
///
/// # Errors
/// When it is silent, in one line.
pub fn answers(path: &Path) -> anyhow::Result<()> {
    const PATIENCE_OF_FILES: Duration = Duration::from_millis(700);
    match probe_side_by_side(&[path.to_owned()], PATIENCE_OF_FILES).as_deref() {
        Ok([Answer::Silent(patience)]) => {
            bail!("{} did not answer within {} ms", path.display(), patience.as_millis())
        }
        _ => Ok(()),
    }
}

/// What a program prints when it is run with these words.
///
/// # Errors
/// When it cannot be run, fails, or does not end: what it said, in one line.
pub fn said(program: &Path, words: &[&str]) -> Result<String, String> {
    let line = format!("run {} {}", program.display(), words.join(" "));
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("{line}: {error}"))?;
    // Read while it runs: a config is larger than a pipe.
    let mut out = child.stdout.take().ok_or_else(|| format!("{line}: it has no stdout"))?;
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
    });
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().map_err(|error| format!("{line}: {error}"))? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                // It may have ended just now; either way it is reaped.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{line}: no end after {} s", PATIENCE.as_secs()));
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    if !status.success() {
        return Err(format!("{line}: {status}"));
    }
    match reader.join() {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => Err(format!("{line}: {error}")),
        Err(_) => Err(format!("{line}: nobody read it")),
    }
}
