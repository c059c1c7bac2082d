//! A file of the kernel that reports changes of its content.
//!
//! poll(2) reports POLLPRI for such a file from a change until it is read through the same
//! descriptor, see `kernfs_generic_poll` in the kernel's fs/kernfs/file.c. poll costs a descriptor.
//! inotify would need an instance, and a node's default limit is 128 instances per user.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cgroup::text::FlatKeyed;

/// These files have a dozen short lines.
const MAX_CONTENT: usize = 4096;

/// A flat keyed file that is open and watched.
#[derive(Debug)]
pub(super) struct PolledFile(AsyncFd<OwnedFd>);

impl PolledFile {
    /// Opens a file and puts it into the event loop.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        crate::kernel::watch(File::open(path)?.into(), Interest::PRIORITY).map(Self)
    }

    /// Waits until it may have changed since the last read. Cancel safe.
    pub(super) async fn changed(&self) -> io::Result<()> {
        // Cleared before the file is read: a change in the meantime wakes us again.
        self.0.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }

    /// Its current content. ENODEV: the cgroup was removed.
    pub(super) fn read(&self) -> io::Result<FlatKeyed> {
        let mut content = [0; MAX_CONTENT];
        let length = rustix::io::pread(self.0.get_ref(), &mut content, 0)?;
        Ok(FlatKeyed::parse(&String::from_utf8_lossy(
            content.get(..length).unwrap_or(&[]),
        )))
    }
}
