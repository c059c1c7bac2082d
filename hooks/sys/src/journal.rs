//! The journal: guards append a JSON line for each admission, refresh and release, many guards at
//! once.
//!
//! A line has the time, and at most `MAX_LINE` bytes. Each line is a single `write` to a file opened
//! with `O_APPEND`, which local filesystems keep whole. If a full disk takes only a part of a line,
//! that part is removed. A full file is renamed to `<name>.1`, and replaces the former `<name>.1`.
//! So the journal is bounded to twice its size, and only its oldest lines are lost. Only a regular
//! file is accepted: a fifo or a device would keep a container waiting for its reader, and a partly
//! written line could not be removed.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::identity::Identity;
use bindguard_core::report::{CreateLine, RebindLine, RefreshLine, ReleaseLine, Report, Unchecked};
use bindguard_core::spec::SpecView;
use bindguard_core::text;
use nix::libc::{O_NOCTTY, O_NONBLOCK};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::files::{leave_room, make_folders, read_spec, with_size_errors};
use crate::handle::{Handle, cannot_wait};
use crate::mounts::Mounts;
use crate::own_process::FaultPoint;
use crate::probe::answer_within;
use crate::{Failure, failed};

/// Size from which the journal is rotated, in bytes.
const FULL: u64 = 4 << 20;

/// Appends a line; `line` has no newline of its own.
///
/// # Errors
/// When the journal cannot be opened or written.
pub fn append(journal: &Path, line: &str) -> Result<(), Failure> {
    let appended = match is_on_this_node(journal) {
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
fn is_on_this_node(journal: &Path) -> bool {
    let mounts = Mounts::default();
    let folder = match Handle::cached(journal.parent().unwrap_or(journal)) {
        Ok(folder) => mounts.is_local(&folder),
        Err(error) => matches!(
            error.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
        ),
    };
    // The journal may be a symlink to a server's file.
    folder && cannot_wait(journal, |handle| mounts.is_local(handle))
}

fn try_append(journal: &Path, line: &str) -> io::Result<()> {
    if let Some(directory) = journal.parent() {
        make_folders(directory, 0o755)?;
    }
    let mut file = open(journal)?;
    leave_room(&file)?;
    with_size_errors(|| write_whole(&mut file, format!("{line}\n").as_bytes()))?;
    FaultPoint::Journaled.reach();
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
        FaultPoint::Rotating.reach();
        fs::rename(journal, rotated(journal))?;
        FaultPoint::Rotated.reach();
    }
    Ok(())
}

fn rotated(journal: &Path) -> PathBuf {
    let mut name = journal.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

// The lines.

/// The size limit of a line, in bytes: a journal is rotated only after a line, so a line must not
/// exceed the journal's limit.
const MAX_LINE: usize = 256 << 10;

/// The size limit of a text, in bytes, when a line would be too long. A path is no longer than
/// this.
const MAX_TEXT: usize = 4096;

/// The number of problems that are kept when a line would be too long.
const MAX_PROBLEMS: usize = 16;

/// The time in UTC; none if the clock shows a year past 9999.
fn now() -> Option<String> {
    OffsetDateTime::now_utc().format(&Rfc3339).ok()
}

/// Keeps the first items that fit into half of a line. Returns the number of left-out items.
fn shorten<T: Serialize>(items: &mut Vec<T>) -> Option<usize> {
    let (all, mut room) = (items.len(), MAX_LINE / 2);
    items.retain(|item| {
        let size = serde_json::to_string(item).map_or(usize::MAX, |text| text.len() + 1);
        let fits = size <= room;
        room -= if fits { size } else { 0 };
        fits
    });
    Some(all - items.len())
}

fn cut(text: &str) -> String {
    text::cut(text, MAX_TEXT).into_owned()
}

fn cut_all(problems: &mut Vec<String>) {
    problems.truncate(MAX_PROBLEMS);
    for problem in problems {
        *problem = cut(problem);
    }
}

// The line about a create.

/// Appends a line about a create, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record(journal: &Path, mut line: CreateLine<&Report>) -> Result<(), Failure> {
    line.time = now();
    line.refused = line.refused.as_deref().map(cut);
    let mut short = None;
    let place = &mut short;
    append_short(journal, line, move |line| {
        let (report, omitted_binds) = shortened(line.report);
        line.report = place.insert(report);
        line.omitted_binds = omitted_binds;
        line.id = line.id.as_deref().map(cut);
    })
}

/// Appends an entry about a create whose guard did not come to an end, with the names that the
/// bundle has. `refused`: why policy refused the create.
///
/// # Errors
/// If the line cannot be written.
pub fn record_unchecked(
    journal: &Path,
    (bundle, id): (&Path, Option<&str>),
    attempt: u32,
    (how, why): (Unchecked, &str),
    refused: Option<&str>,
) -> Result<(), Failure> {
    let mut report = named_report(bundle);
    let problem = format!("no guard checked this create: {why}");
    report.problems.push(problem);
    let mut line = CreateLine::new(&report);
    line.id = id.map(str::to_owned);
    line.attempt = attempt;
    line.unchecked = Some(how);
    line.refused = refused.map(str::to_owned);
    record(journal, line)
}

/// The same report in at most half of a line, and the number of binds left out. Healthy binds are
/// left out first.
fn shortened(report: &Report) -> (Report, Option<usize>) {
    let mut short = report.clone();
    short
        .binds
        .sort_by_key(|bind| !bind.finding.verdict.is_finding());
    let omitted_binds = shorten(&mut short.binds);
    let bundle = report.bundle.as_deref();
    short.bundle = bundle.map(|path| cut(&path.to_string_lossy()).into());
    let Identity { container, pod } = &mut short.container;
    for name in [container, &mut pod.uid, &mut pod.namespace, &mut pod.name] {
        *name = name.as_deref().map(cut);
    }
    cut_all(&mut short.problems);
    (short, omitted_binds)
}

// The lines about repairs between creates: of a volume's subpaths on the host, and of a running
// container, whose mounts are refreshed or released.

/// Appends a line about the subpaths of a volume, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_rebind(journal: &Path, mut line: RebindLine) -> Result<(), Failure> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_binds = shorten(&mut line.binds);
        cut_all(&mut line.problems);
    })
}

/// Appends a line about a running container, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_refresh(journal: &Path, mut line: RefreshLine) -> Result<(), Failure> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_mounts = shorten(&mut line.mounts);
        cut_all(&mut line.problems);
    })
}

/// Appends a line about the copies that a running container was to release, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_release(journal: &Path, mut line: ReleaseLine) -> Result<(), Failure> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_copies = shorten(&mut line.copies);
    })
}

/// Appends a line, shortened if it is too long.
fn append_short<L: Serialize>(
    journal: &Path,
    mut line: L,
    shorten: impl FnOnce(&mut L),
) -> Result<(), Failure> {
    let json = |line: &L| {
        let act = "write a line of the journal as JSON";
        serde_json::to_string(line).map_err(failed(act, Path::new("")))
    };
    let mut text = json(&line)?;
    if text.len() > MAX_LINE {
        shorten(&mut line);
        text = json(&line)?;
    }
    append(journal, &text)
}

/// A report with the names that the bundle has. A bundle that cannot be read has no names: the runtime
/// reports the bundle.
pub fn named_report(bundle: &Path) -> Report {
    let mut report = Report::about_bundle(bundle);
    if let Ok(bytes) = read_spec(bundle)
        && let Ok(spec) = SpecView::from_bytes(&bytes)
    {
        report.container = Identity::from_spec(&spec);
    }
    report
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
