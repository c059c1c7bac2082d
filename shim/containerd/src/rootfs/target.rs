//! The place of a mount's `target` below the root filesystem.
//!
//! The image provides the files there, and may contain a symlink `/data -> /etc`. The kernel
//! resolves the target as if the root filesystem were `/` (openat2(2), RESOLVE_IN_ROOT), so no link
//! leads out of it.

use std::fs::{File, read_link};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// The path to mount on. It must exist, as for mount(2).
pub(super) fn resolve(rootfs: &Path, target: &str) -> io::Result<PathBuf> {
    if target.trim_matches('/').is_empty() {
        return Ok(rootfs.to_owned());
    }
    let root = File::open(rootfs)?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let target_fd = openat2(&root, target, flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    read_link(format!("/proc/self/fd/{}", target_fd.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::fs::create_dir;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_in_the_image_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let rootfs = dir.path().join("rootfs");
        create_dir(&rootfs).unwrap();
        create_dir(rootfs.join("etc")).unwrap();
        symlink("/etc", rootfs.join("data")).unwrap();
        symlink("../../..", rootfs.join("up")).unwrap();
        assert_eq!(resolve(&rootfs, "/data").unwrap(), rootfs.join("etc"));
        assert_eq!(resolve(&rootfs, "up/etc").unwrap(), rootfs.join("etc"));
        assert_eq!(resolve(&rootfs, "/").unwrap(), rootfs);
        assert!(resolve(&rootfs, "missing").is_err());
    }
}
