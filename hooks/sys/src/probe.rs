//! Probes sources without waiting for those that do not answer.
//!
//! A runtime first walks to the path of a bind's source and calls stat(2). A dead mount answers
//! these with ENOTCONN, ESTALE or not at all (containerd#10828). A separate process makes the
//! calls. A filesystem with a probe that hangs is silent without another probe.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bindguard_core::text::{below, lies_in};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};

use crate::handle::Handle;
use crate::kernel::close_all_but;
use crate::mounts::Mounts;
use crate::own_process::{Registered, fork_child, hanging, is_readable};

/// The result of a probe.
#[derive(Debug)]
pub enum Answer {
    /// The path exists. The value is the path with every symlink followed.
    Reached(PathBuf),
    /// The kernel's error from the walk or from stat(2).
    Refused(io::Error),
    /// No answer within this time.
    Silent(Duration),
    /// The path was not probed, or not for long enough: an earlier path gave no answer, or there
    /// are too many paths.
    NotProbed,
}

/// Probes all of these paths, in their order. The answers are in the same order.
///
/// # Errors
/// When no process can be made.
pub fn probe(paths: &[PathBuf], timeouts: Timeouts) -> io::Result<Vec<Answer>> {
    let (mounts, silent) = (Mounts::default(), silent_filesystems());
    let mut first_silent = None;
    if !silent.is_empty() {
        first_silent = paths.iter().position(|path| {
            filesystem_of(path, &mounts).is_some_and(|filesystem| silent.contains(&filesystem))
        });
    }
    let to_probe = &paths[..first_silent.unwrap_or(paths.len())];
    let mut answers = Vec::new();
    if !to_probe.is_empty() {
        let mut process = probing(to_probe.iter())?;
        let end = process.read_until(timeouts)?;
        answers = probed(&process);
        if let Some(path) = to_probe.get(answers.len())
            && end == End::Silence
        {
            remember_silent(filesystem_of(path, &Mounts::default()), process);
            answers.push(Answer::Silent(timeouts.each));
        }
    }
    if first_silent == Some(answers.len()) {
        answers.push(Answer::Silent(timeouts.each));
    }
    answers.resize_with(paths.len(), || Answer::NotProbed);
    Ok(answers)
}

/// Probes all paths at the same time, for `timeout` in all. A path that hangs delays only the
/// later paths of its filesystem, which are silent then. Returns the answers in the order of the
/// paths. A process costs a millisecond, so this function serves only the paths that [`probe`]
/// left.
///
/// # Errors
/// When no process can be made.
pub fn probe_side_by_side(paths: &[PathBuf], timeout: Duration) -> io::Result<Vec<Answer>> {
    let (mounts, silent) = (Mounts::default(), silent_filesystems());
    // The indexes of the paths of each filesystem. A path on no server or daemon is a group of its
    // own.
    let mut groups: Vec<(Option<String>, Vec<usize>)> = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        let filesystem = filesystem_of(path, &mounts);
        let known = groups
            .iter_mut()
            .find(|(known, _)| known.is_some() && *known == filesystem);
        match known {
            Some((_, indexes)) => indexes.push(index),
            None => groups.push((filesystem, vec![index])),
        }
    }
    let mut answers: Vec<Answer> = Vec::new();
    answers.resize_with(paths.len(), || Answer::NotProbed);
    let mut started = Vec::new();
    for (filesystem, indexes) in groups {
        if filesystem.as_ref().is_some_and(|it| silent.contains(it)) {
            for index in indexes {
                answers[index] = Answer::Silent(timeout);
            }
            continue;
        }
        let process = probing(indexes.iter().map(|index| &paths[*index]))?;
        started.push((filesystem, indexes, process));
    }
    let start = Instant::now();
    for (filesystem, indexes, mut process) in started {
        let left = timeout.saturating_sub(start.elapsed());
        let end = process.read_until(Timeouts::of(left))?;
        let mut probed = probed(&process).into_iter();
        for index in indexes {
            answers[index] = match probed.next() {
                Some(answer) => answer,
                None if end == End::Closed => Answer::NotProbed,
                None => Answer::Silent(timeout),
            };
        }
        if end != End::Closed {
            remember_silent(filesystem, process);
        }
    }
    Ok(answers)
}

/// Without room in /run the process is not listed: a full disk stops no create.
fn listable() -> Option<Registered> {
    Registered::unlisted().ok()
}

fn probing<'p>(paths: impl Iterator<Item = &'p PathBuf>) -> io::Result<SeparateProcess> {
    SeparateProcess::start(listable(), |pipe| {
        for path in paths {
            let answer = probe_path(path).map(|path| path.into_os_string().into_vec());
            write_answer(pipe, answer);
        }
    })
}

fn probe_path(path: &Path) -> io::Result<PathBuf> {
    match walk(path) {
        // The client trusts a name for up to a minute. A statx(2) of the path itself makes the
        // kernel walk again and query the server for each name: by now the name may belong to a new file.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::STALE) => {
            rustix::fs::statx(
                CWD,
                path,
                AtFlags::STATX_FORCE_SYNC,
                StatxFlags::BASIC_STATS,
            )?;
            walk(path)
        }
        answer => answer,
    }
}

fn walk(path: &Path) -> io::Result<PathBuf> {
    let handle = Handle::follow(path).map_err(|error| error.source)?;
    // This forces the server's own answer: for a second or so the kernel would answer for a dead
    // daemon.
    rustix::fs::statx(
        &handle,
        "",
        AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC,
        StatxFlags::BASIC_STATS,
    )?;
    handle.resolved_path()
}

/// The probes that were answered completely.
fn probed(process: &SeparateProcess) -> Vec<Answer> {
    let mut probed = Vec::new();
    for answer in process.answers() {
        probed.push(match answer {
            Ok(path) => Answer::Reached(OsString::from_vec(path).into()),
            Err(error) => Answer::Refused(error),
        });
    }
    probed
}

// Remembers probes that hang: no filesystem is probed again while its last probe hangs.
//
// A process whose request a FUSE daemon took ends only with the answer. Each further probe of the
// filesystem would add such a process, for as long as the daemon is silent: the kubelet tries the
// create of a container again and again, and each guard is a process of its own. So the
// [register](crate::own_process) lists the process of a silent probe until its end, and until
// then the filesystem counts as silent for all programs.
//
// The device names the filesystem. A volume that is mounted anew has a new device and is probed at
// once, and a hanging process keeps the number of the old device in use. Local filesystems do not
// count.

/// The limit of filesystems on the way to a path.
const MAX_FILESYSTEMS: usize = 16;

/// The silent filesystems and the pidfds of their probes, where the register cannot be written.
static NOT_LISTED: Mutex<Vec<(String, OwnedFd)>> = Mutex::new(Vec::new());

/// The filesystem on a server or a daemon for which a walk to a path may wait, by its device;
/// `None` for a local filesystem. Where the kernel has only a part of the path in its cache, a mount
/// in the rest of the path may be the silent mount as well: then the name has all these devices, and
/// is equal only to a name with the same devices.
///
/// A pod cannot make the volume of another pod count as silent: the guard's own probe hung on this
/// very filesystem, and so would the runtime of each pod that binds the filesystem.
fn filesystem_of(path: &Path, mounts: &Mounts) -> Option<String> {
    // The root of a mount is always in the cache.
    let (known, handle) = path
        .ancestors()
        .find_map(|known| Some((known, Handle::cached(known).ok()?)))?;
    let handle = handle.unqueried();
    let mount = mounts.mount_of(&handle).ok()?.entry;
    let mut devices = BTreeSet::new();
    if !mount.fs_type.is_local() {
        devices.insert(mount.device);
    }
    if path != known {
        let from = handle.resolved_path().ok()?;
        let end = from.join(below(path, known)?);
        for mount in mounts.complete_table().ok()?.entries() {
            let place = &mount.mount_point;
            let is_on_the_way = *place != from && lies_in(place, &from) && lies_in(&end, place);
            if is_on_the_way && !mount.fs_type.is_local() {
                devices.insert(mount.device);
            }
        }
    }
    if devices.is_empty() || devices.len() > MAX_FILESYSTEMS {
        return None;
    }
    let mut filesystem = "filesystem".to_owned();
    for device in devices {
        filesystem.push_str(&format!(" {device}"));
    }
    Some(filesystem)
}

/// Ends the process of a silent probe, and remembers that process until its end. A local filesystem
/// is not remembered.
fn remember_silent(filesystem: Option<String>, process: SeparateProcess) {
    if let Some(filesystem) = filesystem
        && let Some(not_listed) = process.kill_and_list(&filesystem)
    {
        not_listed_here().push((filesystem, not_listed));
    }
}

/// The filesystems with a probe that hangs.
fn silent_filesystems() -> Vec<String> {
    let mut silent = hanging();
    for (filesystem, _) in not_listed_here().iter() {
        silent.push(filesystem.clone());
    }
    silent
}

fn not_listed_here() -> MutexGuard<'static, Vec<(String, OwnedFd)>> {
    let mut hanging = NOT_LISTED.lock().unwrap_or_else(PoisonError::into_inner);
    hanging.retain(|(_, process)| !is_readable(process, Duration::ZERO));
    hanging
}

/// Does work with this path in a separate process, which may hang in this one's place.
///
/// # Errors
/// Those of the work. `TimedOut` without a number of the kernel if there is no answer in time, or
/// if an earlier process hangs on the filesystem.
pub(crate) fn answer_within(
    time: Duration,
    path: &Path,
    work: impl FnOnce() -> io::Result<Vec<u8>>,
) -> io::Result<Vec<u8>> {
    let silent = silent_filesystems();
    if !silent.is_empty()
        && let Some(filesystem) = filesystem_of(path, &Mounts::default())
        && silent.contains(&filesystem)
    {
        let why = "an earlier request to its server or daemon still has no answer";
        return Err(io::Error::new(io::ErrorKind::TimedOut, why));
    }
    let mut process = SeparateProcess::start(listable(), |pipe| write_answer(pipe, work()))?;
    process.read_until(Timeouts::of(time))?;
    if let Some(answer) = process.answers().pop() {
        return answer;
    }
    remember_silent(filesystem_of(path, &Mounts::default()), process);
    let why = format!("it did not answer within {} ms", time.as_millis());
    Err(io::Error::new(io::ErrorKind::TimedOut, why))
}

// Separate processes, so that the caller never waits for work that hangs.
//
// A request that a FUSE daemon or a file server took and never answers cannot be interrupted, not
// even by SIGKILL. And execve(2) waits for every thread of a process to end. So a process that is
// not a child of the caller does the work. The process is forked twice, and init (or the shim, as
// subreaper) reaps the process. The only open descriptor of the process is the end of a pipe.
// Otherwise a container's stdout would stay open for as long as a server does not answer.

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
    /// Starts `work`, whose output can be read. `work` must not use anything that another thread may
    /// have locked. A process that may hang is `registered`, and can be
    /// [listed](Self::kill_and_list).
    pub(crate) fn start(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_and_missing_paths_are_answered_in_order() {
        let paths = ["/", "/nowhere", "/proc/self/../version"].map(PathBuf::from);
        let timeouts = Timeouts {
            each: Duration::from_secs(10),
            all: Duration::from_secs(10),
        };
        let answers = probe(&paths, timeouts).unwrap();
        assert!(matches!(&answers[0], Answer::Reached(path) if path == Path::new("/")));
        assert!(
            matches!(&answers[1], Answer::Refused(error) if error.kind() == io::ErrorKind::NotFound)
        );
        assert!(matches!(&answers[2], Answer::Reached(path) if path == Path::new("/proc/version")));
    }

    #[test]
    fn many_paths_that_answer_are_never_silent() {
        let paths = vec![PathBuf::from("/proc/version"); 50_000];
        let timeouts = Timeouts {
            each: Duration::from_secs(1),
            all: Duration::from_millis(30),
        };
        let answers = probe(&paths, timeouts).unwrap();
        assert_eq!(answers.len(), paths.len());
        assert!(
            answers
                .iter()
                .all(|answer| matches!(answer, Answer::Reached(_) | Answer::NotProbed))
        );
    }

    #[test]
    fn side_by_side_the_order_stays() {
        let paths = ["/", "/nowhere", "/proc/version"].map(PathBuf::from);
        let answers = probe_side_by_side(&paths, Duration::from_secs(10)).unwrap();
        assert!(matches!(&answers[0], Answer::Reached(path) if path == Path::new("/")));
        assert!(
            matches!(&answers[1], Answer::Refused(error) if error.kind() == io::ErrorKind::NotFound)
        );
        assert!(matches!(&answers[2], Answer::Reached(path) if path == Path::new("/proc/version")));
    }
}

#[cfg(test)]
mod hanging_probes_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::thread::sleep;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn an_error_without_a_number_is_no_success() {
        let answer = |kind: io::ErrorKind| {
            let work = || Err(io::Error::new(kind, "no number"));
            answer_within(Duration::from_secs(10), Path::new("/"), work)
                .unwrap_err()
                .kind()
        };
        let invalid = io::ErrorKind::InvalidInput;
        assert_eq!(answer(invalid), invalid);
        let other = answer(io::ErrorKind::Other);
        assert_eq!(other, io::Error::from(Errno::IO).kind());
        let late = answer_within(Duration::from_millis(10), Path::new("/"), || {
            sleep(Duration::from_secs(1000));
            Ok(Vec::new())
        });
        let late = late.unwrap_err();
        assert_eq!(
            (late.kind(), late.raw_os_error()),
            (io::ErrorKind::TimedOut, None)
        );
    }
}

#[cfg(test)]
mod separate_process_tests {
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
        let mut process = SeparateProcess::start(None, |pipe| {
            // The count includes the pipe, and the descriptor that reads the folder.
            let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
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
        let process = SeparateProcess::start(None, |_| sleep(Duration::from_secs(1000))).unwrap();
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
