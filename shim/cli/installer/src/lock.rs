//! A lock against a second installer at the same time.
//!
//! The lock file's mode keeps other users from locking it. Root of a container that reads the
//! host's `/run` can still hold it, so an installer waits for a limited time and then names the
//! process.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bindguard_sys::make_folders;
use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;

use crate::record::FOLDER;
use crate::scratch;

/// The time limit for a running installer, which may restart containerd.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Waits until no other installer runs on this node.
pub fn lock() -> Result<File> {
    let place = Path::new("/run/bindguard");
    make_folders(place, 0o755).with_context(|| format!("create {}", place.display()))?;
    let lock = lock_file(&place.join("install.lock"), LOCK_TIMEOUT)?;
    scratch::sweep_private();
    Ok(lock)
}

fn lock_file(path: &Path, patience: Duration) -> Result<File> {
    // A reader can have a lease on the file, which makes an open for writing wait: fcntl(2).
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)
        .with_context(|| format!("change the mode of {}", path.display()))?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if start.elapsed() < patience => thread::sleep(POLL),
            Err(Errno::WOULDBLOCK) => {
                let holder = holder_of(&file)
                    .map_or("a process of another pid namespace".to_owned(), |pid| {
                        format!("process {pid}")
                    });
                bail!(
                    "lock {} for {FOLDER}: {holder} has held the lock for {} s; end it and try again",
                    path.display(),
                    patience.as_secs()
                );
            }
            Err(errno) => {
                return Err(errno).with_context(|| format!("lock {} for {FOLDER}", path.display()));
            }
        }
    }
}

/// The process that holds a flock(2) lock on this file: proc_locks(5), `1: FLOCK  ADVISORY  WRITE
/// 712 00:18:1523 0 EOF`.
fn holder_of(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino().to_string();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let is_it =
            fields.get(1) == Some(&"FLOCK") && fields.get(5)?.rsplit(':').next() == Some(&inode);
        fields
            .get(4)
            .filter(|_| is_it)?
            .parse()
            .ok()
            .filter(|pid| *pid > 0)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// Issue 14: a process that can only read the file can lock it.
    #[test]
    fn a_lock_that_a_reader_holds_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("install.lock");
        drop(lock_file(&path, Duration::ZERO).unwrap());
        let reader = File::open(&path).unwrap();
        flock(&reader, FlockOperation::LockShared).unwrap();
        let error = lock_file(&path, Duration::from_millis(50))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("process {}", std::process::id())),
            "{error}"
        );
        drop(reader);
        // A child of a parallel test may have a copy of the descriptor between fork and exec.
        assert_eq!(
            lock_file(&path, Duration::from_secs(5))
                .unwrap()
                .metadata()
                .unwrap()
                .mode()
                & 0o777,
            0o600
        );
    }
}
