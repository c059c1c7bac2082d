//! The syscalls that no library has yet, and the calls that this kernel has.
//!
//! Unsafe, because the kernel is handed requests and buffers, which live until it returns, and
//! because it returns the number of a new descriptor.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bindguard_core::mount_table::{MountAttributes, StatmountEntry, StatmountError};
use nix::libc;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

use crate::errno_of;
use crate::handle::{Handle, has};

pub(crate) use nix::libc::mount_attr;

// statmount(2) and listmount(2), Linux 6.8 and newer.

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

/// Queries a mount of this namespace by its unique id (`STATX_MNT_ID_UNIQUE`), which the kernel
/// never reuses. A known mount point is not requested again.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `EPERM` under a seccomp filter that does not know the call, `ENOENT`
/// for a mount that is not in the caller's mount namespace or not below its root.
pub(crate) fn statmount(unique_id: u64, mount_point: Option<&Path>) -> io::Result<StatmountEntry> {
    statmount_in(None, unique_id, mount_point, MAX_ANSWER)
}

/// Queries a mount of another namespace. The kernel's own buffer grows to this size at most,
/// whatever the mount has as its paths.
///
/// # Errors
/// `EOVERFLOW` if that is too small, `ENOENT` for a mount that is gone or cannot be reached.
pub(crate) fn statmount_in(
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

/// Fills the buffer with unique ids of the mounts of another namespace, or with `None` of the
/// caller's, beginning after a given id; 0 begins at the first id. Returns their number.
///
/// # Errors
/// `ENOSYS` before Linux 6.8, `E2BIG` or `EINVAL` before Linux 6.11 for another namespace, `EPERM`
/// under a seccomp filter that does not know the call, `ENOENT` if the namespace is gone or may not
/// be read.
pub(crate) fn listmount(namespace: Option<u64>, after: u64, ids: &mut [u64]) -> io::Result<usize> {
    let request = Request::new(namespace, ALL_MOUNTS, after);
    usize::try_from(call(SYS_LISTMOUNT, &request, ids)).map_err(|_| io::Error::last_os_error())
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

// mount_setattr(2)

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
) -> Result<(), Errno> {
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
    Ok(mount_setattr(tree, libc::AT_RECURSIVE, &request)?)
}

fn set_at(
    folder: BorrowedFd<'_>,
    path: &CStr,
    flags: libc::c_int,
    request: &mount_attr,
) -> Result<(), Errno> {
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
    succeeded(result)
}

fn succeeded(result: libc::c_long) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(errno_of(&io::Error::last_os_error())),
    }
}

// The owners of namespaces, and the namespaces of processes.

/// `_IO(0xb7, 1)` and `_IO(0xb7, 2)`
const NS_GET_USERNS: libc::Ioctl = 0xb701;
const NS_GET_PARENT: libc::Ioctl = 0xb702;

/// `_IOR(0xb7, 5, u64)`
const NS_GET_MNTNS_ID: libc::Ioctl = 0x8008_b705_u32 as libc::Ioctl;

/// A namespace of a process: its name below `/proc/PID`, and the request for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    request: libc::Ioctl,
}

/// `PIDFD_GET_MNT_NAMESPACE`, `_IO(0xff, 3)`
pub(crate) const MOUNT: Kind = Kind {
    name: "ns/mnt",
    request: 0xff03,
};

/// `PIDFD_GET_USER_NAMESPACE`, `_IO(0xff, 9)`
pub(crate) const USER: Kind = Kind {
    name: "ns/user",
    request: 0xff09,
};

/// The namespace of the process that a pidfd refers to: Linux 6.11 and newer. The kernel takes no
/// lock that the process can hold.
///
/// # Errors
/// `ENOTTY` or `EINVAL` from an older kernel, `ESRCH` if the process ended.
pub(crate) fn namespace_of(pidfd: &OwnedFd, kind: Kind) -> io::Result<File> {
    related(pidfd, kind.request)
}

/// The user namespace that owns a namespace.
///
/// # Errors
/// `EPERM` if it is neither that of the calling thread nor a descendant of it.
pub(crate) fn owner_of(namespace: &File) -> io::Result<File> {
    related(namespace, NS_GET_USERNS)
}

/// The parent of a user namespace.
///
/// # Errors
/// As [`owner_of`], and `EPERM` for the initial user namespace.
pub(crate) fn parent_of(users: &File) -> io::Result<File> {
    related(users, NS_GET_PARENT)
}

/// The number of a mount namespace for statmount(2), which the kernel never reuses: Linux 6.11 and
/// newer.
///
/// # Errors
/// `ENOTTY` or `EINVAL` from an older kernel, `ENOTTY` for any other file.
pub(crate) fn mount_namespace_id(namespace: &File) -> io::Result<u64> {
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

// close_range(2)

/// Closes all descriptors of this process except `kept`, a sorted list. Uses neither the heap nor
/// a lock.
///
/// # Errors
/// If some descriptors may still be open.
pub(crate) fn close_all_but(kept: &[RawFd]) -> Result<(), Errno> {
    let mut next = 0;
    for descriptor in kept {
        let descriptor = descriptor.unsigned_abs();
        if descriptor > next {
            close_range(next, descriptor - 1)?;
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: the forked process no longer uses these descriptors.
    succeeded(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })
}

// The features of this kernel. They are probed by calls that change nothing, not derived from its
// version: distributions backport.
//
// Bindguard requires the calls of Linux 5.14. [`require_calls`] decides for all repairs and
// refreshes; a create on an older kernel goes on, unchecked.

/// The features that a re-bind uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFeatures {
    /// `uname -r`
    pub release: String,
    /// An error if a call that every repair requires is missing.
    pub required_calls: Result<(), OldKernel>,
    /// `MOVE_MOUNT_BENEATH`, Linux 6.5: swaps a mount without a gap.
    pub beneath: bool,
    /// statmount(2), Linux 6.8: a query costs the same among 100 and 30,000 mounts.
    pub statmount: bool,
}

/// A call that repairs and refreshes require is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "repairs and live refreshes require Linux 5.14 or newer: this kernel ({release}) has no {missing}"
)]
pub struct OldKernel {
    release: String,
    missing: &'static str,
}

/// Probes the calls that every repair and refresh requires.
///
/// # Errors
/// If this kernel, or a seccomp filter that answers `ENOSYS`, lacks a call. A denied call is not
/// missing, because the step that needs the call reports the denial. close_range(2) is missing if a
/// filter denies it: each child would end before it can report.
pub fn require_calls() -> Result<(), OldKernel> {
    match missing_call() {
        None => Ok(()),
        Some(missing) => Err(OldKernel {
            release: release(),
            missing,
        }),
    }
}

/// In each of these calls the kernel checks flags before the path, which leads nowhere.
fn missing_call() -> Option<&'static str> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = rustix::fs::openat2(CWD, NOWHERE, flags, Mode::empty(), ResolveFlags::CACHED);
    // After an error of a seccomp filter or a machine in trouble, nothing is known.
    let fields = rustix::fs::statx(CWD, c"/", AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID);
    let fields = fields.and_then(|fields| {
        let knows_roots = fields
            .stx_attributes_mask
            .contains(StatxAttributes::MOUNT_ROOT);
        match knows_roots && has(&fields, StatxFlags::MNT_ID) {
            true => Ok(()),
            false => Err(Errno::NOSYS),
        }
    });
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let none = MoveMountFlags::empty();
    // Linux 5.14's last addition
    let no_links = mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSYMFOLLOW,
        ..NOTHING
    };
    // No descriptor has this number.
    let no_descriptor = libc::c_uint::MAX;
    let calls = [
        // Linux 5.12
        (opened.map(drop), "openat2(2) with RESOLVE_CACHED"),
        // Linux 5.8
        (fields, "ids of mounts in statx(2)"),
        (
            rustix::mount::open_tree(CWD, NOWHERE, clone).map(drop),
            "open_tree(2)",
        ),
        (
            rustix::mount::move_mount(CWD, NOWHERE, CWD, NOWHERE, none),
            "move_mount(2)",
        ),
        (
            set_at(CWD, NOWHERE, 0, &no_links),
            "mount_setattr(2) with nosymfollow",
        ),
        // Only a filter denies this call, and no child starts without it.
        (
            close_range(no_descriptor, no_descriptor).map_err(|_| Errno::NOSYS),
            "close_range(2)",
        ),
    ];
    for (called, name) in calls {
        if called.is_err_and(is_unknown) {
            return Some(name);
        }
    }
    None
}

fn is_unknown(errno: Errno) -> bool {
    matches!(errno, Errno::NOSYS | Errno::INVAL)
}

/// A path without a file.
const NOWHERE: &CStr = c"/proc/self/fd/bindguard-probe";

/// True on Linux 7.1 to 7.2.10, where a mount that propagates beneath a locked mount takes the lock
/// (CVE-2026-98976). A vendor's kernel with the fix and such a number counts as faulty.
pub fn propagation_takes_locks() -> bool {
    takes_locks(&release())
}

fn takes_locks(release: &str) -> bool {
    (&[7, 1][..]..&[7, 2, 11][..]).contains(&release_numbers(release).0.as_slice())
}

/// The numbers of a release, such as a kernel's as `uname -r` prints it, and the text behind them.
pub fn release_numbers(release: &str) -> (Vec<u32>, &str) {
    let end = release.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (numbers, suffix) = release.split_at(end.unwrap_or(release.len()));
    let numbers = numbers.split('.').filter_map(|number| number.parse().ok());
    (numbers.collect(), suffix)
}

fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim_end().to_owned()
}

/// Probes the kernel.
pub fn kernel_features() -> KernelFeatures {
    let root = Handle::follow(Path::new("/")).ok();
    let unique = root.and_then(|root| root.unique_mount_id());
    let flags = MoveMountFlags::MOVE_MOUNT_BENEATH;
    let moved = rustix::mount::move_mount(CWD, NOWHERE, CWD, NOWHERE, flags);
    KernelFeatures {
        release: release(),
        required_calls: require_calls(),
        beneath: !moved.is_err_and(is_unknown),
        statmount: unique.is_some_and(|id| statmount(id, None).is_ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_from_7_1_to_7_2_10() {
        for (release, takes) in [
            ("7.0.9", false),
            ("7.1.0", true),
            ("7.1-rc1", true),
            ("7.2.10+deb14-amd64", true),
            ("7.2.11+deb14-amd64", false),
            ("7.3.0", false),
            ("6.18.44-fc", false),
            ("", false),
        ] {
            assert_eq!(takes_locks(release), takes, "{release}");
        }
    }

    #[test]
    fn this_kernel_is_one_that_bindguard_supports() {
        let features = kernel_features();
        assert_eq!(features.required_calls, Ok(()));
        assert!(!features.release.is_empty());
    }
}
