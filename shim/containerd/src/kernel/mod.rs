//! The system calls without a safe form in the libraries. All `unsafe` of this crate is in this folder.

mod launch;
mod memory;
mod mounts;
mod signals;

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
};

use nix::libc;
use rustix::io::fcntl_dupfd_cloexec;
use tokio::io::{Interest, unix::AsyncFd};

pub(crate) use launch::{Launch, Launched};
pub(crate) use memory::{give_back_heap, give_back_stack, set_environment};
pub(crate) use mounts::{LoopMode, attach_loop_device, child_in_user_namespace, free_loop_device, map_ids};
pub(crate) use signals::{forward_signal, pass_over_signals};

/// Sends any signal number, real-time ones included, through a pidfd: rustix's type names the classic ones only.
pub(crate) fn send_signal(pidfd: impl AsFd, signal: i32) -> io::Result<()> {
    let fd = pidfd.as_fd().as_raw_fd();
    // SAFETY: pidfd_send_signal(2) reads a descriptor that outlives the call, two numbers and a null siginfo, which means "as
    // kill(2) would send it"; it writes no memory of this process.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, std::ptr::null::<libc::siginfo_t>(), 0) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the child inherit these descriptors as 3, 4, 5 and so on; all others are closed in it.
pub(crate) fn inherit_from_three(command: &mut std::process::Command, fds: Vec<OwnedFd>) -> io::Result<()> {
    const FIRST: RawFd = 3;
    let Some(one) = fds.first() else { return Ok(()) };
    let end = FIRST + RawFd::try_from(fds.len()).map_err(io::Error::other)?;
    // Numbers above the targets, so that none is overwritten before its turn.
    let sources: Vec<OwnedFd> = fds.iter().map(|fd| fcntl_dupfd_cloexec(fd, end)).collect::<Result<_, _>>()?;
    // Between fork and exec `Command` has its own pipe, which reports a failed exec. While these numbers are in use the pipe
    // gets a higher number and is not overwritten.
    let mut taken = Vec::new();
    loop {
        let place = fcntl_dupfd_cloexec(one, FIRST)?;
        if place.as_raw_fd() >= end {
            break;
        }
        taken.push(place);
    }
    // SAFETY: between fork and exec the closure only calls dup2(2), on descriptors that it owns itself, and neither allocates
    // nor takes a lock. dup2 replaces only copies of `taken` in the child, or descriptors that exec closes.
    unsafe {
        command.pre_exec(move || {
            let _places_stay_taken = &taken;
            for (place, source) in (FIRST..end).zip(&sources) {
                if libc::dup2(source.as_raw_fd(), place) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    Ok(())
}

/// Registers a descriptor in the event loop.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor, which is thus open while it is registered; no code in this crate removes it or
    // replaces the one inside.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
