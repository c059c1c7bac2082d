//! The syscalls statmount(2) and listmount(2), Linux 6.8 and newer. No library has them yet.
//!
//! Unsafe, because the kernel is handed a request and a buffer, both of which live until it
//! returns.
#![allow(unsafe_code)]

use std::io;
use std::path::Path;

use bindguard_core::mount_table::{StatmountEntry, StatmountError};
use nix::libc;

/// The number is the same on every architecture: statmount(2) is younger than the unified table.
const SYS_STATMOUNT: libc::c_long = 457;
const SYS_LISTMOUNT: libc::c_long = 458;
/// `LSMT_ROOT`: all mounts below the root of the namespace.
const ALL_MOUNTS: u64 = u64::MAX;
/// Enough for the fixed part and the paths of nearly every mount.
const USUAL: usize = 2048;
/// Enough for every mount.
const MAX_ANSWER: usize = 1 << 20;

/// `struct mnt_id_req`. Its first version ends before the namespace.
#[repr(C)]
struct Request {
    size: u32,
    spare: u32,
    mnt_id: u64,
    param: u64,
    mnt_ns_id: u64,
}

impl Request {
    const FIRST_VERSION: u32 = 24;

    /// About a mount of the caller's namespace.
    fn of_own(mnt_id: u64, param: u64) -> Self {
        Self {
            size: Self::FIRST_VERSION,
            spare: 0,
            mnt_id,
            param,
            mnt_ns_id: 0,
        }
    }

    /// About a mount of another namespace.
    fn of_namespace(mnt_ns_id: u64, mnt_id: u64, param: u64) -> Self {
        Self {
            size: size_of::<Self>() as u32,
            spare: 0,
            mnt_id,
            param,
            mnt_ns_id,
        }
    }
}

/// Queries a mount by its unique id (`STATX_MNT_ID_UNIQUE`), which the kernel never reuses. A known
/// mount point is not requested again.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `EPERM` under a seccomp filter that does not know the call, `ENOENT`
/// for a mount that is not in the caller's mount namespace or not below its root.
pub(crate) fn statmount(unique_id: u64, mount_point: Option<&Path>) -> io::Result<StatmountEntry> {
    let param = StatmountEntry::mask(mount_point);
    let request = Request::of_own(unique_id, param);
    match query(&request, &mut [0; USUAL], mount_point) {
        Err(error) if error.raw_os_error() == Some(libc::EOVERFLOW) => {
            query(&request, &mut vec![0; MAX_ANSWER], mount_point)
        }
        answer => answer,
    }
}

/// Queries a mount of another namespace. The kernel's own buffer grows to this size at most,
/// whatever the mount has as its paths.
///
/// # Errors
/// `EOVERFLOW` if that is too small, `ENOENT` for a mount that is gone or cannot be reached.
pub(crate) fn statmount_in(
    namespace: u64,
    unique_id: u64,
    largest: usize,
) -> io::Result<StatmountEntry> {
    let request = Request::of_namespace(namespace, unique_id, StatmountEntry::mask(None));
    match query(&request, &mut [0; USUAL], None) {
        Err(error) if error.raw_os_error() == Some(libc::EOVERFLOW) => {
            query(&request, &mut vec![0; largest], None)
        }
        answer => answer,
    }
}

/// Fills the buffer with unique ids of the mounts of another namespace, beginning after a given id;
/// 0 begins at the first id. Returns their number.
///
/// # Errors
/// `E2BIG` or `EINVAL` before Linux 6.11, `ENOENT` if the namespace is gone or may not be read.
pub(crate) fn listmount_in(namespace: u64, after: u64, ids: &mut [u64]) -> io::Result<usize> {
    list(&Request::of_namespace(namespace, ALL_MOUNTS, after), ids)
}

/// The same for the mounts of the caller's namespace.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `EPERM` under a seccomp filter that does not know the call.
pub(crate) fn listmount(after: u64, ids: &mut [u64]) -> io::Result<usize> {
    list(&Request::of_own(ALL_MOUNTS, after), ids)
}

fn list(request: &Request, ids: &mut [u64]) -> io::Result<usize> {
    let result = call(SYS_LISTMOUNT, request, ids);
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn query(
    request: &Request,
    buffer: &mut [u8],
    mount_point: Option<&Path>,
) -> io::Result<StatmountEntry> {
    let result = call(SYS_STATMOUNT, request, buffer);
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    StatmountEntry::from_buffer(buffer, mount_point)
        .map_err(|error| io::Error::new(kind(error), error))
}

/// statmount(2) counts the buffer in bytes, listmount(2) in ids.
fn call<T: Copy>(number: libc::c_long, request: &Request, buffer: &mut [T]) -> libc::c_long {
    // SAFETY: the request is of the size that it says, and the buffer is writable for the length
    // that is passed; the kernel keeps neither. Every value of a byte and of an id is valid.
    unsafe {
        libc::syscall(
            number,
            &raw const *request,
            buffer.as_mut_ptr(),
            buffer.len(),
            0,
        )
    }
}

/// A missing field means `NotFound`: the kernel knows the mount below a namespace's root, but
/// cannot name its mount point.
fn kind(error: StatmountError) -> io::ErrorKind {
    match error {
        StatmountError::Missing(_) => io::ErrorKind::NotFound,
        StatmountError::TooShort | StatmountError::BadString(_) => io::ErrorKind::InvalidData,
    }
}
