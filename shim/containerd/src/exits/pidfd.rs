//! Waiting for one process, by its pidfd.
//!
//! The event loop sees the pidfd become readable, then waitid(2) with P_PIDFD takes the status of exactly that process:
//! a pid that was used again cannot be meant. It works for a process that is dead already when it is opened, as long as
//! nobody has reaped it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::SystemTime,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};
use tokio::io::{Interest, unix::AsyncFd};

use super::{Exits, Known};
use crate::kernel::Launched;

/// What containerd reports where a status was lost, as Go's shim does.
const LOST_STATUS: u32 = 255;

/// How and when a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// The exit code, or 128 and the signal that ended it.
    pub(crate) status: u32,
    /// When the shim learned of it.
    pub(crate) at: SystemTime,
}

/// A process that cannot be waited for.
#[derive(Debug, thiserror::Error)]
#[error("watch process {pid}")]
pub(crate) struct WatchError {
    pid: u32,
    source: io::Error,
}

/// A child, or a process that becomes one when the runtime goes.
#[derive(Debug)]
pub(crate) struct Watched {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    _known: Known,
}

impl Watched {
    /// Takes hold of a process. Call it while the pid cannot have been used again: before anybody may have reaped it.
    pub(crate) fn open(pid: u32, exits: &Arc<Exits>) -> Result<Self, WatchError> {
        let known = exits.know(pid);
        let failed = |source| WatchError { pid, source };
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let fd = pidfd_open(raw, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        let pidfd = crate::kernel::watch(fd, Interest::READABLE).map_err(failed)?;
        Ok(Self { pid, pidfd, _known: known })
    }

    /// A child that was just started. One that cannot be watched is killed, and is an orphan then.
    pub(crate) fn child(Launched { pid, pidfd }: Launched, exits: &Arc<Exits>) -> io::Result<Self> {
        let known = exits.know(pid);
        let pidfd = crate::kernel::watch(pidfd, Interest::READABLE).inspect_err(|_| {
            // Nobody has reaped it: the number is still its own.
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
            raw.map(|raw| kill_process(raw, Signal::KILL));
        })?;
        Ok(Self { pid, pidfd, _known: known })
    }

    /// The process's number.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal; the pid cannot be somebody else's.
    pub(crate) fn signal(&self, signal: i32) -> io::Result<()> {
        crate::kernel::send_signal(self.pidfd.get_ref().as_fd(), signal)
    }

    /// Has the process ended, reaped or not? A pidfd is readable from then on.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    /// Waits until the process has ended and reaps it.
    pub(crate) async fn exit(&self) -> Exit {
        let status = loop {
            match self.pidfd.readable().await {
                Ok(mut ready) => match self.reap() {
                    Some(status) => break status,
                    // Woken too soon; the kernel will say it again.
                    None => ready.clear_ready(),
                },
                Err(error) => {
                    tracing::error!(pid = self.pid, %error, "cannot wait for a process");
                    break LOST_STATUS;
                }
            }
        };
        Exit { status, at: SystemTime::now() }
    }

    fn reap(&self) -> Option<u32> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd.get_ref().as_fd()), options) {
            Ok(Some(status)) => {
                let code = status.exit_status().map(|code| code.unsigned_abs());
                let signal = || status.terminating_signal().map(|signal| 128 + signal.unsigned_abs());
                Some(code.or_else(signal).unwrap_or(LOST_STATUS))
            }
            Ok(None) => None,
            Err(error) => {
                // ECHILD: somebody else is its parent, so the kernel tells us that it ended but not how.
                tracing::warn!(pid = self.pid, %error, "the exit status of a process is lost");
                Some(LOST_STATUS)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child whose pid alone is kept: the test waits for it as the shim does.
    fn child(program: &str, args: &[&str]) -> u32 {
        let mut command = std::process::Command::new(program);
        command.args(args).spawn().map(|child| child.id()).unwrap()
    }

    async fn status_of(script: &str, wait_first: bool) -> u32 {
        let exits = Arc::new(Exits::default());
        let pid = child("sh", &["-c", script]);
        if wait_first {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        Watched::open(pid, &exits).unwrap().exit().await.status
    }

    #[tokio::test]
    async fn codes_and_signals_of_the_living_and_the_dead() {
        assert_eq!(status_of("exit 7", false).await, 7);
        assert_eq!(status_of("exit 7", true).await, 7);
        assert_eq!(status_of("kill -9 $$", true).await, 137);
        assert_eq!(status_of("sleep 0.1; exit 255", false).await, 255);
    }

    #[tokio::test]
    async fn a_real_time_signal_reaches_its_process() {
        let exits = Arc::new(Exits::default());
        let pid = child("sleep", &["100"]);
        let watched = Watched::open(pid, &exits).unwrap();
        watched.signal(40).unwrap();
        assert_eq!(watched.exit().await.status, 128 + 40);
    }
}
