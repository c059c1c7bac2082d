//! The features of this kernel. They are probed by calls that change nothing, not derived from its
//! version: distributions backport.
//!
//! Bindguard requires the calls of Linux 5.14. [`require_calls`] decides for all repairs and
//! refreshes; a create on an older kernel goes on, unchecked.

use std::ffi::CStr;
use std::fs;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

use crate::errno_of;
use crate::fork::probe_close_range;
use crate::handle::{Handle, has};
use crate::syscalls::{probe_mount_setattr, statmount};

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
            probe_mount_setattr(NOWHERE).map_err(|error| errno_of(&error)),
            "mount_setattr(2) with nosymfollow",
        ),
        // Only a filter denies this call, and no child starts without it.
        (
            probe_close_range().map_err(|_| Errno::NOSYS),
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
    KernelFeatures {
        release: release(),
        required_calls: require_calls(),
        beneath: knows_beneath(),
        statmount: unique.is_some_and(|id| statmount(id, None).is_ok()),
    }
}

fn knows_beneath() -> bool {
    let flags = MoveMountFlags::MOVE_MOUNT_BENEATH;
    let moved = rustix::mount::move_mount(CWD, NOWHERE, CWD, NOWHERE, flags);
    !moved.is_err_and(is_unknown)
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
