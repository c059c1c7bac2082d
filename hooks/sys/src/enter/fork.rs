//! The fork of the child, and its calls that Rust cannot check.
//!
//! The process that forks has threads. So the child uses neither the heap nor a lock, and never returns to the caller's code. It is
//! forked once, without SIGCHLD: a second fork would copy the agent's page tables twice, and every copy makes all threads of
//! the agent fault on the pages that they write next.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::libc;
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use rustix::thread::UnshareFlags;

use super::is_readable;

/// Limit of the wait for a child that was killed, or whose socket is closed.
const PATIENCE: Duration = Duration::from_secs(1);

/// A child process. It is reaped when this value ends, if it ends soon; otherwise when the agent ends.
#[derive(Debug)]
pub(super) struct ChildProcess(OwnedFd);

impl ChildProcess {
    /// Runs `work` in a child.
    pub(super) fn start(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Self> {
        let mut pidfd: RawFd = -1;
        // SAFETY: without a stack of its own the child goes on with a copy of this one, as after fork(2). It makes plain syscalls,
        // uses neither the heap nor a lock, and never returns to the caller's code. The kernel writes the pidfd before it returns.
        match unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_PIDFD, 0, &raw mut pidfd, 0, 0) } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                // SAFETY: plain syscalls. Nothing of the container may look into this copy of the agent.
                unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
                close_others(kept);
                work();
                // SAFETY: ends the process without running what its copy of this one has registered.
                unsafe { libc::_exit(0) }
            }
            // SAFETY: the descriptor is new, and no other value owns it.
            _ => Ok(Self(unsafe { OwnedFd::from_raw_fd(pidfd) })),
        }
    }

    /// Kills it, if it has not ended.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }

    /// True until it ends.
    pub(super) fn is_alive(&self) -> bool {
        !is_readable(self.as_fd(), Duration::ZERO)
    }

    fn reap(&self) {
        // SAFETY: the kernel fills the structure, which nothing reads. `__WALL`: a child without SIGCHLD is not waited for otherwise.
        unsafe {
            let mut info: libc::siginfo_t = mem::zeroed();
            let pidfd = self.0.as_raw_fd().unsigned_abs();
            libc::waitid(libc::P_PIDFD, pidfd, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::__WALL);
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if is_readable(self.as_fd(), PATIENCE) {
            self.reap();
        }
    }
}

impl AsFd for ChildProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Closes every descriptor that is not `kept`: the child must not keep a pipe of anyone open while it hangs.
fn close_others(kept: &[RawFd]) {
    let mut next = 0;
    for descriptor in kept.iter().map(|descriptor| descriptor.unsigned_abs()) {
        if descriptor > next {
            close_range(next, descriptor - 1);
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX);
}

fn close_range(first: libc::c_uint, last: libc::c_uint) {
    // SAFETY: this copy of the process uses none of these descriptors any more.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Moves the calling process into a copy of its mount namespace.
pub(super) fn unshare_mounts() -> Result<(), Errno> {
    // SAFETY: of the flags, only `FILES` makes descriptors of other threads unusable; it is not among these.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
