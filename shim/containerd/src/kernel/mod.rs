//! The system calls for which the libraries have no safe form. All `unsafe` of the crate is in this
//! folder.

mod memory;
mod mounts;
mod signals;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub use memory::{release_stack, set_environment};
pub use mounts::{LoopMode, attach_loop_device, child_in_user_namespace, free_loop_device};
pub use signals::{die_with_this_thread, inherit, inherit_from_three, with_default_signals};
pub use signals::{forward_signal, ignore_stray_signals};

/// Sends any signal number, real-time ones included, through a pidfd: rustix's type names only the
/// classic signals.
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> io::Result<()> {
    let fd = pidfd.as_fd().as_raw_fd();
    // SAFETY: pidfd_send_signal(2) reads a descriptor that outlives the call, two numbers and a
    // null siginfo, which means "as kill(2) would send it". The call writes no memory of this
    // process.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            fd,
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    Ok(Errno::result(sent).map(drop)?)
}

/// Registers a descriptor in the event loop.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor, so a registered descriptor is open. No code in this
    // crate removes or replaces the descriptor in the AsyncFd.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
