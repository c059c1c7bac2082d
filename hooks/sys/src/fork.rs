//! Forks a child that never returns to the caller's code.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::unistd::{ForkResult, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, pidfd_open,
    pidfd_send_signal, set_dumpable_behavior, set_parent_process_death_signal, waitid,
};

use crate::descriptors::close_all_but;

/// Limit of the wait for a child that was killed, or whose socket is closed. After it, a thread
/// waits.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of the stack of a thread that waits for the end of a child.
const REAPER_STACK: usize = 64 * 1024;

/// Runs `work` in a child, which ends with it. `work` must not use a lock that another thread of
/// the caller may hold. glibc keeps the heap usable across fork(2).
pub(crate) fn fork_child(work: impl FnOnce()) -> io::Result<i32> {
    // SAFETY: the child runs `work` and ends: nothing of the caller is dropped or flushed twice.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child.as_raw()),
        ForkResult::Child => {
            // A panic must not unwind from here: the caller would go on twice.
            let _ = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: ends the process without the exit handlers that its parent registered.
            unsafe { libc::_exit(0) }
        }
    }
}

/// A child process. It is reaped when it ends, at the latest some time after the end of this value.
#[derive(Debug)]
pub(crate) struct ChildProcess(Option<Unreaped>);

/// A child of which the kernel keeps at least the exit status.
#[derive(Debug)]
struct Unreaped {
    pid: i32,
    pidfd: OwnedFd,
}

impl ChildProcess {
    /// Runs `work` in a child that has only these descriptors of the caller, which are sorted. The
    /// child ends with the thread that started it.
    pub(crate) fn start(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Self> {
        let parent = getpid();
        let pid = fork_child(|| {
            // Nothing of a container may look into this copy of the agent.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            end_with_parent(true);
            // The child must not keep a pipe open while it hangs. And the parent may have ended
            // before the kernel knew that the child ends with it.
            if close_all_but(kept).is_ok() && getppid() == Some(parent) {
                work();
            }
        })?;
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        // A child that was not waited for keeps its pid.
        let pidfd = pidfd_open(process, PidfdFlags::empty())?;
        Ok(Self(Some(Unreaped { pid, pidfd })))
    }

    /// Its pid, for files below `/proc`.
    pub(crate) fn pid(&self) -> i32 {
        self.0.as_ref().map_or(0, |child| child.pid)
    }

    /// Kills the child, if the child runs.
    pub(crate) fn kill(&self) {
        if let Some(child) = &self.0 {
            let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
        }
    }

    /// Its pidfd, which can be read when the child ended.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_ref()?.pidfd.as_fd())
    }

    /// Waits until it ended.
    pub(crate) fn wait(&self) {
        while self
            .pidfd()
            .is_some_and(|pidfd| !is_readable(pidfd, Duration::from_secs(3600)))
        {}
    }

    /// True if it ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.pidfd()
            .is_none_or(|pidfd| is_readable(pidfd, Duration::ZERO))
    }
}

impl Unreaped {
    fn reap(self) {
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let Some(child) = self.0.take() else { return };
        if is_readable(child.pidfd.as_fd(), END_TIMEOUT) {
            return child.reap();
        }
        let reaper = thread::Builder::new()
            .name("reap-child".to_owned())
            .stack_size(REAPER_STACK);
        // Without a thread the child is reaped when this process ends.
        let _ = reaper.spawn(|| child.reap());
    }
}

/// Lets the kernel kill the calling process when the thread that forked it ends, or not.
pub(crate) fn end_with_parent(ends: bool) {
    let _ = set_parent_process_death_signal(ends.then_some(Signal::KILL));
}

/// Polls until something can be read; ignores signals of this process.
pub(crate) fn is_readable(descriptor: BorrowedFd<'_>, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(
            &mut [PollFd::new(&descriptor, PollFlags::IN)],
            Some(&timeout),
        ) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}
