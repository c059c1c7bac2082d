//! The syscall statmount(2), Linux 6.8 and newer. No library has it yet.
//!
//! Unsafe, because the kernel is handed a request and a buffer, both of which live until it
//! returns.
#![allow(unsafe_code)]

use std::io;
use std::path::Path;

use bindguard_core::mount_table::{StatmountEntry, StatmountError};
use nix::libc;

/// The same number on every architecture: it came after they were unified.
const SYS_STATMOUNT: libc::c_long = 457;
/// Enough for the fixed part and the paths of nearly every mount.
const USUAL: usize = 2048;
/// Enough for every mount.
const LARGEST: usize = 1 << 20;

/// `struct mnt_id_req`, its first version.
#[repr(C)]
struct Request {
    size: u32,
    spare: u32,
    mnt_id: u64,
    param: u64,
}

/// Queries one mount by its unique id (`STATX_MNT_ID_UNIQUE`), which is never given to another
/// mount. A known mount point is not requested again.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `EPERM` under a seccomp filter that does not know the call, `ENOENT`
/// for a mount that is not in the caller's mount namespace or not below its root.
pub(crate) fn statmount(unique_id: u64, mount_point: Option<&Path>) -> io::Result<StatmountEntry> {
    let param = StatmountEntry::mask(mount_point);
    let request = Request {
        size: size_of::<Request>() as u32,
        spare: 0,
        mnt_id: unique_id,
        param,
    };
    match query(&request, &mut [0; USUAL], mount_point) {
        Err(error) if error.raw_os_error() == Some(libc::EOVERFLOW) => {
            query(&request, &mut vec![0; LARGEST], mount_point)
        }
        answer => answer,
    }
}

fn query(
    request: &Request,
    buffer: &mut [u8],
    mount_point: Option<&Path>,
) -> io::Result<StatmountEntry> {
    // SAFETY: the request is of the size that it says, and the buffer is writable for the length
    // that is passed; the kernel keeps neither.
    let result = unsafe {
        libc::syscall(
            SYS_STATMOUNT,
            &raw const *request,
            buffer.as_mut_ptr(),
            buffer.len(),
            0,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    StatmountEntry::from_buffer(buffer, mount_point)
        .map_err(|error| io::Error::new(kind(error), error))
}

/// A missing field means `NotFound`: the kernel knows the mount below a namespace's root, but
/// cannot name its mount point.
fn kind(error: StatmountError) -> io::ErrorKind {
    match error {
        StatmountError::Missing(_) => io::ErrorKind::NotFound,
        StatmountError::TooShort | StatmountError::BadString(_) => io::ErrorKind::InvalidData,
    }
}
