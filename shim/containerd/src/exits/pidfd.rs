//! Waits for a process by its pidfd.
//!
//! When the pidfd becomes readable, waitid(2) with P_PIDFD takes the status of exactly this
//! process, never of a later process with the same pid. A pidfd can also be opened for a zombie.
//! The orphans' reaper forgets a process when it is reaped: then the kernel may reuse the pid.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use nix::libc::ESRCH;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process, pidfd_open, waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Exits, KnownPid};
use crate::blocking::lock;
use crate::step::{StepError, failed};

/// The status that containerd gets when the real status is lost, as with Go's shim.
const LOST_STATUS: u32 = 255;

/// For a look at a child that leaves it to be reaped.
const LOOK: WaitIdOptions = WaitIdOptions::EXITED
    .union(WaitIdOptions::NOHANG)
    .union(WaitIdOptions::NOWAIT);

/// The status and the time of a process's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 plus the number of the signal that ended it.
    pub status: u32,
    /// The time at which the shim learned of it.
    pub at: SystemTime,
}

/// A child, or a process that becomes a child when the runtime ends.
#[derive(Debug)]
pub struct Watched {
    pub pid: u32,
    process: WatchedState,
}

#[derive(Debug)]
enum WatchedState {
    /// Not reaped yet by `exit`.
    Present {
        pidfd: AsyncFd<OwnedFd>,
        known: Mutex<Option<KnownPid>>,
    },
    /// The orphans' reaper reaped it before its pid was known.
    Reaped(Exit),
}

impl Watched {
    /// Opens a process. Call `open` before the process can have been reaped: until then the kernel
    /// does not reuse the pid.
    pub fn open(pid: u32, exits: &Arc<Exits>) -> Result<Self, StepError> {
        Self::known(exits.know(pid))
    }

    /// Opens a process that is known already.
    pub fn known(known: KnownPid) -> Result<Self, StepError> {
        let step = format!("watch process {}", known.pid);
        Self::watch(known).map_err(failed(step))
    }

    /// A child that was just started. If it cannot be watched it is killed, and becomes an orphan.
    pub fn child(pid: u32, exits: &Arc<Exits>) -> io::Result<Self> {
        Self::watch(exits.know(pid)).inspect_err(|_| kill_child(pid))
    }

    fn watch(known: KnownPid) -> io::Result<Self> {
        let pid = known.pid;
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or(io::ErrorKind::InvalidInput)?;
        let fd = pidfd_open(raw, PidfdFlags::empty())?;
        Ok(Self {
            pid,
            process: WatchedState::Present {
                pidfd: crate::kernel::watch(fd, Interest::READABLE)?,
                known: Mutex::new(Some(known)),
            },
        })
    }

    /// A process that has ended, with the status that the orphans' reaper kept.
    pub fn reaped(pid: u32, exit: Exit) -> Self {
        Self {
            pid,
            process: WatchedState::Reaped(exit),
        }
    }

    /// True if it is a child of this process, not yet reaped.
    pub fn is_child(&self) -> bool {
        let WatchedState::Present { pidfd, .. } = &self.process else {
            return false;
        };
        let looked = waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), LOOK);
        !matches!(looked, Err(Errno::CHILD))
    }

    /// Sends a signal; it cannot reach a later process with the same pid.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        match &self.process {
            WatchedState::Present { pidfd, .. } => {
                crate::kernel::send_signal(pidfd.get_ref().as_fd(), signal)
            }
            WatchedState::Reaped(_) => Err(io::Error::from_raw_os_error(ESRCH)),
        }
    }

    /// True if the process has ended, reaped or not: its pidfd is readable from then on.
    pub fn has_ended(&self) -> bool {
        let WatchedState::Present { pidfd, .. } = &self.process else {
            return true;
        };
        let mut fds = [PollFd::new(pidfd.get_ref(), PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    /// Waits until the process has ended and reaps it.
    pub async fn exit(&self) -> Exit {
        let (pidfd, known) = match &self.process {
            WatchedState::Present { pidfd, known } => (pidfd, known),
            WatchedState::Reaped(exit) => return *exit,
        };
        let status = loop {
            let mut ready = match pidfd.readable().await {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!(pid = self.pid, %error, "cannot wait for a process");
                    break LOST_STATUS;
                }
            };
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), options) {
                Ok(Some(status)) => break status_of(&status),
                // Woken too early; the kernel will wake this again.
                Ok(None) => ready.clear_ready(),
                Err(error) => {
                    // ECHILD: the process is not the shim's child, so the kernel reports the end
                    // without the status.
                    tracing::warn!(pid = self.pid, %error, "the exit status of a process is lost");
                    break LOST_STATUS;
                }
            }
        };
        lock(known).take();
        Exit {
            status,
            at: SystemTime::now(),
        }
    }
}

/// Kills a process that has no pidfd. A child that is not reaped yet still has its pid; any other
/// process is left alone.
pub fn kill_child(pid: u32) {
    if let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw)
        && waitid(WaitId::Pid(raw), LOOK).is_ok()
    {
        let _ = kill_process(raw, Signal::KILL);
    }
}

/// The exit code, or 128 plus the signal.
pub fn status_of(status: &WaitIdStatus) -> u32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code.unsigned_abs(),
        (None, Some(signal)) => 128 + signal.unsigned_abs(),
        (None, None) => LOST_STATUS,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// A child of which only the pid is kept: the test waits for it like the shim.
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
    async fn only_a_child_is_killed_by_its_pid() {
        let mut parent = std::process::Command::new("sh")
            .args(["-c", "sleep 100 & echo $!; read end"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(parent.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let grandchild = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        kill_child(grandchild.as_raw_pid().unsigned_abs());
        assert!(rustix::process::test_kill_process(grandchild).is_ok());
        kill_process(grandchild, Signal::KILL).unwrap();
        kill_child(parent.id());
        assert_eq!(parent.wait().unwrap().signal(), Some(9));
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
