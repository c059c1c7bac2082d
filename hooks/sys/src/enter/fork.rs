//! The fork of the child, its end, and its calls that Rust cannot check.
//!
//! The process that forks has threads. So the child uses neither the heap nor a lock, and never
//! returns to the caller's code. It is forked once, without SIGCHLD: a second fork would copy the
//! agent's page tables twice, and every copy makes all threads of the agent fault on the pages that
//! they write next.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::libc;
use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, pidfd_send_signal};
use rustix::thread::UnshareFlags;

use super::is_readable;
use crate::descriptors::close_all_but;

/// Limit of children of this process. Each may wait for a server or a daemon of its container.
const MAX_CHILDREN: usize = 32;

/// Limit of the wait for a child that was killed, or whose socket is closed. After it, a thread
/// waits.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of the stack of a thread that waits for the end of a child.
const REAPER_STACK: usize = 64 * 1024;

/// The children that were not reaped yet.
static CHILDREN: AtomicUsize = AtomicUsize::new(0);

/// A child process. It is reaped when it ends, at the latest some time after the end of this value.
#[derive(Debug)]
pub(super) struct ChildProcess(Option<Unreaped>);

/// A child of which the kernel keeps at least the exit status.
#[derive(Debug)]
struct Unreaped {
    pid: i32,
    pidfd: OwnedFd,
    _counted: Counted,
}

/// One of [`MAX_CHILDREN`].
#[derive(Debug)]
struct Counted;

impl ChildProcess {
    /// Runs `work` in a child, in new namespaces by the flags of clone(2).
    pub(super) fn start(
        namespaces: libc::c_int,
        kept: &[RawFd],
        work: impl FnOnce(),
    ) -> io::Result<Self> {
        let counted = Counted::one().ok_or_else(|| io::Error::other(TooManyChildren))?;
        let (mut pidfd, parent): (RawFd, _) = (-1, getpid());
        let flags = libc::CLONE_PIDFD | namespaces;
        // SAFETY: without a stack of its own the child goes on with a copy of this one, as after
        // fork(2). It makes plain syscalls, uses neither the heap nor a lock, and never returns to
        // the caller's code. The kernel writes the pidfd before it returns.
        match unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                // SAFETY: plain syscalls. Nothing of the container may look into this copy of the
                // agent.
                unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
                end_with_parent(true);
                // The child must not keep a pipe of anyone open while it hangs. And the parent may
                // have ended before the kernel knew that the child ends with it.
                if close_all_but(kept).is_ok() && getppid() == Some(parent) {
                    work();
                }
                // SAFETY: ends the process without running what its copy of this one has
                // registered.
                unsafe { libc::_exit(0) }
            }
            pid => {
                // SAFETY: the descriptor is new, and no other value owns it.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                Ok(Self(Some(Unreaped {
                    pid: pid as i32,
                    pidfd,
                    _counted: counted,
                })))
            }
        }
    }

    /// Its pid, for files below `/proc`.
    pub(super) fn pid(&self) -> i32 {
        self.0.as_ref().map_or(0, |child| child.pid)
    }

    /// Kills it, if it has not ended.
    pub(super) fn kill(&self) {
        if let Some(child) = &self.0 {
            let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
        }
    }

    /// A descriptor by which its end is seen, also after this value.
    pub(super) fn pidfd(&self) -> Option<OwnedFd> {
        self.0.as_ref()?.pidfd.try_clone().ok()
    }
}

/// Why no child was started.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_CHILDREN} children wait in containers already")]
struct TooManyChildren;

impl Counted {
    fn one() -> Option<Self> {
        let more = |count: usize| (count < MAX_CHILDREN).then_some(count + 1);
        CHILDREN
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        CHILDREN.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Unreaped {
    fn reap(self) {
        // SAFETY: the kernel fills the structure, which nothing reads. `__WALL`: a child without
        // SIGCHLD is not waited for otherwise.
        unsafe {
            let mut info: libc::siginfo_t = mem::zeroed();
            let pidfd = self.pidfd.as_raw_fd().unsigned_abs();
            libc::waitid(
                libc::P_PIDFD,
                pidfd,
                &raw mut info,
                libc::WEXITED | libc::__WALL,
            );
        }
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
        // Without a thread the child is reaped when the agent ends.
        let _ = reaper.spawn(|| child.reap());
    }
}

/// Lets the kernel kill the calling process when the thread that forked it ends, or not.
pub(super) fn end_with_parent(ends: bool) {
    let signal = if ends { libc::SIGKILL } else { 0 };
    // SAFETY: a plain syscall that takes a number.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) };
}

/// Moves the calling process into a copy of its mount namespace.
pub(super) fn unshare_mounts() -> Result<(), Errno> {
    // SAFETY: of the flags, only `FILES` makes descriptors of other threads unusable; it is not
    // among these.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
