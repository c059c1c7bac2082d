//! A logging program: `binary://`.
//!
//! ```text
//!   shim ──starts──► program   only CONTAINER_ID and CONTAINER_NAMESPACE in its environment
//!                      3 ◄──── the process's stdout, by a pipe that the shim does not read
//!                      4 ◄──── its stderr
//!                      5 ────► one byte, or the end: "I am ready"
//! ```
//! The process starts when the program is ready. When the process ends, the pipes have no writer,
//! and the program ends. If it does not, the shim sends SIGTERM, and then kills it. Go's shim sends
//! SIGTERM at once, so that a program without a handler loses unread output; here it may first read
//! to the end.
//!
//! The program does not depend on the shim's life: when the shim is killed, the container continues
//! to write to it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::libc::{SIGKILL, SIGTERM};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::timeout;

use super::open::LogProgram;
use crate::blocking::run_blocking;
use crate::exits::{Exits, Watched};
use crate::kernel;
use crate::step::{StepError, failed};

/// The time limit until a program is ready. Go's shim waits for ever, and so does the client.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for reading after the last writer is gone.
const READ_ON_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for its end after SIGTERM.
const TERM_LIMIT: Duration = Duration::from_secs(10);

/// The process whose output a program reads.
#[derive(Debug, Clone, Copy)]
pub struct LoggedProcess<'a> {
    /// The container's id, or the exec's.
    pub id: &'a str,
    /// containerd's namespace.
    pub namespace: &'a str,
    pub exits: &'a Arc<Exits>,
}

/// A program that runs, or has run. It is killed when dropped.
#[derive(Debug)]
pub struct Logger {
    program: PathBuf,
    watched: Arc<Watched>,
    ended: watch::Receiver<bool>,
}

impl Logger {
    /// Starts the program with the reading ends of stdout and stderr, and waits until it is ready.
    pub async fn start(
        program: LogProgram,
        process: LoggedProcess<'_>,
        [stdout, stderr]: [OwnedFd; 2],
    ) -> Result<Self, StepError> {
        let name = format!("the logging program {}", program.path.display());
        let step = format!("start {name}");
        let (ready, ready_writer) = io::pipe().map_err(failed(&step))?;
        let mut ready = pipe::Receiver::from_owned_fd(ready.into()).map_err(failed(&step))?;

        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .env_clear()
            .env("CONTAINER_ID", process.id)
            .env("CONTAINER_NAMESPACE", process.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let fds = vec![stdout, stderr, ready_writer.into()];
        kernel::inherit_from_three(&mut command, fds).map_err(failed(&step))?;
        kernel::with_default_signals(&mut command);
        let exits = Arc::clone(process.exits);
        // Known before the thread ends: while the thread lives, the child is no orphan.
        let spawn = move || command.spawn().map(|child| exits.know(child.id()));
        // Away from the event loop: the file may be on a server that does not answer.
        let known = run_blocking(spawn).await.and_then(|started| started);
        let known = known.map_err(failed(&step))?;
        let watched = Arc::new(Watched::known(known).map_err(failed(format!("watch {name}")))?);
        let (end, ended) = watch::channel(false);
        let dying = Arc::clone(&watched);
        tokio::spawn(async move {
            dying.exit().await;
            end.send_replace(true);
        });
        let logger = Self {
            program: program.path,
            watched,
            ended,
        };

        let mut word = [0];
        match timeout(READY_LIMIT, ready.read(&mut word)).await {
            Ok(Ok(0)) if program.must_signal_ready => {
                Err(format!("{name} did not say that it is ready: it may have ended").into())
            }
            Ok(Ok(_)) => Ok(logger),
            Ok(Err(error)) => Err(failed(step)(error)),
            Err(_) => Err(format!("{name} is not ready after {READY_LIMIT:?}").into()),
        }
    }

    /// Waits for the program's end, which follows the end of its process, and forces it if
    /// necessary.
    pub async fn finish(&self) {
        if self.ends_within(READ_ON_LIMIT).await {
            return;
        }
        self.send(SIGTERM);
        if !self.ends_within(TERM_LIMIT).await {
            tracing::warn!(program = %self.program.display(), "a logging program does not end and is killed");
            self.send(SIGKILL);
        }
    }

    async fn ends_within(&self, limit: Duration) -> bool {
        let mut ended = self.ended.clone();
        timeout(limit, ended.wait_for(|ended| *ended)).await.is_ok()
    }

    fn send(&self, signal: i32) {
        if let Err(error) = self.watched.signal(signal) {
            tracing::debug!(program = %self.program.display(), %error, "signal a logging program");
        }
    }
}

impl Drop for Logger {
    fn drop(&mut self) {
        if !*self.ended.borrow() {
            self.send(SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that runs this script; its stdout and stderr have no writer.
    async fn started(script: &str, must_signal_ready: bool) -> Result<Logger, StepError> {
        let exits = Arc::new(Exits::default());
        let arguments = ["-c", script].map(str::to_owned).to_vec();
        let program = LogProgram {
            path: "/bin/sh".into(),
            arguments,
            must_signal_ready,
        };
        let pipes = [io::pipe().unwrap().0.into(), io::pipe().unwrap().0.into()];
        Logger::start(
            program,
            LoggedProcess {
                id: "web",
                namespace: "n",
                exits: &exits,
            },
            pipes,
        )
        .await
    }

    #[tokio::test]
    async fn a_closed_pipe_means_ready_for_the_older_kind_only() {
        assert!(started("exit 0", false).await.is_ok());
        let error = started("exit 0", true).await.unwrap_err().to_string();
        assert!(error.ends_with("it may have ended"), "{error}");
        assert!(started("echo >&5", true).await.is_ok());
    }

    #[tokio::test]
    async fn the_environment_is_the_containers_name() {
        let wanted =
            r#"test "$CONTAINER_NAMESPACE/$CONTAINER_ID" = n/web && test -z "$CARGO" && echo >&5"#;
        assert!(started(wanted, true).await.is_ok());
    }

    #[tokio::test]
    async fn a_program_that_reads_to_the_end_is_not_signalled() {
        let folder = tempfile::tempdir().unwrap();
        let signalled = folder.path().join("signalled");
        let script = format!(
            "trap ': > {}' TERM; echo >&5; cat <&3 <&4; sleep 0.1",
            signalled.display()
        );
        // a machine may be too slow for it once, but not ten times
        let mut is_left_alone = false;
        for _ in 0..10 {
            let logger = started(&script, true).await.unwrap();
            logger.finish().await;
            assert!(*logger.ended.borrow());
            is_left_alone = std::fs::remove_file(&signalled).is_err();
            if is_left_alone {
                break;
            }
        }
        assert!(is_left_alone);
    }
}
