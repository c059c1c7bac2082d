//! The syscall mount_setattr(2), Linux 5.12 and newer. No library has it yet.
//!
//! Unsafe, because the kernel is handed a request, which lives until it returns.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use bindguard_core::mount_table::MountAttributes;
use nix::libc;

/// Adds these attributes to a mount. Everything that the mount denies already stays denied.
///
/// # Errors
/// `ENOSYS` before Linux 5.12, `EPERM` under a seccomp filter that does not know the call, `EINVAL` where nosymfollow is
/// wanted before Linux 5.14.
pub(crate) fn mount_setattr(mount: impl AsFd, attributes: MountAttributes) -> io::Result<()> {
    let request = libc::mount_attr {
        attr_set: attributes.bits(),
        attr_clr: MountAttributes::ACCESS_TIMES,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the request is of the size that is passed with it and the path ends with a zero; the kernel keeps neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const request,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
