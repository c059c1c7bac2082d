//! Queries programs that may hang.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// The time limit for a program.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);

/// Checks that the server of a path answers, even with ENOENT: no command may hang on a silent
/// server.
///
/// # Errors
/// If the server is silent; the message has one line.
pub fn check_answers(path: &Path) -> anyhow::Result<()> {
    const READ_TIMEOUT: Duration = Duration::from_millis(700);
    match probe_side_by_side(&[path.to_owned()], READ_TIMEOUT).as_deref() {
        Ok([Answer::Silent(patience)]) => {
            bail!(
                "{} did not answer within {} ms",
                path.display(),
                patience.as_millis()
            )
        }
        _ => Ok(()),
    }
}

/// The output of a program that is run with these arguments.
///
/// # Errors
/// If the program cannot be run, fails, or does not end in time.
pub fn output_of(program: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    run(program, arguments)
        .with_context(|| format!("run {} {}", program.display(), arguments.join(" ")))
}

fn run(program: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn()?;
    // Read stdout while the program runs: a config is larger than a pipe.
    let mut out = child.stdout.take().context("it has no stdout")?;
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text)
            .map(|_| String::from_utf8_lossy(&text).into_owned())
    });
    let status = wait(&mut child)?;
    ensure!(status.success(), "{status}");
    let text = reader
        .join()
        .map_err(|_| anyhow!("its output could not be read"))?;
    Ok(text?)
}

fn wait(child: &mut Child) -> anyhow::Result<ExitStatus> {
    let deadline = Instant::now() + COMMAND_TIMEOUT;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status),
            None if Instant::now() > deadline => {
                // The program may have ended just now; `wait` reaps it either way.
                let _ = child.kill();
                let _ = child.wait();
                bail!("no end after {} s", COMMAND_TIMEOUT.as_secs());
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
}
