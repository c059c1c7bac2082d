//! A guard that stops at a fault point, so that a story can act at this moment, and then continues.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::waiting::until;

/// Killed when it is dropped.
#[derive(Debug)]
pub struct StoppedGuard(Child);

impl StoppedGuard {
    /// Starts a guard and waits until the guard has stopped at `place`. `more` names further
    /// faults, each with a comma at its end.
    pub fn at(place: &str, more: &str, mut guard: Command) -> Result<Self> {
        guard
            .env("BINDGUARD_FAULT", format!("{more}stop:{place}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut stopped = Self(guard.spawn().context("start a guard")?);
        until(&format!("the guard is stopped at {place}"), || {
            if let Some(status) = stopped.0.try_wait().context("wait for a guard")? {
                bail!("the guard does not come to {place}: {status}");
            }
            is_stopped(stopped.0.id())
        })?;
        Ok(stopped)
    }

    /// Lets it go on, as often as it comes to the place again, until its runtime has ended.
    pub fn go_on(mut self) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into().context("pid of a guard")?);
        until("the guard that was stopped has ended", || {
            kill(pid, Signal::SIGCONT).context("let a guard go on")?;
            let ended = self.0.try_wait().context("wait for a guard")?;
            ensure!(
                ended.is_none_or(|status| status.success()),
                "the guard that was stopped ended with {ended:?}"
            );
            Ok(ended.is_some())
        })
    }
}

/// True if no thread of a process runs; see proc_pid_stat(5).
pub fn is_stopped(pid: u32) -> Result<bool> {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    for task in fs::read_dir(&tasks).with_context(|| format!("read {}", tasks.display()))? {
        let stat = task.context("read a thread")?.path().join("stat");
        // A thread that has just ended has no state; the caller tries again.
        let stat = fs::read_to_string(&stat).unwrap_or_default();
        if !stat
            .rsplit_once(") ")
            .is_some_and(|(_, state)| state.starts_with('T'))
        {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Drop for StoppedGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
