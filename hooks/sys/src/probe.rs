//! Probes sources without waiting for those that do not answer.
//!
//! A runtime first walks to the path of a bind's source and calls stat(2). A dead mount answers
//! these with ENOTCONN, ESTALE or not at all (containerd#10828). A separate process makes the
//! calls. A filesystem with [a probe that hangs](crate::hanging_probes) is silent without another
//! probe.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;

use crate::handle::{Handle, HandleError};
use crate::hanging_probes::{SilentFilesystem, silent_filesystems};
use crate::mounts::Mounts;
use crate::separate_process::{End, SeparateProcess, answers, read_until, write_answer};

pub use crate::separate_process::Patience;

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
pub fn probe(paths: &[PathBuf], patience: Patience) -> io::Result<Vec<Answer>> {
    let (mounts, hanging) = (Mounts::default(), silent_filesystems());
    let hangs = |path: &PathBuf| {
        SilentFilesystem::of(path, &mounts).is_some_and(|filesystem| hanging.contains(&filesystem))
    };
    let silent = match hanging.is_empty() {
        true => None,
        false => paths.iter().position(hangs),
    };
    let mut answers = answers_before(silent.unwrap_or(paths.len()), paths, patience)?;
    if silent == Some(answers.len()) {
        answers.push(Answer::Silent(patience.each));
    }
    answers.resize_with(paths.len(), || Answer::NotProbed);
    Ok(answers)
}

/// The answers of the first paths, up to the first that is silent.
fn answers_before(count: usize, paths: &[PathBuf], patience: Patience) -> io::Result<Vec<Answer>> {
    let paths = &paths[..count];
    if paths.is_empty() {
        return Ok(Vec::new());
    }
    let mut process = SeparateProcess::start_listable(|pipe| {
        paths.iter().for_each(|path| write_probe(pipe, path));
    })?;
    let (received, end) = read_until(process.output(), patience)?;
    let mut answers = probes(&received);
    if let Some(silent) = paths.get(answers.len()).filter(|_| end == End::Silence) {
        if let Some(filesystem) = SilentFilesystem::of(silent, &Mounts::default()) {
            filesystem.add(process);
        }
        answers.push(Answer::Silent(patience.each));
    }
    Ok(answers)
}

/// Probes all paths at the same time, for `patience` in all. A path that hangs delays only the
/// later paths of its filesystem, which are silent then. Returns the answers in the order of the
/// paths. A process costs a millisecond, so this function serves only the paths that [`probe`]
/// left.
///
/// # Errors
/// When no process can be made.
pub fn probe_side_by_side(paths: &[PathBuf], patience: Duration) -> io::Result<Vec<Answer>> {
    let mut answers: Vec<Answer> = paths.iter().map(|_| Answer::NotProbed).collect();
    let (mut started, hanging) = (Vec::new(), silent_filesystems());
    for (filesystem, indexes) in by_filesystem(paths) {
        if filesystem.as_ref().is_some_and(|it| hanging.contains(it)) {
            indexes
                .iter()
                .for_each(|it| answers[*it] = Answer::Silent(patience));
            continue;
        }
        let process = SeparateProcess::start_listable(|pipe| {
            indexes
                .iter()
                .for_each(|index| write_probe(pipe, &paths[*index]));
        })?;
        started.push((filesystem, indexes, process));
    }
    let start = Instant::now();
    for (filesystem, indexes, mut process) in started {
        let left = patience.saturating_sub(start.elapsed());
        let all_left = Patience {
            each: left,
            all: left,
        };
        let (received, end) = read_until(process.output(), all_left)?;
        let mut received = probes(&received).into_iter();
        for index in indexes {
            let silence = || match end {
                End::Closed => Answer::NotProbed,
                End::Silence | End::OutOfTime => Answer::Silent(patience),
            };
            answers[index] = received.next().unwrap_or_else(silence);
        }
        if end != End::Closed
            && let Some(filesystem) = filesystem
        {
            filesystem.add(process);
        }
    }
    Ok(answers)
}

/// Groups the indexes of the paths by filesystem. A path on no server or daemon has a group of its
/// own.
fn by_filesystem(paths: &[PathBuf]) -> Vec<(Option<SilentFilesystem>, Vec<usize>)> {
    let mounts = Mounts::default();
    let mut groups: Vec<(Option<SilentFilesystem>, Vec<usize>)> = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        let filesystem = SilentFilesystem::of(path, &mounts);
        let known = groups
            .iter_mut()
            .find(|(it, _)| it.is_some() && *it == filesystem);
        match known {
            Some((_, indexes)) => indexes.push(index),
            None => groups.push((filesystem, vec![index])),
        }
    }
    groups
}

fn write_probe(pipe: &mut File, path: &Path) {
    let answer = probe_path(path).map(|path| path.into_os_string().into_vec());
    write_answer(pipe, answer);
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
    let handle = Handle::follow(path).map_err(HandleError::into_io)?;
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
fn probes(received: &[u8]) -> Vec<Answer> {
    let answers = answers(received).into_iter();
    let probe = |answer: io::Result<Vec<u8>>| match answer {
        Ok(path) => Answer::Reached(OsString::from_vec(path).into()),
        Err(error) => Answer::Refused(error),
    };
    answers.map(probe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_and_missing_paths_are_answered_in_order() {
        let paths = ["/", "/nowhere", "/proc/self/../version"].map(PathBuf::from);
        let patience = Patience {
            each: Duration::from_secs(10),
            all: Duration::from_secs(10),
        };
        let answers = probe(&paths, patience).unwrap();
        assert!(matches!(&answers[0], Answer::Reached(path) if path == Path::new("/")));
        assert!(
            matches!(&answers[1], Answer::Refused(error) if error.kind() == io::ErrorKind::NotFound)
        );
        assert!(matches!(&answers[2], Answer::Reached(path) if path == Path::new("/proc/version")));
    }

    #[test]
    fn many_paths_that_answer_are_never_silent() {
        let paths = vec![PathBuf::from("/proc/version"); 50_000];
        let patience = Patience {
            each: Duration::from_secs(1),
            all: Duration::from_millis(30),
        };
        let answers = probe(&paths, patience).unwrap();
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
