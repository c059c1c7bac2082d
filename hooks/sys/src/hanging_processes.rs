//! The register of processes that may hang: children in containers, and probes of filesystems.
//!
//! A process whose request a FUSE daemon or a file server took ends only with the answer, whatever
//! becomes of its starter. Without a register, each restart of the agent and each create would add
//! such processes. All programs share the register, a folder with a file for each process:
//!
//! | lock of the file | holder | meaning |
//! |---|---|---|
//! | flock(2) | the process | the process is alive |
//! | `F_OFD_SETLK` of fcntl(2) | its starter | the starter still waits for the process |
//!
//! The kernel frees each lock at the end of its holder, also after SIGKILL. So a live process
//! without a starter hangs.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, linkat};
use rustix::process::geteuid;

use crate::handle::Handle;

/// The longest subject.
const MAX_SUBJECT: u64 = 4096;

/// A process that is about to start, or was started. Its file is removed with this value, unless the
/// process hangs.
#[derive(Debug)]
pub(crate) struct Registered {
    /// `None` while the file has no name: the process is not listed.
    path: Option<PathBuf>,
    /// The descriptor for the process, until the process is started.
    file: Option<OwnedFd>,
    starter: File,
}

impl Registered {
    /// Registers a process with its subject: what may let the process hang.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn new(subject: &str) -> io::Result<Self> {
        let mut registered = Self::unlisted()?;
        registered.list(subject)?;
        Ok(registered)
    }

    /// A process that has no subject yet.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn unlisted() -> io::Result<Self> {
        let folder = folder();
        let mut directory = DirBuilder::new();
        directory.recursive(true).mode(0o755);
        if let Some(parent) = folder.parent() {
            directory.create(parent)?;
        }
        if let Err(error) = DirBuilder::new().mode(0o700).create(&folder)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        // Without a name until both locks are held: a reader removes a file without a lock.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(&folder, flags, Mode::from(0o600))?;
        let link = Handle::link_of(&file);
        let starter = File::options().read(true).write(true).open(link)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fcntl(&starter, FcntlArg::F_OFD_SETLK(&whole_file()))?;
        Ok(Self {
            path: None,
            file: Some(file),
            starter,
        })
    }

    /// Lists the process, which may run already.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn list(&mut self, subject: &str) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        self.starter.write_all_at(subject.as_bytes(), 0)?;
        let link = Handle::link_of(&self.starter);
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = folder().join(format!("{}-{number}", std::process::id()));
            match linkat(CWD, &link, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
                Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
                Ok(()) => {
                    self.path = Some(path);
                    return Ok(());
                }
            }
        }
    }

    /// The descriptor that the process must keep open.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Leaves the descriptor to the process, which was started.
    pub(crate) fn start(&mut self) {
        self.file = None;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.file = None;
        // The process may end at any time: the reader removes the file then.
        if let Some(path) = &self.path
            && File::open(path).is_ok_and(|file| !is_alive(&file))
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// The subjects of all processes that hang. Removes the files of those that ended.
pub(crate) fn hanging() -> Vec<String> {
    let mut hanging = Vec::new();
    for entry in fs::read_dir(folder()).into_iter().flatten().flatten() {
        let path = entry.path();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let Ok(mut file) = File::options().read(true).custom_flags(flags).open(&path) else {
            continue;
        };
        if !is_alive(&file) {
            let _ = fs::remove_file(&path);
        } else if !has_starter(&file) {
            let mut subject = String::new();
            let read = file.by_ref().take(MAX_SUBJECT).read_to_string(&mut subject);
            hanging.extend(read.is_ok().then_some(subject));
        }
    }
    hanging
}

/// The lock is shared: two readers at once would otherwise take each other for the process.
fn is_alive(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

fn has_starter(file: &File) -> bool {
    let mut lock = whole_file();
    let found = fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock));
    found.is_err() || lock.l_type != libc::F_UNLCK as libc::c_short
}

fn whole_file() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// On a tmpfs: no process lives on after a boot.
fn folder() -> PathBuf {
    match geteuid() {
        uid if uid.is_root() => "/run/bindguard/hanging".into(),
        uid => Path::new("/run/user")
            .join(uid.as_raw().to_string())
            .join("bindguard/hanging"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::{Child, Command, Stdio};
    use std::thread::yield_now;
    use std::time::{Duration, Instant};

    use super::*;

    /// A process that ends with this value.
    struct Process(Child);

    impl Process {
        fn with(registered: &mut Registered) -> Self {
            // The descriptor is the child's standard input.
            let file = registered.file().unwrap().try_clone_to_owned().unwrap();
            let mut command = Command::new("sleep");
            let command = command.arg("1000").stdin(file).stdout(Stdio::null());
            let child = command.stderr(Stdio::null()).spawn().unwrap();
            registered.start();
            Self(child)
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn count(subject: &str) -> usize {
        hanging().iter().filter(|known| *known == subject).count()
    }

    /// A process that another test forks has copies of all descriptors for a moment.
    fn wait_until(is_done: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_done() {
            assert!(start.elapsed() < Duration::from_secs(60));
            yield_now();
        }
    }

    #[test]
    fn a_live_process_without_a_starter_hangs() {
        let subject = format!("test {}", std::process::id());
        let mut registered = Registered::new(&subject).unwrap();
        let process = Process::with(&mut registered);
        let path = registered.path.clone().unwrap();
        assert_eq!(count(&subject), 0, "its starter waits for it");
        drop(registered);
        wait_until(|| count(&subject) == 1);
        drop(process);
        wait_until(|| count(&subject) == 0 && !fs::exists(&path).unwrap());
    }

    #[test]
    fn a_process_that_ended_in_time_leaves_no_file() {
        let mut registered = Registered::new("in time").unwrap();
        drop(Process::with(&mut registered));
        let path = registered.path.clone().unwrap();
        drop(registered);
        wait_until(|| count("in time") == 0 && !fs::exists(&path).unwrap());
    }

    #[test]
    fn readers_at_once_do_not_take_each_other_for_the_process() {
        let subject = format!("readers {}", std::process::id());
        let mut registered = Registered::new(&subject).unwrap();
        let process = Process::with(&mut registered);
        let reader = File::open(registered.path.as_ref().unwrap()).unwrap();
        drop(registered);
        drop(process);
        wait_until(|| !is_alive(&reader));
        assert_eq!(count(&subject), 0);
    }
}
