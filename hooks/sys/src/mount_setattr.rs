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

/// Adds these attributes to a mount. Everything that the mount denies already stays denied.
///
/// # Errors
/// `EPERM` under a seccomp filter that does not know the call.
pub(crate) fn mount_setattr(mount: impl AsFd, attributes: MountAttributes) -> io::Result<()> {
    set(mount.as_fd(), 0, &request(attributes))
}

/// As [`mount_setattr`], without the attributes `cleared`, and sets the propagation (`MS_PRIVATE`,
/// `MS_SLAVE`; 0 leaves it) and the idmapping of a user namespace.
///
/// # Errors
/// As [`mount_setattr`], and `EINVAL` where the filesystem cannot be idmapped.
pub(crate) fn mount_setattr_in_full(
    mount: impl AsFd,
    attributes: MountAttributes,
    cleared: MountAttributes,
    propagation: u64,
    idmap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let plain = request(attributes);
    let idmapped = if idmap.is_some() {
        libc::MOUNT_ATTR_IDMAP
    } else {
        0
    };
    let userns_fd = idmap.map_or(0, |namespace| namespace.as_raw_fd() as u64);
    set(
        mount.as_fd(),
        0,
        &libc::mount_attr {
            attr_set: plain.attr_set | idmapped,
            attr_clr: plain.attr_clr | cleared.bits(),
            propagation,
            userns_fd,
        },
    )
}

/// Makes a private mount shared: the mount gets a new peer group.
///
/// # Errors
/// As [`mount_setattr`].
pub(crate) fn share(mount: impl AsFd) -> io::Result<()> {
    let request = libc::mount_attr {
        propagation: libc::MS_SHARED,
        ..NOTHING
    };
    set(mount.as_fd(), 0, &request)
}

/// Sets the propagation of a mount and of all mounts below it, and adds these denials to each.
///
/// # Errors
/// As [`mount_setattr`].
pub(crate) fn mount_setattr_below(
    mount: impl AsFd,
    denied: MountAttributes,
    propagation: u64,
) -> io::Result<()> {
    let request = libc::mount_attr {
        attr_set: denied.bits(),
        propagation,
        ..NOTHING
    };
    set(mount.as_fd(), libc::AT_RECURSIVE, &request)
}

/// Maps the ids of a detached mount and of those below it by a user namespace, makes them private,
/// and read-only if requested.
///
/// # Errors
/// As [`mount_setattr`], and `EINVAL` where the filesystem cannot be idmapped.
pub fn map_ids(tree: impl AsFd, namespace: impl AsFd, read_only: bool) -> io::Result<()> {
    let read_only = if read_only {
        libc::MOUNT_ATTR_RDONLY
    } else {
        0
    };
    let request = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | read_only,
        propagation: libc::MS_PRIVATE,
        userns_fd: namespace.as_fd().as_raw_fd() as u64,
        ..NOTHING
    };
    set(tree.as_fd(), libc::AT_RECURSIVE, &request)
}

/// Makes the call with nosymfollow, Linux 5.14's last addition, for a path without a file. The kernel
/// checks the request before the path.
///
/// # Errors
/// `ENOENT` from a kernel that knows all of it.
pub(crate) fn probe_mount_setattr(nowhere: &CStr) -> io::Result<()> {
    let request = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSYMFOLLOW,
        ..NOTHING
    };
    set_at(CWD, nowhere, 0, &request)
}

const NOTHING: libc::mount_attr = libc::mount_attr {
    attr_set: 0,
    attr_clr: 0,
    propagation: 0,
    userns_fd: 0,
};

fn request(attributes: MountAttributes) -> libc::mount_attr {
    libc::mount_attr {
        attr_set: attributes.bits(),
        attr_clr: MountAttributes::ACCESS_TIMES,
        ..NOTHING
    }
}

fn set(mount: BorrowedFd<'_>, flags: libc::c_int, request: &libc::mount_attr) -> io::Result<()> {
    set_at(mount, c"", libc::AT_EMPTY_PATH | flags, request)
}

fn set_at(
    folder: BorrowedFd<'_>,
    path: &CStr,
    flags: libc::c_int,
    request: &libc::mount_attr,
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
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
