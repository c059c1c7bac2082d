//! The features of this kernel. They are probed by calls that change nothing, not derived from its
//! version: distributions backport.

use std::fs;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use crate::handle::Handle;
use crate::statmount::statmount;

/// The features that a re-bind uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFeatures {
    /// `uname -r`
    pub release: String,
    /// openat2(2), Linux 5.6: opens targets beneath their volume.
    pub openat2: bool,
    /// `STATX_MNT_ID` and mount roots, Linux 5.8: identify the mount of a path.
    pub mount_ids: bool,
    /// `MOVE_MOUNT_BENEATH`, Linux 6.5: swaps a mount without a gap.
    pub beneath: bool,
    /// statmount(2), Linux 6.8: a query costs the same among 100 and 30,000 mounts.
    pub statmount: bool,
}

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
    let unique = root
        .as_ref()
        .and_then(|root| root.unique_mount_id().ok().flatten());
    KernelFeatures {
        release: release(),
        openat2: rustix::fs::openat2(
            CWD,
            "/",
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        )
        .is_ok(),
        mount_ids: root.is_some_and(|root| root.mount_id().is_ok() && root.is_mount_root().is_ok()),
        beneath: knows_beneath(),
        statmount: unique.is_some_and(|id| statmount(id, None).is_ok()),
    }
}

/// move_mount(2) checks flags before paths: a call with an impossible path shows if the kernel
/// knows the flag.
fn knows_beneath() -> bool {
    let nowhere = "/proc/self/fd/bindguard-probe";
    let flags = MoveMountFlags::MOVE_MOUNT_BENEATH;
    !matches!(
        rustix::mount::move_mount(CWD, nowhere, CWD, nowhere, flags),
        Err(Errno::INVAL | Errno::NOSYS)
    )
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
        assert!(features.openat2 && features.mount_ids, "{features:?}");
        assert!(!features.release.is_empty());
    }
}
