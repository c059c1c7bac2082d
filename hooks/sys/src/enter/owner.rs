//! The owners of namespaces, and the namespaces of processes: ioctl_nsfs(2) and the same for a
//! pidfd. No library has these calls.
//!
//! Unsafe, because the kernel returns the number of a new descriptor.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::libc;
use rustix::io::Errno;

/// `_IO(0xb7, 1)` and `_IO(0xb7, 2)`
const NS_GET_USERNS: libc::Ioctl = 0xb701;
const NS_GET_PARENT: libc::Ioctl = 0xb702;

/// `_IOR(0xb7, 5, u64)`
const NS_GET_MNTNS_ID: libc::Ioctl = 0x8008_b705_u32 as libc::Ioctl;

/// A namespace of a process: its name below `/proc/PID`, and the request for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    request: libc::Ioctl,
}

/// `PIDFD_GET_MNT_NAMESPACE`, `_IO(0xff, 3)`
pub(super) const MOUNT: Kind = Kind {
    name: "ns/mnt",
    request: 0xff03,
};

/// `PIDFD_GET_USER_NAMESPACE`, `_IO(0xff, 9)`
pub(super) const USER: Kind = Kind {
    name: "ns/user",
    request: 0xff09,
};

/// The namespace of the process that a pidfd refers to: Linux 6.11 and newer. The kernel takes no
/// lock that the process can hold.
///
/// # Errors
/// `ENOTTY` or `EINVAL` from an older kernel, `ESRCH` if the process ended.
pub(super) fn namespace_of(pidfd: &OwnedFd, kind: Kind) -> io::Result<File> {
    related(pidfd, kind.request)
}

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
/// As [`owner_of`], and `EPERM` for the initial user namespace.
pub(super) fn parent_of(users: &File) -> io::Result<File> {
    related(users, NS_GET_PARENT)
}

/// The number of a mount namespace for statmount(2), which the kernel never reuses: Linux 6.11 and
/// newer.
///
/// # Errors
/// `ENOTTY` or `EINVAL` from an older kernel, `ENOTTY` for any other file.
pub(super) fn mount_namespace_id(namespace: &File) -> io::Result<u64> {
    // A process may have replaced its descriptor by a device, which interprets the request
    // differently. The kernel prints `mnt:[...]` only for a mount namespace; paths begin with `/`.
    let link = fs::read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd()))?;
    if !link.as_os_str().as_bytes().starts_with(b"mnt:[") {
        return Err(Errno::NOTTY.into());
    }
    let mut id = 0_u64;
    // SAFETY: the kernel writes the number to this place, and keeps nothing.
    match unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_MNTNS_ID, &raw mut id) } {
        0 => Ok(id),
        _ => Err(io::Error::last_os_error()),
    }
}

fn related(file: &impl AsRawFd, request: libc::Ioctl) -> io::Result<File> {
    // SAFETY: the argument of the request is unused, and 0 for a pidfd. The returned descriptor is
    // new, and no value owns it yet.
    unsafe {
        match libc::ioctl(file.as_raw_fd(), request, 0) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(File::from_raw_fd(descriptor)),
        }
    }
}
