//! Runs work in a separate process, so that the caller never waits for work that hangs.
//!
//! A request that a FUSE daemon or a file server took and never answers cannot be interrupted, not
//! even by SIGKILL. And execve(2) waits for every thread of a process to end. So a process that is
//! not a child of the caller does the work. The process is forked twice, and init (or the shim, as
//! subreaper) reaps the process. The only open descriptor of the process is the end of a pipe.
//! Otherwise a container's stdout would stay open for as long as a server does not answer.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, linkat};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, geteuid, pidfd_open, pidfd_send_signal, waitpid,
};

use crate::fork::{close_all_but, fork_child};
use crate::handle::Handle;

/// A separate process, and the pipe with its output.
#[derive(Debug)]
pub(crate) struct SeparateProcess {
    output: File,
    /// The output that was read.
    pub(crate) received: Vec<u8>,
    /// `None` if the process ended before it was held.
    process: Option<OwnedFd>,
    pub(crate) pid: i32,
    registered: Option<Registered>,
}

impl SeparateProcess {
    /// Starts `work`; its output can be read from [`SeparateProcess::output`]. `work` must not use
    /// anything that another thread may have locked.
    pub(crate) fn start(work: impl FnOnce(&mut File)) -> io::Result<Self> {
        Self::start_with(None, work)
    }

    /// The same, for work that may hang: the process can be [listed](Self::kill_and_list).
    pub(crate) fn start_listable(work: impl FnOnce(&mut File)) -> io::Result<Self> {
        // Without room in /run the process is not listed: a full disk stops no create.
        Self::start_with(Registered::unlisted().ok(), work)
    }

    fn start_with(
        mut registered: Option<Registered>,
        work: impl FnOnce(&mut File),
    ) -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let intermediate = fork_child(|| {
            let _ = fork_child(|| {
                let mut kept = [write.as_raw_fd(); 2];
                if let Some(file) = registered.as_ref().and_then(Registered::file) {
                    kept[1] = file.as_raw_fd();
                }
                kept.sort_unstable();
                // An error cannot be reported here: the reader sees that the pipe closes early.
                if close_all_but(&kept).is_ok() {
                    let mut pipe = File::from(write);
                    let _ = pipe.write_all(&std::process::id().to_ne_bytes());
                    work(&mut pipe);
                }
            });
        })?;
        let _ = waitpid(Pid::from_raw(intermediate), WaitOptions::empty());
        if let Some(registered) = &mut registered {
            registered.start();
        }
        let mut held = Self::hold(File::from(read))?;
        held.registered = registered;
        Ok(held)
    }

    fn hold(mut output: File) -> io::Result<Self> {
        let mut pid = [0; 4];
        output.read_exact(&mut pid)?;
        let pid = i32::from_ne_bytes(pid);
        let process = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // While the process has its end of the pipe, its pid is no other's.
        let process = process.filter(|_| !is_closed(&output));
        Ok(Self {
            output,
            received: Vec::new(),
            process,
            pid,
            registered: None,
        })
    }

    /// Kills the process, which may end much later, and lists it with this subject until its end.
    /// Returns its pidfd if the register cannot be written.
    pub(crate) fn kill_and_list(mut self, subject: &str) -> Option<OwnedFd> {
        self.send_kill();
        let registered = self.registered.as_mut();
        if registered.is_some_and(|registered| registered.list(subject).is_ok()) {
            return None;
        }
        self.process.take()
    }

    fn send_kill(&self) {
        if let Some(process) = &self.process {
            // The process may have ended, or ends when its server answers. Nothing waits for it.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// Reads its output until the pipe closes or a time is over.
    pub(crate) fn read_until(&mut self, timeouts: Timeouts) -> io::Result<End> {
        let (start, mut buffer) = (Instant::now(), [0; 4096]);
        loop {
            let left = timeouts.all.saturating_sub(start.elapsed());
            let wait = left.min(timeouts.each);
            let mut polled = [PollFd::new(&self.output, PollFlags::IN)];
            match poll(&mut polled, Timespec::try_from(wait).ok().as_ref()) {
                Ok(0) if wait < timeouts.each => return Ok(End::OutOfTime),
                Ok(0) => return Ok(End::Silence),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(_) => match self.output.read(&mut buffer)? {
                    0 => return Ok(End::Closed),
                    count => self.received.extend_from_slice(&buffer[..count]),
                },
            }
        }
    }

    /// The answers that arrived completely.
    pub(crate) fn answers(&self) -> Vec<io::Result<Vec<u8>>> {
        answers(&self.received)
    }
}

/// True if the other end of a pipe is closed, or that is not known.
fn is_closed(pipe: &File) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::empty())];
    let polling = poll(&mut polled, Some(&Timespec::default()));
    polling.is_err() || polled[0].revents().contains(PollFlags::HUP)
}

/// The time limits of a probe.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For one path. A path that takes longer is silent.
    pub each: Duration,
    /// For all paths. A path without an answer by then is [`Answer::NotProbed`]: it did not get its
    /// full time.
    pub all: Duration,
}

impl Timeouts {
    /// Each path may take the whole time.
    pub(crate) fn of(all: Duration) -> Self {
        Self { each: all, all }
    }
}

/// The reason why reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Closed,
    Silence,
    OutOfTime,
}

/// Writes an answer to the pipe: error number, length, bytes.
pub(crate) fn write_answer(pipe: &mut File, answer: io::Result<Vec<u8>>) {
    let (number, bytes) = match answer {
        Ok(bytes) => (0, bytes),
        Err(error) => {
            let is_invalid = error.kind() == io::ErrorKind::InvalidInput;
            let unnumbered = if is_invalid { Errno::INVAL } else { Errno::IO };
            let errno = Errno::from_io_error(&error).unwrap_or(unnumbered);
            (errno.raw_os_error(), Vec::new())
        }
    };
    let mut record = number.to_ne_bytes().to_vec();
    record.extend((bytes.len() as u32).to_ne_bytes());
    record.extend(bytes);
    // If the reader is gone, the answer is not needed.
    let _ = pipe.write_all(&record);
}

fn answers(mut received: &[u8]) -> Vec<io::Result<Vec<u8>>> {
    let mut answers = Vec::new();
    while let Some((number, rest)) = received.split_first_chunk()
        && let Some((length, rest)) = rest.split_first_chunk()
        && let Some((bytes, rest)) = rest.split_at_checked(u32::from_ne_bytes(*length) as usize)
    {
        answers.push(match i32::from_ne_bytes(*number) {
            0 => Ok(bytes.to_vec()),
            number => Err(io::Error::from_raw_os_error(number)),
        });
        received = rest;
    }
    answers
}

impl Drop for SeparateProcess {
    fn drop(&mut self) {
        self.send_kill();
    }
}

// The register of processes that may hang: children in containers, and probes of filesystems.
//
// A process whose request a FUSE daemon or a file server took ends only with the answer, whatever
// becomes of its starter. Without a register, each restart of the agent and each create would add
// such processes. All programs share the register, a folder with a file for each process:
//
// | lock of the file | holder | meaning |
// |---|---|---|
// | flock(2) | the process | the process is alive |
// | `F_OFD_SETLK` of fcntl(2) | its starter | the starter still waits for the process |
//
// The kernel frees each lock at the end of its holder, also after SIGKILL. So a live process
// without a starter hangs.

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
        directory.mode(0o700).create(&folder)?;
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
                Err(Errno::EXIST) => {}
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
        let Ok(file) = File::options().read(true).custom_flags(flags).open(&path) else {
            continue;
        };
        if !is_alive(&file) {
            let _ = fs::remove_file(&path);
        } else if !has_starter(&file) {
            let read = io::read_to_string(file.take(MAX_SUBJECT));
            hanging.extend(read.ok());
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
    use std::process::Command;
    use std::thread::sleep;

    use super::*;

    #[test]
    fn half_an_answer_is_none() {
        let mut whole = Vec::new();
        for record in [
            &5i32.to_ne_bytes()[..],
            &0u32.to_ne_bytes(),
            &0i32.to_ne_bytes(),
            &9u32.to_ne_bytes(),
            b"/cut",
        ] {
            whole.extend_from_slice(record);
        }
        assert_eq!(answers(&whole).len(), 1);
    }

    #[test]
    fn it_holds_nothing_but_its_end_of_the_pipe() {
        assert_eq!(open_descriptors(), 2);
    }

    /// The number of descriptors in a separate process.
    fn open_descriptors() -> u8 {
        // Leaves pipes with lower and with higher numbers than the pipe of the separate process.
        let mut more: Vec<_> = (0..8)
            .map(|_| pipe_with(PipeFlags::empty()).unwrap())
            .collect();
        drop(more.drain(2..6));
        let mut process = SeparateProcess::start(|pipe| {
            // The count includes the pipe, and the descriptor that reads the folder.
            let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
            pipe.write_all(&[open as u8]).unwrap();
        })
        .unwrap();
        let mut open = [0];
        process.output.read_exact(&mut open).unwrap();
        open[0]
    }

    /// The kernel may give the pid of an ended process to a new process.
    #[test]
    fn no_other_process_with_its_pid_is_ended() {
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        File::from(write)
            .write_all(&other.id().to_ne_bytes())
            .unwrap();
        drop(SeparateProcess::hold(read.into()).unwrap());
        sleep(Duration::from_millis(50));
        assert!(other.try_wait().unwrap().is_none(), "it was killed");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn it_is_ended_when_its_reader_is_gone() {
        let process = SeparateProcess::start(|_| sleep(Duration::from_secs(1000))).unwrap();
        let pidfd = process.process.as_ref().unwrap().try_clone().unwrap();
        drop(process);
        let timeout = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)).unwrap();
        assert_eq!(ended, 1, "it still works");
    }
}

#[cfg(test)]
mod hanging_processes_tests {
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
