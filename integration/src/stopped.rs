//! A guard that is stopped at one of its fault points, for stories in which something happens right there; then it goes on.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Far from what a guard takes for all of its work.
const LIMIT: Duration = Duration::from_secs(30);

/// Killed when it is dropped.
#[derive(Debug)]
pub struct StoppedGuard(Child);

impl StoppedGuard {
    /// Starts a guard and waits until it has stopped at this place. `more`: other faults, with a comma behind each.
    pub fn at(place: &str, more: &str, mut guard: Command) -> Result<Self> {
        guard.env("BINDGUARD_FAULT", format!("{more}stop:{place}")).stdout(Stdio::null()).stderr(Stdio::null());
        let mut stopped = Self(guard.spawn().context("start a guard")?);
        let deadline = Instant::now() + LIMIT;
        while !stopped.is_stopped()? {
            if let Some(status) = stopped.0.try_wait().context("wait for a guard")? {
                bail!("the guard does not come to {place}: {status}");
            }
            ensure!(Instant::now() < deadline, "the guard neither comes to {place} nor ends");
            thread::sleep(Duration::from_millis(2));
        }
        Ok(stopped)
    }

    /// Lets it go on, as often as it comes to the place again, until its runtime has ended.
    pub fn go_on(mut self) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into().context("pid of a guard")?);
        let deadline = Instant::now() + LIMIT;
        loop {
            kill(pid, Signal::SIGCONT).context("let a guard go on")?;
            if let Some(status) = self.0.try_wait().context("wait for a guard")? {
                ensure!(status.success(), "the guard that was stopped ended with {status}");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the guard that was stopped does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// See proc_pid_stat(5).
    fn is_stopped(&self) -> Result<bool> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).context("look at a guard")?;
        Ok(stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T')))
    }
}

impl Drop for StoppedGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
