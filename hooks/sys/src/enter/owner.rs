//! The owners of namespaces: ioctl_nsfs(2). No library has these calls.
//!
//! Unsafe, because the kernel returns the number of a new descriptor.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use nix::libc;

/// `_IO(0xb7, 1)` and `_IO(0xb7, 2)`
const NS_GET_USERNS: libc::Ioctl = 0xb701;
const NS_GET_PARENT: libc::Ioctl = 0xb702;

/// The user namespace that owns a namespace.
///
/// # Errors
/// `EPERM` if it is neither that of the calling thread nor a descendant of it.
pub(super) fn owner_of(namespace: &File) -> io::Result<File> {
    related(namespace, NS_GET_USERNS)
}

/// The parent of a user namespace.
///
/// # Errors
/// As [`owner_of`], and `EPERM` for the initial one.
pub(super) fn parent_of(users: &File) -> io::Result<File> {
    related(users, NS_GET_PARENT)
}

fn related(namespace: &File, request: libc::Ioctl) -> io::Result<File> {
    // SAFETY: the request has no argument. The descriptor that it returns is new, and no other
    // value owns it.
    unsafe {
        match libc::ioctl(namespace.as_raw_fd(), request) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(File::from_raw_fd(descriptor)),
        }
    }
}
