//! This process: its root directory, the lock against a second installer, and the signals of a pod.
//!
//! `--root` uses chroot(2): links resolve inside the new root, and the root's own containerd is run. The
//! lock file's mode keeps other users from locking it. Root of a container that reads the host's `/run`
//! can still hold it, so an installer waits for a limited time and then names the process. A DaemonSet's
//! pod must not end by itself, and its end means nothing for the node: pods are evicted, upgraded and
//! replaced.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use bindguard_operator::terminal::print_remark;
use bindguard_sys::make_folders;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::change::{identity, sweep_private};
use crate::options::Progress;
use crate::record::FOLDER;

/// Makes `root` this process's root.
pub fn enter(root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root)
        .with_context(|| format!("make {} the root directory", root.display()))?;
    rustix::process::chdir("/").with_context(|| format!("go to {}", root.display()))
}

/// Reads the node from here on: `root` is its root directory as a pod sees it. A pod has copies of
/// the node's mounts with a different propagation. So this function enters the mount namespace of
/// the node's first process, if this process has the given root. An image has no process:
/// `needs_mounts` fails there.
pub fn enter_node(root: &Path, needs_mounts: bool) -> Result<()> {
    let of_first_process = identity(Path::new("/proc/1/root/run"));
    if of_first_process.is_none() || of_first_process != identity(&root.join("run")) {
        ensure!(
            !needs_mounts,
            "{} is not the root of the first process here: give the pod the node's processes (hostPID), or run this on the node",
            root.display()
        );
        return enter(Some(root));
    }
    let namespace = File::open("/proc/1/ns/mnt").context("open the node's mount namespace")?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("enter the node's mount namespace")
}

/// The time limit for a running installer, which may restart containerd.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Waits until no other installer runs on this node.
pub fn lock() -> Result<File> {
    let place = Path::new("/run/bindguard");
    make_folders(place, 0o755).with_context(|| format!("create {}", place.display()))?;
    let lock = lock_file(&place.join("install.lock"), LOCK_TIMEOUT)?;
    sweep_private();
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

/// The first pause before unfinished work is tried again: a runtime restarts, or the shim of a
/// removed pod ends. Each pause doubles up to [`CHECK_INTERVAL`]: an operator may be needed, and
/// pods run for months.
const RETRY: Duration = Duration::from_secs(5);

/// The interval between two checks for changes by other tools.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// SIGTERM and SIGINT, from the first moment on. A signal during the work takes effect after the
/// work.
#[derive(Debug)]
pub struct Stay(SignalFd);

impl Stay {
    /// Blocks the signals.
    pub fn prepare() -> Result<Self> {
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        signals.thread_block().context("block SIGTERM")?;
        Ok(Self(
            SignalFd::new(&signals).context("create a descriptor for SIGTERM")?,
        ))
    }

    /// Does the work until it succeeds, then calls `check`, and again once a minute, until a signal comes.
    ///
    /// # Errors
    /// If the work fails. The kubelet then starts the container again.
    pub fn after(
        &self,
        mut work: impl FnMut() -> Result<Progress>,
        mut check: impl FnMut(),
    ) -> Result<Progress> {
        let mut last = None;
        let mut pause = RETRY;
        loop {
            let progress = work()?;
            let is_new = last.replace(progress) != Some(progress);
            if is_new {
                pause = RETRY;
            }
            match progress {
                Progress::Done => {
                    print_remark("done; waiting for SIGTERM, which changes nothing on this node");
                    loop {
                        check();
                        if self.signal_within(CHECK_INTERVAL)? {
                            return Ok(progress);
                        }
                    }
                }
                Progress::KeptForPods if is_new => print_remark(
                    "done but for what running pods need; waiting for SIGTERM or their end",
                ),
                Progress::NameKept if is_new => print_remark(
                    "done but for a name that containers have; waiting for SIGTERM or their end",
                ),
                Progress::NameKept | Progress::KeptForPods | Progress::Unfinished => {}
            }
            // the pods of a fleet start at the same time, and query one API server
            let clock = SystemTime::now().duration_since(UNIX_EPOCH);
            let random = clock.map_or(0, |now| now.subsec_micros() % 1000);
            if self.signal_within(pause.mul_f64(1.0 - f64::from(random) / 2000.0))? {
                return Ok(progress);
            }
            pause = CHECK_INTERVAL.min(pause * 2);
        }
    }

    fn signal_within(&self, limit: Duration) -> Result<bool> {
        let limit = Timespec::try_from(limit).context("wait for SIGTERM")?;
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("wait for SIGTERM"),
            }
        }
    }
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
