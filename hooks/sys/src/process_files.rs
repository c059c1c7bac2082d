//! Reads files below `/proc/PID` of processes that may be hostile, without waiting for them.
//!
//! | file | lock of the process that the kernel takes |
//! |---|---|
//! | `cmdline`, `environ`, `maps`, `smaps`, `pagemap`, `numa_maps`, `map_files` | mmap_lock |
//! | `stat`, `exe`, `cwd`, `root`, `fd/*`, `ns/*`, `wchan`, `stack`, `io`, `syscall`, `auxv` | exec_update_lock, at least on Linux 6.18 |
//! | `comm`, `cgroup`, `status`, `statm`, `mountinfo`, the list of `fd` | none that a process can hold |
//!
//! A process holds its mmap_lock for as long as it wants in a write to a FUSE file that it mapped.
//! It holds its exec_update_lock in an execve(2) that closes a file of a FUSE daemon. A hung NFS
//! server has the same effect. So a separate process reads the first two rows, with a time limit:
//! SIGKILL ends a reader that waits for such a lock. [`crate::enter::open_process_file`] opens such
//! a file.
//!
//! On a busy node the separate process itself may wait for a processor. That time does not count:
//! the process whose file is read is not to blame.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::own_process::is_runnable;
use crate::probe::{End, SeparateProcess, Timeouts, write_answer};

/// Time limit for a file, as a number of intervals: the separate process waits for a lock in each
/// interval.
const BLOCKED_INTERVALS: u32 = 3;
const BLOCKED_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for all files of a call without a limit of its own.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest file that is read. A process decides how long its `cmdline` and its `maps` are.
const MAX_CONTENT: u64 = 16 << 20;

/// The longest `cmdline` that is read: runtimes and supervisors have short arguments.
const MAX_ARGUMENTS: u64 = 64 << 10;

/// The size of all answers of a call, after which no further file is read.
const MAX_ANSWERS: usize = 64 << 20;

/// A file of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFile {
    pub pid: u32,
    /// The file, in any `/proc`.
    pub path: PathBuf,
}

impl ProcessFile {
    /// The file with this name below `/proc/PID`.
    pub fn of(pid: u32, name: &str) -> Self {
        Self {
            pid,
            path: format!("/proc/{pid}/{name}").into(),
        }
    }

    /// The file `name` of each process.
    pub(crate) fn of_each(pids: &[u32], name: &str) -> Vec<Self> {
        pids.iter().map(|pid| Self::of(*pid, name)).collect()
    }
}

/// The contents of these files, in the same order. The error of a process that holds its lock is
/// `TimedOut`.
pub fn contents(files: &[ProcessFile]) -> Vec<io::Result<Vec<u8>>> {
    contents_within(CALL_TIMEOUT, files)
}

/// The same within a shorter time. The error of a file that was not read in time is `TimedOut`.
pub fn contents_within(time: Duration, files: &[ProcessFile]) -> Vec<io::Result<Vec<u8>>> {
    read(time, files, |path| read_at_most(MAX_CONTENT, path), Ok)
}

/// The targets of these links, in the same order.
pub fn links(files: &[ProcessFile]) -> Vec<io::Result<PathBuf>> {
    links_within(CALL_TIMEOUT, files)
}

/// The same within a shorter time. The error of a file that was not read in time is `TimedOut`.
pub fn links_within(time: Duration, files: &[ProcessFile]) -> Vec<io::Result<PathBuf>> {
    let target = |path: &Path| Ok(fs::read_link(path)?.into_os_string().into_vec());
    read(time, files, target, |bytes| {
        Ok(OsString::from_vec(bytes).into())
    })
}

/// The inode numbers of the files that these links lead to, in the same order.
pub fn inodes(files: &[ProcessFile]) -> Vec<io::Result<u64>> {
    inodes_within(CALL_TIMEOUT, files)
}

/// The same within a shorter time. The error of a file that was not read in time is `TimedOut`.
pub fn inodes_within(time: Duration, files: &[ProcessFile]) -> Vec<io::Result<u64>> {
    let inode = |path: &Path| Ok(fs::metadata(path)?.ino().to_ne_bytes().to_vec());
    read(time, files, inode, |bytes| match bytes.try_into() {
        Ok(bytes) => Ok(u64::from_ne_bytes(bytes)),
        Err(_) => Err(ErrorKind::InvalidData.into()),
    })
}

/// Reads the arguments of the processes in the order of `pids`, the program's name first.
pub fn arguments_of(pids: &[u32]) -> Vec<io::Result<Vec<String>>> {
    let files = ProcessFile::of_each(pids, "cmdline");
    let arguments = |path: &Path| read_at_most(MAX_ARGUMENTS, path);
    read(CALL_TIMEOUT, &files, arguments, |bytes| {
        let mut words = Vec::new();
        for word in bytes.split(|byte| *byte == 0) {
            if !word.is_empty() {
                words.push(String::from_utf8_lossy(word).into_owned());
            }
        }
        Ok(words)
    })
}

/// Reads a part of each file in a separate process, and parses it in this process.
fn read<T>(
    time: Duration,
    files: &[ProcessFile],
    part: fn(&Path) -> io::Result<Vec<u8>>,
    parse: fn(Vec<u8>) -> io::Result<T>,
) -> Vec<io::Result<T>> {
    let (start, mut answers, mut size) = (Instant::now(), Vec::new(), 0);
    while let Some(next) = files.get(answers.len()) {
        if size > MAX_ANSWERS {
            answers.resize_with(files.len(), || Err(Errno::FBIG.into()));
            break;
        }
        let rest = &files[answers.len()..];
        let left = time.saturating_sub(start.elapsed());
        match read_until_silence(rest, part, left) {
            Ok(read) if read.is_empty() => {
                // The lock belongs to the process: its next files would only cost the time limit
                // again.
                let others = rest.iter().take_while(|file| file.pid == next.pid);
                answers.extend(others.map(|_| Err(ErrorKind::TimedOut.into())));
            }
            Ok(read) => {
                size += read.iter().flatten().map(Vec::len).sum::<usize>();
                answers.extend(read.into_iter().map(|bytes| bytes.and_then(parse)));
            }
            Err(error) => answers.push(Err(error)),
        }
    }
    answers
}

/// The answers up to the first file that gives none.
fn read_until_silence(
    files: &[ProcessFile],
    part: fn(&Path) -> io::Result<Vec<u8>>,
    all: Duration,
) -> io::Result<Vec<io::Result<Vec<u8>>>> {
    if all.is_zero() {
        return Ok(Vec::new());
    }
    let mut process = SeparateProcess::start(None, |pipe| {
        let mut size = 0;
        for file in files {
            let answer = part(&file.path);
            size += answer.as_ref().map_or(0, Vec::len);
            write_answer(pipe, answer);
            if size > MAX_ANSWERS {
                break;
            }
        }
    })?;
    let end = read_until_blocked(&mut process, all)?;
    let read = process.answers();
    // A separate process that was killed would otherwise look like a process that gives no answer.
    if read.is_empty() && end == End::Closed {
        Err(ErrorKind::UnexpectedEof.into())
    } else {
        Ok(read)
    }
}

/// Reads until the pipe closes, the separate process waits for a lock, or the time is over.
fn read_until_blocked(process: &mut SeparateProcess, all: Duration) -> io::Result<End> {
    let (start, mut intervals) = (Instant::now(), 0);
    loop {
        let before = process.received.len();
        let end = process.read_until(Timeouts {
            each: BLOCKED_INTERVAL,
            all: all.saturating_sub(start.elapsed()),
        })?;
        let is_blocked = process.received.len() == before && !is_runnable(process.pid);
        intervals = if is_blocked { intervals + 1 } else { 0 };
        if end != End::Silence || intervals == BLOCKED_INTERVALS {
            return Ok(end);
        }
    }
}

/// The content of a file; EFBIG if the file is longer.
fn read_at_most(limit: u64, path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limited = &mut fs::File::open(path)?.take(limit + 1);
    if limited.read_to_end(&mut bytes)? as u64 > limit {
        Err(Errno::FBIG.into())
    } else {
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::thread::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);

    /// On a busy node a process gets a processor late. The kernel reports the same state for a
    /// running process and for a process that waits for a processor.
    #[test]
    fn a_process_that_waits_for_a_processor_is_not_blocked() {
        let mut process = SeparateProcess::start(None, |pipe| {
            let start = Instant::now();
            while start.elapsed() < 4 * LIMIT {}
            write_answer(pipe, Ok(b"late".to_vec()));
        })
        .unwrap();
        let end = read_until_blocked(&mut process, 100 * LIMIT).unwrap();
        assert_eq!(end, End::Closed);
        assert_eq!(process.answers().pop().unwrap().unwrap(), b"late");
    }

    #[test]
    fn a_process_that_waits_for_anything_else_is_blocked() {
        let mut process = SeparateProcess::start(None, |_| sleep(100 * LIMIT)).unwrap();
        let end = read_until_blocked(&mut process, 100 * LIMIT).unwrap();
        assert_eq!((process.received.len(), end), (0, End::Silence));
    }

    /// Without this limit a stopped process would be waited for without end.
    #[test]
    fn a_process_that_never_answers_is_left_in_time() {
        let mut process = SeparateProcess::start(None, |_| {
            let start = Instant::now();
            while start.elapsed() < 100 * LIMIT {}
        })
        .unwrap();
        let end = read_until_blocked(&mut process, LIMIT).unwrap();
        assert_eq!((process.received.len(), end), (0, End::OutOfTime));
    }
}
