//! The fork of the child, and its calls that Rust cannot check.
//!
//! The process that forks has threads. So the child uses neither the heap nor a lock, and never returns to the caller's code.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use nix::libc;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::UnshareFlags;

/// Runs `work` in a child that init reaps, and returns its pidfd.
pub(super) fn start(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Option<OwnedFd>> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the first child makes plain syscalls and ends. The second one does, too: `work` uses neither the heap nor a
    // lock, and never returns to the caller's code.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            drop(write);
            waitpid(child, None)?;
            let mut bytes = [0; 4];
            if rustix::io::read(&read, &mut bytes)? != bytes.len() {
                return Err(io::Error::other("it could not fork"));
            }
            let pid = Pid::from_raw(i32::from_ne_bytes(bytes)).ok_or(io::ErrorKind::InvalidData)?;
            Ok(pidfd_open(pid, PidfdFlags::empty()).ok())
        }
        ForkResult::Child => {
            // SAFETY: as above.
            if let Ok(ForkResult::Child) = unsafe { fork() } {
                // SAFETY: plain syscalls. Nothing of the container may look into this copy of the agent.
                unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
                let _ = rustix::io::write(&write, &std::process::id().to_ne_bytes());
                close_others(kept);
                work();
            }
            // SAFETY: ends the process without running what its copy of this one has registered.
            unsafe { libc::_exit(0) }
        }
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
