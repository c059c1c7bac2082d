//! Closes the descriptors that a forked child does not need.
//!
//! The child of a process with threads calls this. So nothing here uses the heap or a lock.
#![allow(unsafe_code)]

use std::os::fd::RawFd;

use nix::libc;
use rustix::io::Errno;

/// Closes all descriptors of this process except `kept`, a sorted list.
///
/// # Errors
/// If some descriptors may still be open.
pub(crate) fn close_all_but(kept: &[RawFd]) -> Result<(), Errno> {
    let mut next = 0;
    for descriptor in kept.iter().map(|descriptor| descriptor.unsigned_abs()) {
        if descriptor > next {
            close_range(next, descriptor - 1)?;
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX)
}

/// Closes no descriptor: none has this number.
///
/// # Errors
/// From a kernel, or a seccomp filter, without close_range(2).
pub(crate) fn probe_close_range() -> Result<(), Errno> {
    close_range(libc::c_uint::MAX, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: the forked process no longer uses these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS)),
    }
}
