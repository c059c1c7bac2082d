//! Running a program to its end, within a time limit, and keeping what it said.
//!
//! A story must fail, not hang, when a containerd or a runtime does; and its failure must carry the
//! program's words.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The default time limit of a story's program: it fails instead of hanging.
pub const LIMIT: Duration = Duration::from_secs(180);

/// A program that has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    pub line: String,
    pub status: ExitStatus,
    /// Everything it wrote to stdout.
    pub stdout: String,
    /// Everything it wrote to stderr.
    pub stderr: String,
}

impl Finished {
    /// The exit code; a signal counts as 128 plus its number, as in a shell.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// The stdout; after a failure an error with the whole output.
    pub fn success(self) -> Result<String> {
        match self.status.success() {
            true => Ok(self.stdout),
            false => Err(anyhow!(
                "{}: exit code {}: {}{}",
                self.line,
                self.code(),
                self.stderr,
                self.stdout
            )),
        }
    }

    /// The stderr; an error if the program succeeded.
    pub fn failure(self) -> Result<String> {
        match self.status.success() {
            true => Err(anyhow!(
                "{}: succeeded, but should have failed: {}",
                self.line,
                self.stdout
            )),
            false => Ok(self.stderr),
        }
    }
}

/// Runs `command` with nothing on stdin.
pub fn run(command: Command) -> Result<Finished> {
    run_with_input(command, "", LIMIT)
}

/// Runs `command` with `input` on stdin, and kills it when it is not done within `limit`.
pub fn run_with_input(command: Command, input: &str, limit: Duration) -> Result<Finished> {
    run_with_bytes(command, input.as_bytes(), limit)
}

/// The same with an input that is no text.
pub fn run_with_bytes(mut command: Command, input: &[u8], limit: Duration) -> Result<Finished> {
    let line = display(&command);
    let stdin = if input.is_empty() {
        Stdio::null()
    } else {
        Stdio::piped()
    };
    command
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {line}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // a program that ends without reading its input is not at fault
        let _ = stdin.write_all(input);
    }
    let pid = Pid::from_raw(child.id().try_into().context("pid of a child")?);
    let (sender, receiver) = mpsc::channel();
    let reader = thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = receiver.recv_timeout(limit) else {
        let _ = kill(pid, Signal::SIGKILL);
        bail!("{line}: not done after {limit:?}, killed");
    };
    // joined, so that no thread keeps sharing the caller's file system context (see
    // `node::namespace`)
    let _ = reader.join();
    let Output {
        status,
        stdout,
        stderr,
    } = output.with_context(|| format!("wait for {line}"))?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Finished {
        line,
        status,
        stdout: text(stdout),
        stderr: text(stderr),
    })
}

/// Runs `command` on a new terminal. The captured output has the terminal's line ends.
pub fn run_on_a_terminal(command: &Command) -> Result<Finished> {
    run(on_a_terminal(command))
}

/// `command` with a terminal around it, which script(1) makes.
pub fn on_a_terminal(command: &Command) -> Command {
    let quoted =
        |word: &std::ffi::OsStr| format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"));
    let line: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(quoted)
        .collect();
    let mut script = Command::new("script");
    script.args([
        "--quiet",
        "--return",
        "--command",
        &line.join(" "),
        "/dev/null",
    ]);
    script
}

/// A command of the host, by words: `host(["mount", "--bind", …])`.
pub fn host<I: IntoIterator<Item: AsRef<std::ffi::OsStr>>>(words: I) -> Result<String> {
    let mut words = words.into_iter();
    let program = words.next().context("a command needs a program")?;
    let mut command = Command::new(program);
    command.args(words);
    run(command)?.success()
}

/// Writes an executable script, in a separate process. Children of this process's threads would
/// inherit the file open for writing, and then execve(2) of the script fails (ETXTBSY).
pub fn write_program(file: &Path, text: &str) -> Result<()> {
    let mut shell = Command::new("sh");
    shell
        .args(["-ec", "cat > \"$1\"; chmod 755 \"$1\"", "sh"])
        .arg(file);
    run_with_input(shell, text, LIMIT)?
        .success()
        .map(drop)
        .with_context(|| format!("write {}", file.display()))
}

pub(crate) fn display(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
