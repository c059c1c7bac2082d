//! The journal: guards append a JSON line for each admission, many guards at once.
//!
//! Each line is a single `write` to a file opened with `O_APPEND`, which local filesystems keep
//! whole. If a full disk takes only a part of a line, that part is removed. A full file is renamed
//! to `<name>.1`, and replaces the former `<name>.1`. So the journal is bounded to twice its size,
//! and only its oldest lines are lost. Only a regular file is accepted: a fifo or a device would
//! keep a container waiting for its reader, and a partly written line could not be removed.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc::{O_NOCTTY, O_NONBLOCK};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::fault::{self, FaultPoint};
use crate::files::{self, make_folders};
use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::own_process::{leave_room, with_size_errors};
use crate::probe::answer_within;
use crate::{Failure, failed};

/// Size from which the journal is rotated, in bytes.
const FULL: u64 = 4 << 20;

/// Appends a line; `line` has no newline of its own.
///
/// # Errors
/// When the journal cannot be opened or written.
pub fn append(journal: &Path, line: &str) -> Result<(), Failure> {
    let appended = match cannot_wait(journal) {
        true => try_append(journal, line),
        false => answer_within(ANSWER_TIMEOUT, journal, || {
            try_append(journal, line).map(|()| Vec::new())
        })
        .map(drop),
    };
    appended.map_err(failed("append to", journal))
}

/// Time limit for a journal on a server: the container waits meanwhile.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(300);

/// True if the journal and its directory are on a local filesystem. Also true on a kernel that is too
/// old to detect that without waiting: its creates are recorded too.
fn cannot_wait(journal: &Path) -> bool {
    let mounts = Mounts::default();
    let folder = match Handle::cached(journal.parent().unwrap_or(journal)) {
        Ok(folder) => mounts.is_local(&folder),
        Err(error) => matches!(
            error.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
        ),
    };
    // The journal may be a symlink to a server's file.
    folder && files::cannot_wait(journal, |handle| mounts.is_local(handle))
}

fn try_append(journal: &Path, line: &str) -> io::Result<()> {
    if let Some(directory) = journal.parent() {
        make_folders(directory, 0o755)?;
    }
    let mut file = open(journal)?;
    leave_room(&file)?;
    with_size_errors(|| write_whole(&mut file, format!("{line}\n").as_bytes()))?;
    fault::reach(FaultPoint::Journaled);
    let written = file.metadata()?;
    if written.len() >= FULL {
        rotate(journal, &file, &written)
    } else {
        Ok(())
    }
}

/// Opens a regular file without waiting: opening a fifo waits for its reader, and opening some
/// devices starts their work.
fn open(journal: &Path) -> io::Result<File> {
    let found = match fs::metadata(journal) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return Err(no_regular_file());
    }
    let file = match open_at_once(journal) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            // Any reader of the file can have a lease on it, which keeps writers out for 45 s and
            // can be taken again (fcntl(2)). A lease is on the file and not on its name. So the
            // line goes into a new file, and the old file is kept as at a rotation. Another guard
            // may have moved the file already: the new file stays.
            let found = found.map(|found| found.ino());
            if fs::metadata(journal).is_ok_and(|now| found.is_none_or(|found| found == now.ino())) {
                fs::rename(journal, rotated(journal))?;
            }
            open_at_once(journal)?
        }
        opened => opened?,
    };
    // Another file may have the name by now.
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(no_regular_file())
    }
}

fn no_regular_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")
}

fn open_at_once(journal: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .custom_flags(O_NONBLOCK | O_NOCTTY)
        .open(journal)
}

/// Writes the whole line or nothing.
fn write_whole(file: &mut File, line: &[u8]) -> io::Result<()> {
    let taken = file.write(line)?;
    if taken == line.len() {
        return Ok(());
    }
    let end = file.stream_position()?;
    // Removes the partial line, unless another guard appended a line meanwhile. A full disk has no
    // room for such a line.
    if file.metadata()?.len() == end {
        file.set_len(end - taken as u64)?;
    }
    let at_limit = getrlimit(Resource::Fsize)
        .current
        .is_some_and(|limit| limit <= end);
    Err(if at_limit { Errno::FBIG } else { Errno::NOSPC }.into())
}

/// Only one guard moves a full file away: a second guard would move the new file over the full
/// file.
///
/// Any reader of the file can hold that lock for ever. So a file of twice the size is moved without
/// the lock. At worst two guards move the file at once, and old lines are lost.
fn rotate(journal: &Path, file: &File, written: &Metadata) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) if written.len() < 2 * FULL => return Ok(()),
        Err(Errno::WOULDBLOCK) => {}
        locked => locked?,
    }
    // A different guard may have renamed the file before the lock was taken: then the path leads to
    // a new file.
    if fs::metadata(journal).is_ok_and(|now| now.ino() == written.ino()) {
        fault::reach(FaultPoint::Rotating);
        fs::rename(journal, rotated(journal))?;
        fault::reach(FaultPoint::Rotated);
    }
    Ok(())
}

fn rotated(journal: &Path) -> PathBuf {
    let mut name = journal.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

#[cfg(test)]
#[allow(unsafe_code, reason = "no library takes a lease")]
mod tests {
    use super::*;

    #[test]
    fn a_full_journal_makes_room() {
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("new/journal.jsonl");
        append(&journal, &"x".repeat(FULL as usize)).unwrap();
        append(&journal, "{}").unwrap();
        assert_eq!(fs::read_to_string(&journal).unwrap(), "{}\n");
        assert!(folder.path().join("new/journal.jsonl.1").metadata().is_ok());
    }

    /// Issue 14: a container with a read-only hostPath of `/run` can have a lease on the journal,
    /// without any capability.
    #[test]
    fn a_reader_that_has_a_lease_on_the_journal_keeps_no_line_out() {
        use nix::libc::{F_RDLCK, F_SETLEASE, F_WRLCK, SIGURG, fcntl};
        use std::os::fd::AsRawFd;

        /// `F_SETSIG` of the kernel's `include/uapi/asm-generic/fcntl.h`
        const F_SETSIG: i32 = 10;

        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("journal.jsonl");
        for kind in [F_RDLCK, F_WRLCK] {
            fs::write(&journal, "old\n").unwrap();
            let reader = File::open(&journal).unwrap();
            // SAFETY: numbers alone. The kernel's SIGIO would end this process; SIGURG is ignored
            // by default.
            let leased = unsafe {
                fcntl(reader.as_raw_fd(), F_SETSIG, SIGURG);
                fcntl(reader.as_raw_fd(), F_SETLEASE, kind)
            };
            assert_eq!(leased, 0, "{}", io::Error::last_os_error());
            append(&journal, "{}").unwrap();
            append(&journal, "{}").unwrap();
            assert_eq!(fs::read_to_string(&journal).unwrap(), "{}\n{}\n");
            drop(reader);
            assert_eq!(fs::read_to_string(rotated(&journal)).unwrap(), "old\n");
        }
    }

    /// Issue 14: a container with a read-only hostPath of `/run` can lock the journal.
    #[test]
    fn a_reader_that_locks_the_journal_does_not_let_it_grow_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("journal.jsonl");
        append(&journal, "{}").unwrap();
        let reader = File::open(&journal).unwrap();
        flock(&reader, FlockOperation::LockExclusive).unwrap();
        for _ in 0..2 {
            append(&journal, &"x".repeat(FULL as usize)).unwrap();
        }
        append(&journal, "{}").unwrap();
        assert_eq!(fs::read_to_string(&journal).unwrap(), "{}\n");
    }
}
