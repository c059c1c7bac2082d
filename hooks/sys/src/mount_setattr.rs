//! The syscall mount_setattr(2). No library has it yet.
//!
//! Unsafe, because the kernel is handed a request, which lives until it returns.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use bindguard_core::mount_table::MountAttributes;
use nix::libc;
use rustix::fs::CWD;

pub(crate) use nix::libc::mount_attr;

pub(crate) const NOTHING: mount_attr = mount_attr {
    attr_set: 0,
    attr_clr: 0,
    propagation: 0,
    userns_fd: 0,
};

/// A request to add attributes. A restriction that the mount already has stays.
pub(crate) fn adding(attributes: MountAttributes) -> mount_attr {
    mount_attr {
        attr_set: attributes.bits(),
        attr_clr: MountAttributes::ACCESS_TIMES,
        ..NOTHING
    }
}

/// Changes a mount; with `AT_RECURSIVE` in `flags` the mounts below, too.
///
/// # Errors
/// `EPERM` under a seccomp filter that does not know the call, `EINVAL` where the filesystem cannot
/// be idmapped.
pub(crate) fn mount_setattr(
    mount: impl AsFd,
    flags: libc::c_int,
    request: &mount_attr,
) -> io::Result<()> {
    set_at(mount.as_fd(), c"", libc::AT_EMPTY_PATH | flags, request)
}

/// Maps the ids of a detached mount and of those below it by a user namespace, makes them private,
/// and read-only if requested.
///
/// # Errors
/// `EPERM` under a seccomp filter that does not know the call, `EINVAL` where the filesystem cannot
/// be idmapped.
pub fn map_ids(tree: impl AsFd, namespace: impl AsFd, read_only: bool) -> io::Result<()> {
    let mut request = mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        propagation: libc::MS_PRIVATE,
        userns_fd: namespace.as_fd().as_raw_fd() as u64,
        ..NOTHING
    };
    if read_only {
        request.attr_set |= libc::MOUNT_ATTR_RDONLY;
    }
    mount_setattr(tree, libc::AT_RECURSIVE, &request)
}

/// Makes the call with nosymfollow, Linux 5.14's last addition, for a path without a file. The kernel
/// checks the request before the path.
///
/// # Errors
/// `ENOENT` from a kernel that knows all of it.
pub(crate) fn probe_mount_setattr(nowhere: &CStr) -> io::Result<()> {
    let request = mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSYMFOLLOW,
        ..NOTHING
    };
    set_at(CWD, nowhere, 0, &request)
}

fn set_at(
    folder: BorrowedFd<'_>,
    path: &CStr,
    flags: libc::c_int,
    request: &mount_attr,
) -> io::Result<()> {
    // SAFETY: the request is of the size that is passed with it and the path ends with a zero; the
    // kernel keeps neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            folder.as_raw_fd(),
            path.as_ptr(),
            flags,
            &raw const *request,
            size_of::<mount_attr>(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
