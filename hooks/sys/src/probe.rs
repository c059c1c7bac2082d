//! Probes sources without waiting for those that do not answer.
//!
//! A runtime first walks to the path of a bind's source and calls stat(2). A dead mount answers
//! these with ENOTCONN, ESTALE or not at all (containerd#10828). A separate process makes the
//! calls. A filesystem with a probe that hangs is silent without another probe.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bindguard_core::text::{below, lies_in};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;

use crate::fork::is_readable;
use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::separate_process::{End, SeparateProcess, hanging, write_answer};

pub use crate::separate_process::Timeouts;

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
            if let Some(filesystem) = filesystem_of(path, &Mounts::default()) {
                remember_silent(filesystem, process);
            }
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
        if end != End::Closed
            && let Some(filesystem) = filesystem
        {
            remember_silent(filesystem, process);
        }
    }
    Ok(answers)
}

fn probing<'p>(paths: impl Iterator<Item = &'p PathBuf>) -> io::Result<SeparateProcess> {
    SeparateProcess::start_listable(|pipe| {
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
// [register](crate::separate_process) lists the process of a silent probe until its end, and until
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

/// Ends the process of a silent probe, and remembers that process until its end.
fn remember_silent(filesystem: String, process: SeparateProcess) {
    if let Some(not_listed) = process.kill_and_list(&filesystem) {
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
    let mut process = SeparateProcess::start_listable(|pipe| write_answer(pipe, work()))?;
    process.read_until(Timeouts::of(time))?;
    if let Some(answer) = process.answers().pop() {
        return answer;
    }
    if let Some(filesystem) = filesystem_of(path, &Mounts::default()) {
        remember_silent(filesystem, process);
    }
    let why = format!("it did not answer within {} ms", time.as_millis());
    Err(io::Error::new(io::ErrorKind::TimedOut, why))
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
