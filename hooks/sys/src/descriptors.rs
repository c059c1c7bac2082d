//! Closes the descriptors that a forked child does not need.
//!
//! The child of a process with threads calls this. So nothing here uses the heap or a lock.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use nix::libc;
use rustix::fs::{Mode, OFlags, RawDir, open};
use rustix::io::Errno;

/// Bytes for entries of a folder: some dozens of descriptors at a time.
const ENTRIES: usize = 1024;

/// Closes all descriptors of this process except `kept`, a sorted list.
///
/// # Errors
/// If some descriptors may still be open.
pub(crate) fn close_all_but(kept: &[RawFd]) -> Result<(), Errno> {
    // Linux before 5.9 has no close_range(2), and some seccomp filters deny it.
    close_ranges(kept).or_else(|_| close_listed(kept))
}

fn close_ranges(kept: &[RawFd]) -> Result<(), Errno> {
    let mut next = 0;
    for descriptor in kept.iter().map(|descriptor| descriptor.unsigned_abs()) {
        if descriptor > next {
            close_range(next, descriptor - 1)?;
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: the forked process no longer uses these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS)),
    }
}

/// Closes the descriptors that `/proc/self/fd` lists. The kernel lists descriptors by number, so
/// closing the current entry skips no later entry.
fn close_listed(kept: &[RawFd]) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(c"/proc/self/fd", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::uninit(); ENTRIES];
    let mut entries = RawDir::new(folder.as_fd(), &mut buffer);
    while let Some(entry) = entries.next() {
        let Some(descriptor) = number(entry?.file_name()) else {
            continue;
        };
        if descriptor != folder.as_raw_fd() && !kept.contains(&descriptor) {
            // SAFETY: as above.
            unsafe { rustix::io::close(descriptor) };
        }
    }
    Ok(())
}

/// `None` for `.` and `..`.
fn number(name: &CStr) -> Option<RawFd> {
    name.to_str().ok()?.parse().ok()
}
