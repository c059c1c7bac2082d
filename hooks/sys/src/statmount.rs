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
    /// About a mount of this namespace; `None` for the caller's namespace.
    fn new(namespace: Option<u64>, mnt_id: u64, param: u64) -> Self {
        const FIRST_VERSION: u32 = 24;
        Self {
            size: match namespace {
                Some(_) => size_of::<Self>() as u32,
                None => FIRST_VERSION,
            },
            spare: 0,
            mnt_id,
            param,
            mnt_ns_id: namespace.unwrap_or(0),
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
    query(None, unique_id, mount_point, MAX_ANSWER)
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
    query(Some(namespace), unique_id, None, largest)
}

/// Fills the buffer with unique ids of the mounts of another namespace, or with `None` of the
/// caller's, beginning after a given id; 0 begins at the first id. Returns their number.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `E2BIG` or `EINVAL` before Linux 6.11 for another namespace, `EPERM`
/// under a seccomp filter that does not know the call, `ENOENT` if the namespace is gone or may not
/// be read.
pub(crate) fn listmount(namespace: Option<u64>, after: u64, ids: &mut [u64]) -> io::Result<usize> {
    let result = call(
        SYS_LISTMOUNT,
        &Request::new(namespace, ALL_MOUNTS, after),
        ids,
    );
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn query(
    namespace: Option<u64>,
    unique_id: u64,
    mount_point: Option<&Path>,
    largest: usize,
) -> io::Result<StatmountEntry> {
    let request = Request::new(namespace, unique_id, StatmountEntry::mask(mount_point));
    let (mut usual, mut long) = ([0; USUAL], Vec::new());
    let mut buffer = &mut usual[..];
    let mut result = call(SYS_STATMOUNT, &request, buffer);
    if result != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOVERFLOW) {
        long.resize(largest, 0);
        buffer = &mut long;
        result = call(SYS_STATMOUNT, &request, buffer);
    }
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    StatmountEntry::from_buffer(buffer, mount_point).map_err(|error| {
        let kind = match error {
            // The kernel knows the mount below a namespace's root, but cannot name its mount point.
            StatmountError::Missing(_) => io::ErrorKind::NotFound,
            StatmountError::TooShort | StatmountError::BadString(_) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    })
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
